"""The stand-in job: one rank of any world on one device, real kernels, collectives that only fill.

The trainer itself runs its own schedule in a world of one (engine/lone.py); nothing waits, so a
step's time is the rank's compute. Long steps run as many micro batches as reach the fullest moment
and are continued with the steady ones. Then the same kernels are timed alone.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from fourfold.engine import bare, compat, lone
from fourfold.engine.account import axes_of, watch
from fourfold.engine.clock import synchronize
from fourfold.engine.dryrun import with_micro_batches
from fourfold.engine.environment import environment
from fourfold.engine.kernels import Kernel, Product, stage_kernels
from fourfold.engine.ledger import Ledger
from fourfold.engine.lone import Book, Fill, Messages
from fourfold.engine.measure import Steps, limit_memory, refuse
from fourfold.engine.parts import Lens
from fourfold.engine.pieces import local
from fourfold.engine.task import Task
from fourfold.engine.timeline import STEP_PHASES, Timeline, attach, phase_of, steady
from fourfold.engine.trainer import Trainer
from fourfold.engine.world import World
from fourfold.result.dryrun import Traffic
from fourfold.result.stand_in import BareKernel, DevicePart, PhaseTime, StandIn
from fourfold.spec.run import RunSpec

# Axes whose messages a GPU handles on streams of their own, beside the compute.
_BESIDE = ("dp",)
_BARE_S = {"cuda": 2.0, "cpu": 0.5}
_LEAST_RUN = 4  # micro batches: the first and the last differ from the others


def perform(task: Task) -> None:
    """Options, one number for each run: `ranks`; `micro_batches` to run, 0 all (else enough)."""
    compat.quiet()
    refuse(task.spec)
    rank = int(task.job.option("ranks", "0").split(",")[task.index])
    device = task.device(task.spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    limit_memory(task.spec, device)
    wanted = task.job.option("micro_batches")
    ran = micro_batches_to_run(task.spec, wanted.split(",")[task.index] if wanted else "")
    try:
        task.answer(stand_in(task, rank, ran, device))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _let_go(device)


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def micro_batches_to_run(spec: RunSpec, wanted: str = "") -> int:
    """Enough to reach the fullest moment: gradients exist, and all that may be are in flight."""
    whole = spec.batch.micro_count(spec.layout.dp)
    if wanted:
        return min(int(wanted) or whole, whole)
    if spec.policy.schedule == "gpipe" and spec.layout.pp > 1:
        return whole  # holds every micro batch
    enough = max(_LEAST_RUN, spec.layout.pp * min(2, spec.policy.virtual_stages) + 2)
    return whole if whole <= enough + 1 else enough


@dataclass(slots=True)
class _Stage:
    """What is known of the rank's part of the model when the model itself is gone again."""

    spec: RunSpec
    world: World
    layers: list[int]
    sizes: Counter[int]
    elements: int
    more: int  # micro batches of the step that were not run

    @property
    def ran(self) -> int:
        return self.sizes.total()

    def kernels(self, micro: int) -> list[Kernel]:
        last = self.world.is_last
        return stage_kernels(self.spec, self.world, self.layers, micro=micro, head=last)


@dataclass(slots=True)
class _Found:
    """What the steps left behind."""

    step_s: list[float]
    intervals: dict[str, list[float]]
    messages: Messages
    lens: Lens
    peak_bytes: int
    reserved_bytes: int
    retries: int


