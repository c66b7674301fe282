"""The one-rank job: one rank of any world on one device with real kernels; its peers are emulated,
so nothing waits and a step's time is the rank's compute. Then the same kernels are timed alone."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fourfold.engine.compat import local
from fourfold.engine.jobs.build import counts, with_trainer
from fourfold.engine.jobs.dryrun import with_micro_batches
from fourfold.engine.jobs.run import Steps
from fourfold.engine.microbench import kernel_times
from fourfold.engine.microbench.device import copy
from fourfold.engine.microbench.kernels import Kernel, Product, is_again
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.memory import retries
from fourfold.engine.observe.phases import PhaseTimeline, attach, axes_of, steady
from fourfold.engine.observe.recording import lead_steps, record_steps
from fourfold.engine.one_rank import fake_peers, totals
from fourfold.engine.one_rank.fake_peers import TrafficLog
from fourfold.engine.one_rank.profile import MicroBatchProfiler
from fourfold.engine.process.task import Task, environment
from fourfold.engine.training.trainer import Trainer
from fourfold.result.one_rank import DevicePart, Floor, OneRankResult
from fourfold.result.trace import numbered
from fourfold.spec.run import RunSpec

_KERNELS_ALONE_S = {"cuda": 2.0, "cpu": 0.5}
_LEAST_RUN = 4  # micro batches: the first and the last differ from the others


def perform(task: Task) -> None:
    """Options, one number for each run: `ranks`; `micro_batches` to run, 0 all (else enough). For
    the floor `hot_s`, seconds to measure it, and `least`, bytes of each run that can't be avoided:
    of a layer, the first and the last end, and an element of the weights. `trace`: a file for
    further steps under the profiler."""
    spec = task.spec
    spec.batch.without_ramp()
    rank = int(task.job.option("ranks", "0").split(",")[task.index])
    wanted = task.job.option("micro_batches")
    ran = micro_batches_to_run(spec, wanted.split(",")[task.index] if wanted else "")
    stage, readings = _steps(task, rank, ran)
    stage.more = spec.batch.micro_count(spec.layout.dp) - ran
    task.answer(_result(task, rank, stage, readings))


def micro_batches_to_run(spec: RunSpec, wanted: str = "") -> int:
    """Enough to reach the fullest moment: gradients exist, and all that may be are in flight."""
    whole = spec.batch.micro_count(spec.layout.dp)
    if wanted:
        return min(int(wanted) or whole, whole)
    if spec.policy.schedule == "gpipe" and spec.layout.pp > 1:
        return whole  # holds every micro batch
    enough = max(_LEAST_RUN, spec.layout.pp * min(2, spec.policy.virtual_stages) + 2)
    return whole if whole <= enough + 1 else enough


def _result(
    task: Task, rank: int, stage: totals.StageFacts, readings: totals.StepReadings
) -> OneRankResult:
    """The model is gone: its kernels are timed alone, and both are put together."""
    device, memory = task.device(task.spec.device), readings.memory
    task.heartbeat.enter("kernels alone")
    kernels = stage.kernels(max(stage.sizes))
    alone = _alone(task, stage, kernels, device)
    fills = totals.fill_seconds(readings.traffic, stage.axes, device)
    task.heartbeat.step_done()
    micro_s = steady(readings.intervals, stage.ran * readings.taken)
    phases, compute_s = totals.phase_times(readings, micro_s, fills, stage)
    return OneRankResult(
        rank=rank,
        world=stage.spec.gpus,
        stage=stage.world.stage,
        layers=len(stage.layers),
        micro_batches=stage.ran + stage.more,
        ran=stage.ran,
        step_s=tuple(readings.step_s),
        compute_s=compute_s,
        phases=tuple(phases),
        comm=totals.step_traffic(readings.traffic, stage.axes, stage),
        flops=totals.step_flops(stage, kernels),
        peak_bytes=memory.peak_bytes + totals.kept_bytes(stage),
        reserved_bytes=memory.reserved_bytes,
        retries=memory.retries,
        peaks_from="ledger" if counts(stage.spec, device) else "allocator",
        device=dict(environment(device, task.place)).get("device", device.type),
        torch=torch.__version__,
        parts=tuple(DevicePart(name=n, seconds=s) for n, s in readings.profiler.parts().items()),
        parts_note=readings.profiler.refusal,
        watched=(readings.profiler.watched, readings.profiler.turned),
        **alone,
    )


def _alone(
    task: Task, stage: totals.StageFacts, kernels: list[Kernel], device: torch.device
) -> dict[str, Any]:
    """Kernels and the update, timed alone, and (`hot_s`) the floor: fields of OneRankResult."""
    budget_s, spec = _KERNELS_ALONE_S[device.type], stage.spec
    kernel_s = kernel_times.time_kernels(kernels, spec, device, budget_s)
    return {
        "kernels": tuple(totals.kernel_time(*pair) for pair in zip(kernels, kernel_s, strict=True)),
        "floor": floor_of(task, stage, kernels, kernel_s, device)
        if task.job.option("hot_s")
        else None,
        "update_s": kernel_times.time_update(stage.elements, spec.policy, device, budget_s / 10),
        "update_elements": stage.elements,
    }


def floor_of(
    task: Task,
    stage: totals.StageFacts,
    kernels: list[Kernel],
    kernel_s: list[float],
    device: torch.device,
) -> Floor:
    """Kernels and copies in a loop. What each takes of it is as when it was timed alone."""
    hot_s = float(task.job.option("hot_s"))
    least = [float(word) for word in task.job.option("least").split(",")[task.index].split()]
    alone = {(a, p): 0.0 for a in (True, False) for p in (True, False)}
    for kernel, seconds in zip(kernels, kernel_s, strict=True):
        alone[is_again(kernel), isinstance(kernel, Product)] += kernel.calls * seconds
    spec, (of_layer, of_first, of_last, of_element) = stage.spec, least
    moved = of_layer * len(stage.layers)
    moved += stage.world.is_first * of_first + stage.world.is_last * of_last
    updated = of_element * stage.elements
    copied = copy(2**30 if device.type == "cuda" else 2**26, device, hot_s / 10)
    needed = [kernel for kernel in kernels if not is_again(kernel)]
    every = moved + updated / (stage.ran + stage.more)
    hot = kernel_times.hot_seconds(needed, every, spec, device, hot_s)
    apart = alone[False, True] + alone[False, False] + every / copied.bytes_per_s
    ratio = hot / apart
    return Floor(
        products_s=ratio * alone[False, True],
        attention_s=ratio * alone[False, False],
        again_products_s=ratio * alone[True, True],
        again_attention_s=ratio * alone[True, False],
        moved_bytes=moved,
        update_bytes=updated,
        bytes_per_s=copied.bytes_per_s / ratio,
    )


def _steps(task: Task, rank: int, ran: int) -> tuple[totals.StageFacts, totals.StepReadings]:
    spec = with_micro_batches(task.spec, ran)
    specs = tuple(spec if i == task.index else other for i, other in enumerate(task.job.specs))
    task = replace(task, job=replace(task.job, specs=specs))
    traffic_log = TrafficLog()

    def join(device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        fake_peers.join(rank, spec.gpus, traffic_log)

    return with_trainer(
        task,
        lambda trainer, ledger: (_stage(trainer), _run(Steps(task, trainer, ledger), traffic_log)),
        join=join,
    )


def _stage(trainer: Trainer) -> totals.StageFacts:
    return totals.StageFacts(
        spec=trainer.spec,
        world=trainer.world,
        axes=axes_of(trainer.world, trainer.spec.model),
        layers=[index for chunk in trainer.chunks for index in chunk.blocks],
        sizes=Counter(trainer.sizes),
        elements=sum(local(parameter).numel() for parameter in trainer.parameters()),
        more=0,
    )


def _run(steps: Steps, traffic_log: TrafficLog) -> totals.StepReadings:
    """Warm-up, one step whose messages are counted by phase, timed steps, then one that is watched:
    the device is as warm as in the timed ones."""
    spec, trainer, graph = steps.task.spec, steps.trainer, steps.trainer.step_graph
    device = trainer.device
    fake_peers.restrict_to_vocab_shard(trainer)
    listeners: list[Callable[[str], None]] = []
    line = PhaseTimeline(device, listeners)
    attach(trainer, line.mark)
    if graph is not None:
        graph.eager_steps = 2**62  # messages and kernels are read off as they start
    steps.run(max(1, spec.warmup - 1))
    traffic_log.take()
    listeners.append(traffic_log.enter)
    steps.run(1)
    listeners.remove(traffic_log.enter)
    traffic = traffic_log.take()
    if graph is not None:
        graph.eager_steps = 0
        steps.run(1)
    synchronize(device)
    line.take()
    gc.collect()
    ticks = steps.run(spec.steps)
    synchronize(device)
    taken = 1 if line.recorded else spec.steps
    intervals = line.take()
    steps.peak.note()
    memory = steps.peak.memory(
        rank=steps.task.rank,
        stage=trainer.world.stage,
        counted_bytes=steps.peak_bytes,
        retries=retries(device),
    )
    profiler = _watched(steps, listeners)
    _trace(steps)
    return totals.StepReadings(ticks.step_s(), intervals, taken, traffic, profiler, memory)


def _watched(steps: Steps, listeners: list[Callable[[str], None]]) -> MicroBatchProfiler:
    """A step under the profiler, kernel by kernel, after others to be warm again."""
    trainer = steps.trainer
    if trainer.step_graph is not None:
        trainer.step_graph.forget()
        trainer.step_graph.eager_steps = 2**62
    profiler = MicroBatchProfiler(trainer.device, len(trainer.sizes) * len(trainer.chunks))
    profiler.warm_up()
    steps.run(lead_steps(trainer.device))
    listeners.append(profiler.note)
    steps.run(1)
    listeners.remove(profiler.note)
    return profiler


def _trace(steps: Steps) -> None:
    task, name = steps.task, steps.task.job.option("trace")
    if name:
        if steps.trainer.step_graph is not None:
            steps.trainer.step_graph.eager_steps = 0
            steps.run(1)
        path = Path(name) if task.index == 0 else numbered(Path(name), str(task.index + 1))
        record_steps(steps.trainer, path, len(steps.results), stand_in=task.spec.gpus > 1)
