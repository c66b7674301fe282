"""How do all ranks stop warming up after the same step? Rank 0 judges, and tells the others.

The rule is in `result.warmup`. Between decisions lies a window of steps without synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.nvidia_smi import Sampler
from fourfold.result.warmup import ENDINGS, LEAD, WINDOW, Warmup, verdict


class Ticks(Protocol):
    def step_s(self) -> list[float]: ...

    def busy_s(self) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class WarmupTicks:
    """Clock readings of every warm-up step, and how the warm-up ended."""

    ticks: tuple[Ticks, ...]
    warmup: Warmup

    def step_s(self) -> list[float]:
        return [seconds for reading in self.ticks for seconds in reading.step_s()]

    def busy_s(self) -> list[float]:
        return [seconds for reading in self.ticks for seconds in reading.busy_s()]


def by_count(run: Callable[[int], Ticks], count: int) -> WarmupTicks:
    return WarmupTicks((run(count),), Warmup(steps=count, ended="count"))


def until_steady(
    run: Callable[[int], Ticks], *, least: int, device: torch.device, rank: int
) -> WarmupTicks:
    """`run(n)` does the next n steps. Collective: every rank makes the same number of them."""
    ticks = [run(LEAD)]
    sampler = Sampler(device) if rank == 0 else None
    times: list[list[float]] = []
    clocks: list[list[float]] = []
    try:
        while True:
            ticks.append(run(WINDOW))
            synchronize(device)
            times.append(ticks[-1].step_s())
            if sampler is not None:
                clocks.append(sampler.clocks_since(sum(map(len, clocks))))
            spent_s = sum(map(sum, times))  # compiling, in the first steps, is no drift
            verdict_of_all = _agreed(verdict(times, clocks, least=least, spent_s=spent_s), device)
            if verdict_of_all.ended != "going on":
                return WarmupTicks(tuple(ticks), verdict_of_all)
    finally:
        if sampler is not None:
            sampler.stop()


def _agreed(own: Warmup, device: torch.device) -> Warmup:
    """Rank 0's verdict on every rank; one small broadcast for each window."""
    place = torch.tensor([ENDINGS.index(own.ended)], device=device)
    dist.broadcast(place, 0)
    return replace(own, ended=ENDINGS[int(place.item())])
