"""What the readings of an emulated rank add up to: micro batches that were not run are like the
steady ones, and fills, which stand for what peers would have sent, are taken off."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

import torch

from fourfold.engine import compat
from fourfold.engine.microbench import kernel_times
from fourfold.engine.microbench.kernels import Kernel, Product, stage_kernels
from fourfold.engine.observe.phases import STEP_PHASES, phase_of, steady
from fourfold.engine.one_rank.fake_peers import Fill, TrafficLog
from fourfold.engine.one_rank.profile import MicroBatchProfiler
from fourfold.engine.parallel.groups import World
from fourfold.result.one_rank import KernelTime, PhaseTime, Traffic
from fourfold.result.report import RankMemory
from fourfold.spec.run import RunSpec

# Axes whose weights FSDP gathers on streams of its own, beside the compute of a GPU.
_BESIDE = ("dp", "edp")


@dataclass(slots=True)
class StageFacts:
    """What is known of the rank's part of the model when the model itself is gone again."""

    spec: RunSpec
    world: World
    axes: dict[str, str]
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
class StepReadings:
    """What the steps left behind; `intervals` are of `taken` of them."""

    step_s: list[float]
    intervals: dict[str, list[float]]
    taken: int
    traffic: TrafficLog
    profiler: MicroBatchProfiler
    memory: RankMemory


def kept_bytes(stage: StageFacts) -> int:
    """What micro batches that were not run would keep: their numbers, tokens and targets (int64) at
    the ends, their losses at the last."""
    batch, world = stage.spec.batch, stage.world
    tokens = batch.micro_batch * batch.seq_len // stage.spec.layout.cp
    each = 8 * batch.micro_batch + (2 * 8 * tokens if world.is_first or world.is_last else 0)
    if world.is_last:
        compute = compat.activation_dtype(stage.spec.policy.dtypes.compute)
        each += torch.promote_types(compute, torch.float32).itemsize
    return stage.more * each


def step_flops(stage: StageFacts, kernels: list[Kernel]) -> int:
    """Of a whole step: products and attention, every query-key pair counted."""
    flops = stage.more * sum(kernel.calls * kernel.flops for kernel in kernels)
    for size, count in stage.sizes.items():
        flops += count * sum(kernel.calls * kernel.flops for kernel in stage.kernels(size))
    return flops


def fill_seconds(
    traffic: TrafficLog, axes: dict[str, str], device: torch.device
) -> dict[str, float]:
    """Seconds of fills in a step by phase, where they are in the way of the compute."""
    beside = _BESIDE if device.type == "cuda" else ()
    counted: Counter[tuple[str, Fill]] = Counter()
    for (phase, group, fill), count in traffic.fills.items():
        if axes.get(group, group) not in beside:
            counted[phase_of(phase), fill] += count
    kinds = list(dict.fromkeys(fill for _, fill in counted))
    seconds = dict(zip(kinds, kernel_times.time_fills(kinds, device, 0.3), strict=True))
    by_phase: dict[str, float] = {}
    for (phase, fill), count in counted.items():
        by_phase[phase] = by_phase.get(phase, 0.0) + count * seconds[fill]
    return by_phase


def phase_times(
    readings: StepReadings, micro_s: dict[str, float], fills: dict[str, float], stage: StageFacts
) -> tuple[list[PhaseTime], float]:
    """Phases of a micro batch and of a step without fills, and the seconds of a whole step. `once`:
    what a step has besides, such as the first gather and the last reduction of gradients."""
    phases = []
    for name, seconds in micro_s.items():
        filled = min(seconds, fills.get(name, 0.0) / stage.ran)
        phases.append(PhaseTime(name=name, seconds=seconds - filled, filled_s=filled))
    sum_s = sum(phase.seconds for phase in phases)
    filled_s = stage.ran * sum(phase.filled_s for phase in phases)
    for name in STEP_PHASES:
        seconds = median(readings.intervals.get(name, [0.0]))
        filled = min(seconds, fills.get(name, 0.0))
        filled_s += filled
        phases.append(PhaseTime(name=name, seconds=seconds - filled, filled_s=filled))
    step_s = median(readings.step_s) - filled_s
    known = sum_s * stage.ran + sum(p.seconds for p in phases if p.name in STEP_PHASES)
    phases.append(PhaseTime(name="once", seconds=step_s - known))
    return phases, step_s + stage.more * sum_s


def step_traffic(
    traffic: TrafficLog, axes: dict[str, str], stage: StageFacts
) -> tuple[Traffic, ...]:
    """Payload of a whole step by axis and collective; groups of one rank have no axis."""
    total: Counter[tuple[str, str]] = Counter()
    for (group, kind), count in traffic.total.items():
        if kind.startswith(("send", "recv")):
            # Hand-overs are one for each micro batch, but may be posted in any phase.
            each = count / stage.ran
        else:
            each = sum(steady(traffic.of((group, kind)), stage.ran).values())
        if group in axes:
            total[axes[group], kind] += count + round(stage.more * each)
    return tuple(
        Traffic(axis=axis, op=kind, bytes=size, calls=total[axis, f"{kind} calls"])
        for (axis, kind), size in sorted(total.items())
        if not kind.endswith(" calls")
    )


def kernel_time(kernel: Kernel, seconds: float) -> KernelTime:
    if isinstance(kernel, Product):
        makes: str = kernel.makes
    else:
        makes = "gradients" if kernel.backward else "output"
    return KernelTime(
        part=kernel.part,
        name=kernel.name,
        makes=makes,
        when=kernel.when,
        shape=kernel.shape,
        calls=kernel.calls,
        seconds=seconds,
        flops=kernel.flops,
    )