def stand_in(task: Task, rank: int, ran: int, device: torch.device) -> StandIn:
    """Run, let go of the model, time its kernels alone, and put both together."""
    more = task.spec.batch.micro_count(task.spec.layout.dp) - ran
    stage, found = _steps(task, rank, ran, device)
    stage.more = more
    _let_go(device)
    task.heart.mark("bare kernels")
    kernels = stage.kernels(max(stage.sizes))
    kernel_s = bare.time_kernels(kernels, stage.spec, device, _BARE_S[device.type])
    dtype = compat.DTYPES[stage.spec.policy.dtypes.param]
    update_s = bare.time_update(stage.elements, dtype, device, 0.1 * _BARE_S[device.type])
    axes = axes_of(stage.world, stage.spec.model)
    fills = _fill_seconds(found.messages, axes, device)
    task.heart.step_done()
    one = steady(found.intervals, stage.ran * len(found.step_s))
    phases, compute_s = _phases(found, one, fills, stage)
    return StandIn(
        rank=rank,
        world=stage.spec.gpus,
        stage=stage.world.stage,
        layers=len(stage.layers),
        micro_batches=stage.ran + more,
        ran=stage.ran,
        step_s=tuple(found.step_s),
        compute_s=compute_s,
        phases=tuple(phases),
        kernels=tuple(_bare(*pair) for pair in zip(kernels, kernel_s, strict=True)),
        update_s=update_s,
        update_elements=stage.elements,
        comm=_comm(found.messages, axes, stage),
        flops=_flops(stage, kernels),
        peak_bytes=found.peak_bytes + _kept_bytes(stage),
        reserved_bytes=found.reserved_bytes,
        retries=found.retries,
        peaks_from="allocator" if device.type == "cuda" else "ledger",
        device=dict(environment(device, task.place)).get("device", device.type),
        torch=torch.__version__,
        parts=tuple(DevicePart(name=n, seconds=s) for n, s in found.lens.parts().items()),
        parts_note=found.lens.refusal,
        watched=(found.lens.watched, found.lens.turned),
    )


def _steps(task: Task, rank: int, ran: int, device: torch.device) -> tuple[_Stage, _Found]:
    spec = with_micro_batches(task.spec, ran)
    specs = tuple(spec if i == task.index else one for i, one in enumerate(task.job.specs))
    task = replace(task, job=replace(task.job, specs=specs))
    book = lone.join(rank, spec.gpus)
    task.heart.mark("build")
    counts = device.type == "cpu" and not spec.policy.compile
    ledger = Ledger(limit_bytes=spec.memory_limit) if counts else None
    with ledger or contextlib.nullcontext():
        world = World.create(spec.layout, device.type)
        task.heart.stage = world.stage
        trainer = Trainer(spec, world, device=device)
        if ledger is not None:
            watch(trainer, ledger)
    stage = _Stage(
        spec=spec,
        world=world,
        layers=[index for chunk in trainer.chunks for index in chunk.blocks],
        sizes=Counter(trainer.sizes),
        elements=sum(local(p).numel() for chunk in trainer.chunks for p in chunk.parameters()),
        more=0,
    )
    return stage, _run(Steps(task, trainer, ledger), book)


def _run(steps: Steps, book: Book) -> _Found:
    """Warm-up, one step whose messages are counted by phase, timed steps, one watched step."""
    spec, trainer = steps.task.spec, steps.trainer
    device = trainer.device
    listeners: list[Callable[[str], None]] = [book.enter]
    line = Timeline(device, listeners)
    attach(trainer, line.mark)
    steps.run(max(1, spec.warmup - 1))
    messages = Messages(book)
    listeners.append(messages.note)
    steps.run(1)
    messages.close()
    listeners.remove(messages.note)
    synchronize(device)
    line.take()
    gc.collect()
    ticks = steps.run(spec.steps)
    synchronize(device)
    intervals = line.take()
    peak, reserved, retries = _memory(device, steps.peak_bytes)
    lens = Lens(device, len(trainer.sizes) * len(trainer.chunks))
    listeners.append(lens.note)
    steps.run(1)
    synchronize(device)
    return _Found(ticks.step_s(), intervals, messages, lens, peak, reserved, retries)


def _memory(device: torch.device, ledger_bytes: int) -> tuple[int, int, int]:
    """(peak, reserved, retries)."""
    if device.type == "cpu":
        return ledger_bytes, 0, 0
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    peak = torch.cuda.max_memory_allocated(device)
    return peak, torch.cuda.max_memory_reserved(device), retries


