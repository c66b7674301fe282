"""Times calls on the device's own clock, reads clocks between steps, and ends warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fourfold.engine.process.task import uuid_of
from fourfold.result.machine import Sampler
from fourfold.result.timing import ENDINGS, LEAD, WINDOW, Warmup, verdict

# One reading spans at least this long, so that the clock's own cost and grain do not matter.
_READING_S = 0.002


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Lower quartile of as many readings as the budget allows. On a CPU a call that alone takes the
    whole budget is not repeated; a GPU's first call loads kernels and says nothing."""
    first_s = reading(work, device, 1)
    if first_s > budget_s and device.type == "cpu":
        return first_s
    until = time.perf_counter() + budget_s
    once_s = max(1e-9, reading(work, device, 1))
    calls = max(1, round(_READING_S / once_s))
    readings = [once_s] if calls == 1 else []
    while not readings or (time.perf_counter() < until and len(readings) < 1000):
        readings.append(reading(work, device, calls))
    return lower_quartile(readings)


def lower_quartile(readings: Sequence[float]) -> float:
    """Neighbours on the machine only add to a reading; the very lowest may be the clock's luck."""
    return sorted(readings)[len(readings) // 4]


def reading(work: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / calls
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


@dataclass(slots=True)
class Ticks:
    """Clock readings between steps: n + 1 of them around n steps."""

    device: torch.device
    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    events: list[torch.cuda.Event] = field(default_factory=list)

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.busy.append(time.process_time())
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)

    def step_s(self) -> list[float]:
        """Only after the device has caught up."""
        if self.events:
            pairs = zip(self.events, self.events[1:], strict=False)
            return [first.elapsed_time(last) / 1e3 for first, last in pairs]
        return [b - a for a, b in zip(self.wall, self.wall[1:], strict=False)]

    def busy_s(self) -> list[float]:
        if self.events:
            return []  # a GPU's waiting is inside its communication kernels, which no clock shows
        return [b - a for a, b in zip(self.busy, self.busy[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class WarmupTicks:
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
    """`run(n)` does the next n steps, without synchronisation inside. Collective: every rank makes
    the same number of them."""
    ticks = [run(LEAD)]
    sampler = Sampler(uuid_of(device)) if rank == 0 else None
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
