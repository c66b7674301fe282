"""Steps under torch's profiler, as a Chrome trace that 'fourfold diagnose' and other tools read."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from fourfold.engine.observe.clock import synchronize
from fourfold.engine.process.task import Task
from fourfold.engine.training.trainer import Trainer
from fourfold.errors import UserError
from fourfold.files import refused
from fourfold.installed import __version__
from fourfold.result.trace import STEP_MARK, TRACE_KEY, TracedRun, trace_window
from fourfold.spec import codec

RECORDED_STEPS = 3  # that follow each other as in a long run


def lead_steps(device: torch.device) -> int:
    """Steps between a profiler's preparation and what it records: a GPU that idled for a second
    runs above its lasting clock for about another."""
    return 4 if device.type == "cuda" else 1


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
            version=__version__,
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