def _kept_bytes(stage: _Stage) -> int:
    """What micro batches that were not run would keep: their numbers, tokens and targets (int64) at
    the ends, their losses at the last."""
    batch, world = stage.spec.batch, stage.world
    here = batch.micro_batch * batch.seq_len // stage.spec.layout.cp
    each = 8 * batch.micro_batch + (2 * 8 * here if world.is_first or world.is_last else 0)
    if world.is_last:
        compute = compat.DTYPES[stage.spec.policy.dtypes.compute]
        each += torch.promote_types(compute, torch.float32).itemsize
    return stage.more * each


def _flops(stage: _Stage, kernels: list[Kernel]) -> int:
    """Of a whole step: products and attention, every query-key pair counted."""
    flops = stage.more * sum(kernel.calls * kernel.flops for kernel in kernels)
    for size, count in stage.sizes.items():
        flops += count * sum(kernel.calls * kernel.flops for kernel in stage.kernels(size))
    return flops


def _fill_seconds(
    messages: Messages, axes: dict[str, str], device: torch.device
) -> dict[str, float]:
    """Seconds of fills in a step by phase, where they are in the way of the compute."""
    beside = _BESIDE if device.type == "cuda" else ()
    counted: Counter[tuple[str, Fill]] = Counter()
    for (phase, group, fill), count in messages.fills.items():
        if axes.get(group, group) not in beside:
            counted[phase_of(phase), fill] += count
    kinds = list(dict.fromkeys(fill for _, fill in counted))
    seconds = dict(zip(kinds, bare.time_fills(kinds, device, 0.3), strict=True))
    found: dict[str, float] = {}
    for (phase, fill), count in counted.items():
        found[phase] = found.get(phase, 0.0) + count * seconds[fill]
    return found


def _phases(
    found: _Found, one: dict[str, float], fills: dict[str, float], stage: _Stage
) -> tuple[list[PhaseTime], float]:
    """Phases of a micro batch and of a step without fills, and the seconds of a whole step.

    `once`: what a step has besides, such as the first gather and the last reduction of gradients.
    """
    phases = []
    for name, seconds in one.items():
        filled = min(seconds, fills.get(name, 0.0) / stage.ran)
        phases.append(PhaseTime(name=name, seconds=seconds - filled, filled_s=filled))
    micro_s = sum(phase.seconds for phase in phases)
    filled_s = stage.ran * sum(phase.filled_s for phase in phases)
    for name in STEP_PHASES:
        seconds = median(found.intervals.get(name, [0.0]))
        filled = min(seconds, fills.get(name, 0.0))
        filled_s += filled
        phases.append(PhaseTime(name=name, seconds=seconds - filled, filled_s=filled))
    step_s = median(found.step_s) - filled_s
    known = micro_s * stage.ran + sum(p.seconds for p in phases if p.name in STEP_PHASES)
    phases.append(PhaseTime(name="once", seconds=step_s - known))
    return phases, step_s + stage.more * micro_s


def _comm(messages: Messages, axes: dict[str, str], stage: _Stage) -> tuple[Traffic, ...]:
    """Payload of a whole step by axis and collective; groups of one rank have no axis."""
    total: Counter[tuple[str, str]] = Counter()
    for (group, kind), count in messages.total.items():
        if kind.startswith(("send", "recv")):
            # Hand-overs are one for each micro batch, but may be posted in any phase.
            each = count / stage.ran
        else:
            each = sum(steady(messages.of((group, kind)), stage.ran).values())
        if group in axes:
            total[axes[group], kind] += count + round(stage.more * each)
    return tuple(
        Traffic(axis=axis, op=kind, bytes=size, calls=total[axis, f"{kind} calls"])
        for (axis, kind), size in sorted(total.items())
        if not kind.endswith(" calls")
    )


def _bare(kernel: Kernel, seconds: float) -> BareKernel:
    if isinstance(kernel, Product):
        makes: str = kernel.makes
    else:
        makes = "gradients" if kernel.backward else "output"
    return BareKernel(
        part=kernel.part,
        name=kernel.name,
        makes=makes,
        when=kernel.when,
        shape=kernel.shape,
        calls=kernel.calls,
        seconds=seconds,
        flops=kernel.flops,
    )
