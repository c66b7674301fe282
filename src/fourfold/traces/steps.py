"""Where steps begin and end on the device: by the profiler's marks, by the optimizer's kernels, or
by what repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from fourfold.errors import UserError
from fourfold.result.trace import STEP_MARK
from fourfold.spec import check
from fourfold.traces.events import NamedRange
from fourfold.traces.linked import Linked
from fourfold.traces.parts import OPTIMIZER, simple_part

# A first step so much slower than the others is still warming up.
_WARMING = 1.15
_LEAST_KERNELS = 8


@dataclass(frozen=True, slots=True)
class TracedStep:
    """From the end of the step before to the end of its own last kernel, so that a wait for its
    data is its own. `kernels` are places; `host`: the span of its mark on the host."""

    start: float
    end: float
    kernels: tuple[int, ...]
    host: tuple[float, float]

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TracedSteps:
    """`found_by`: how; `left_out`: steps that still warmed up."""

    steps: tuple[TracedStep, ...]
    found_by: str
    left_out: int

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps) / len(self.steps)

    @property
    def kernels(self) -> list[int]:
        return [at for step in self.steps for at in step.kernels]


def find_steps(linked: Linked) -> TracedSteps:
    marks = [mark for mark in linked.trace.marks if mark.name.startswith(STEP_MARK)]
    rule = "has no kernels and no operators"
    check.that(len(linked.kernels), "trace", linked.trace.path, rule, "profile again")
    ways: list[tuple[str, Callable[[], list[TracedStep]]]] = [
        ("the profiler's marks", lambda: _by_marks(linked, marks)),
        ("the optimizer's kernels", lambda: _by_bounds(linked, _optimizer_ends(linked))),
        ("repetition", lambda: _by_bounds(linked, _repeats(linked))),
    ]
    for found_by, look in ways:
        steps = [step for step in look() if len(step.kernels) >= _LEAST_KERNELS]
        if steps:
            used = _warm(steps, float(linked.kernels.start[0]))
            return TracedSteps(tuple(used), found_by, len(steps) - len(used))
    rule = "has no whole step: neither marks, nor an optimizer, nor anything that repeats"
    hint = "profile two steps or more, with prof.step() after each"
    raise UserError(rule, field="trace", value=linked.trace.path, hint=hint)


def _warm(steps: list[TracedStep], first_s: float) -> list[TracedStep]:
    """Without a first step that finds the device idle, and leading ones much slower than others."""
    if len(steps) > 2 and steps[0].start <= first_s:
        steps = steps[1:]
    while len(steps) > 2 and steps[0].seconds > _WARMING * median(s.seconds for s in steps[1:]):
        steps = steps[1:]
    return steps


def _by_marks(linked: Linked, marks: list[NamedRange]) -> list[TracedStep]:
    """A kernel belongs to the mark in which the host launched it."""
    if not marks:
        return []
    launched = linked.launch_s if not linked.on_host else linked.kernels.start
    begins = np.array([mark.start for mark in marks])
    number = np.searchsorted(begins, launched, side="right") - 1
    known = (linked.call >= 0) | linked.on_host
    number = np.where(known, number, -1)
    after_end = np.array([mark.end for mark in marks])[np.maximum(number, 0)]
    number = np.where(launched <= np.maximum(after_end, marks[-1].start), number, len(marks))
    edges = [np.flatnonzero(number == i) for i in range(len(marks))]
    earlier = linked.kernels.end[number == -1] if (number == -1).any() else np.array([])
    steps, before = [], float(earlier.max()) if len(earlier) else marks[0].start
    for mark, own in zip(marks, edges, strict=True):
        if not len(own):
            continue
        end = float(linked.kernels.end[own].max())
        before = min(before, float(linked.kernels.start[own].min()))
        steps.append(TracedStep(before, end, tuple(own.tolist()), (mark.start, mark.end)))
        before = end
    return steps


def _by_bounds(linked: Linked, bounds: list[float]) -> list[TracedStep]:
    """Between the ends of successive steps, on the device."""
    steps = []
    for start, end in pairwise(bounds):
        own = np.flatnonzero((linked.kernels.start >= start) & (linked.kernels.start < end))
        if len(own):
            launched = linked.launch_s[own]
            host = (float(launched.min()), float(launched.max()))
            steps.append(TracedStep(start, end, tuple(own.tolist()), host))
    return steps


def _optimizer_ends(linked: Linked) -> list[float]:
    """Ends of runs of optimizer kernels; between two of them lies a step."""
    known: dict[tuple[int, int], bool] = {}
    ends: list[float] = []
    since = 2**62
    for at in range(len(linked.kernels)):
        key = (
            int(linked.kernels.name[at]),
            int(linked.op[at] >= 0 and linked.trace.ops.name[linked.op[at]]),
        )
        if key not in known:
            part = simple_part(linked.kernel_name(at), linked.op_name(at))
            known[key] = part == OPTIMIZER
        if not known[key]:
            since += 1
            continue
        if since >= _LEAST_KERNELS:
            ends.append(0.0)
        ends[-1] = float(linked.kernels.end[at])
        since = 0
    return ends


def _repeats(linked: Linked) -> list[float]:
    """Starts of the rarest kernel that comes at even distances, at least three times."""
    names, counts = np.unique(linked.kernels.name, return_counts=True)
    for name, _ in sorted(zip(names, counts, strict=True), key=lambda pair: pair[1]):
        starts: Any = linked.kernels.start[linked.kernels.name == name]
        if len(starts) < 3:
            continue
        apart = np.diff(starts)
        if apart.max() < 1.2 * apart.min() and apart.sum() > 0.4 * _span(linked):
            return [float(start) for start in starts]
    return []


def _span(linked: Linked) -> float:
    return float(linked.kernels.end.max() - linked.kernels.start.min())
