"""Times calls on the device's own clock, reads clocks between steps, and ends warm-up. Steps under
torch's profiler are written as a Chrome trace that 'fourfold diagnose' and other tools read.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import fourfold
from fourfold.engine.process.task import Task, uuid_of
from fourfold.engine.training.trainer import Trainer
from fourfold.errors import UserError
from fourfold.files import refused
from fourfold.result.machine import Sampler
from fourfold.result.timing import ENDINGS, LEAD, WINDOW, Warmup, verdict
from fourfold.result.trace import STEP_MARK, TRACE_KEY, TracedRun, trace_window
from fourfold.spec import codec

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


@contextlib.contextmanager
def _permitted() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # a driver may keep its counters to itself
        hint = "omit it, or let the driver's administrator allow profiling"
        raise UserError(f"cannot profile: {error}", field="trace", hint=hint) from None


class StepRecording:
    """From `begin` to `end` every `step` is one mark of the trace. Operators have their shapes; the
    run's description is in it, so that nobody has to guess."""

    def __init__(self, trainer: Trainer, path: Path, *, stand_in: bool = False) -> None:
        self.trainer, self.path, self.stand_in = trainer, path, stand_in
        self._profiler: profile | None = None

    def begin(self, lead: Callable[[], object] | None = None) -> None:
        """`lead` runs between what takes a profiler a second to prepare and the trace itself: a
        device that idled meanwhile would begin at another clock."""
        activities = [ProfilerActivity.CPU]
        if self.trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True)
        with _permitted():
            profiler.prepare_trace()
        if lead is not None:
            lead()
        synchronize(self.trainer.device)
        with _permitted():
            profiler.start_trace()
        run = TracedRun(
            version=fourfold.__version__,
            rank=self.trainer.world.rank,
            stand_in=self.stand_in,
            spec=self.trainer.spec,
        )
        profiler.add_metadata_json(TRACE_KEY, json.dumps(codec.encode(run, sparse=True)))
        self._profiler = profiler

    def step(self, index: int) -> record_function:
        """The mark of a step, to run it in."""
        return record_function(f"{STEP_MARK}{index}")

    def end(self) -> None:
        assert self._profiler is not None
        synchronize(self.trainer.device)
        self._profiler.stop_trace()
        ending = ".json.gz" if self.path.name.endswith(".gz") else ".json"
        half = self.path.with_name(f".{self.path.name}.{os.getpid()}{ending}")
        try:
            self._profiler.export_chrome_trace(str(half))
            os.replace(half, self.path)
        except OSError as error:
            raise refused(error, self.path, field="trace", verb="written") from None
        finally:
            half.unlink(missing_ok=True)
            self._profiler = None


def record_steps(trainer: Trainer, path: Path, first: int, *, stand_in: bool = False) -> None:
    """A few further steps from `first` on, whose times are nobody's measurement."""
    recording = StepRecording(trainer, path, stand_in=stand_in)
    began = first + lead_steps(trainer.device)
    recording.begin(lambda: [trainer.step(index) for index in range(first, began)])
    for index in range(began, began + RECORDED_STEPS):
        with recording.step(index):
            trainer.step(index)
    recording.end()


class WindowRecording:
    """Option `trace_steps` of a training: those steps, in a file of each rank."""

    def __init__(self, task: Task, trainer: Trainer) -> None:
        asked = task.job.option("trace_steps")
        self._first, self._last = trace_window(asked) if asked else (0, 0)
        folder = Path(task.job.option("out")) / "traces"
        path = folder / f"steps-{self._first}-{self._last}.rank{task.rank}.json.gz"
        self._recording, self._is_on = StepRecording(trainer, path), False

    @contextlib.contextmanager
    def of(self, number: int, before_change: Callable[[], None]) -> Iterator[None]:
        """Around a step. `before_change` ends a window of timed steps: a profiler that starts or
        writes is no part of them."""
        if not self._first <= number <= self._last:
            yield
            return
        if not self._is_on:
            before_change()
            self._recording.path.parent.mkdir(exist_ok=True)
            self._recording.begin()
            self._is_on = True
        with self._recording.step(number):
            yield
        if number == self._last:
            before_change()
            self.end()

    def end(self) -> None:
        if self._is_on:
            self._recording.end()
            self._is_on = False


RECORDED_STEPS = 3  # that follow each other as in a long run


def lead_steps(device: torch.device) -> int:
    """Steps between a profiler's preparation and what it records: a GPU that idled for a second
    runs above its lasting clock for about another."""
    return 4 if device.type == "cuda" else 1
