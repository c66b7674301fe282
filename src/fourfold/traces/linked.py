"""Kernels with the operator and the call that launched them.

Where steps begin and end on the device: by the profiler's marks, by the optimizer's kernels, or
by what repeats.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from fourfold.errors import UserError
from fourfold.result.trace import STEP_MARK
from fourfold.spec import check
from fourfold.traces.cores import find_kernel_ops
from fourfold.traces.events import Ints, NamedRange, Spans, Trace
from fourfold.traces.parts import OPTIMIZER, simple_part

Dims = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Linked:
    """`op` and `call` of each kernel are places in the trace's operators and calls; -1: none. On a
    trace without kernels the host's own operators stand for them."""

    trace: Trace
    kernels: Spans
    op: Ints
    call: Ints
    on_host: bool = False
    _dims: dict[int, Dims] = field(default_factory=dict)

    def kernel_name(self, at: int) -> str:
        return self.trace.texts[self.kernels.name[at]]

    def op_name(self, at: int) -> str:
        place = self.op[at]
        return self.trace.texts[self.trace.ops.name[place]] if place >= 0 else ""

    def dims(self, at: int) -> Dims:
        """Shapes of the operator's inputs; of a list of tensors those inside it."""
        place = self.op[at]
        return self.parsed(int(self.trace.ops.shape[place])) if place >= 0 else ()

    def strides(self, at: int) -> Dims:
        place = self.op[at]
        return self.parsed(int(self.trace.ops.detail[place])) if place >= 0 else ()

    def types(self, at: int) -> tuple[str, ...]:
        place = self.op[at]
        told = self.trace.ops.types[place] if place >= 0 else -1
        return tuple(map(str, literal(self.trace.texts[told]))) if told >= 0 else ()

    def detail(self, at: int) -> dict[str, Any]:
        told = self.kernels.detail[at]
        found = ast.literal_eval(self.trace.texts[told]) if told >= 0 else {}
        return found if isinstance(found, dict) else {}

    def parsed(self, number: int) -> Dims:
        if number < 0:
            return ()
        if number not in self._dims:
            told = literal(self.trace.texts[number])
            self._dims[number] = tuple(_sizes(one) for one in told)
        return self._dims[number]

    @cached_property
    def launch_s(self) -> Any:
        """When the host launched each kernel; where nobody knows, when it began."""
        return self._of_call(self.trace.calls.start, self.kernels.start)

    @cached_property
    def thread(self) -> Any:
        """Of the host that launched each kernel; -1: not known."""
        return self._of_call(self.trace.calls.thread, -1)

    def _of_call(self, column: Any, unknown: Any) -> Any:
        """What a column says of the call that launched each kernel."""
        if not len(column):
            return np.broadcast_to(unknown, self.call.shape)
        return np.where(self.call >= 0, column[np.maximum(self.call, 0)], unknown)


def literal(text: str) -> list[Any]:
    """A list as Python writes it; a trace may hold anything in its place."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _sizes(one: Any) -> tuple[int, ...]:
    if not isinstance(one, list):
        return ()
    if one and isinstance(one[0], list):  # a list of tensors: the first stands for all
        return _sizes(one[0])
    return tuple(size for size in one if isinstance(size, int))


def link(trace: Trace) -> Linked:
    if not len(trace.kernels):
        return _host_link(trace)
    kernels, calls, ops = trace.kernels, trace.calls, trace.ops
    call = _places(calls.correlation, kernels.correlation)
    external = kernels.external.copy()
    lacks = (external < 0) & (call >= 0)
    external[lacks] = calls.external[call[lacks]]
    return Linked(trace, kernels, _places(ops.external, external), call)


def _places(keys: Ints, wanted: Ints) -> Ints:
    """Of each wanted key, where the last one like it is; -1 where none is."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[found] == wanted) & (wanted >= 0), found, -1)


def _host_link(trace: Trace) -> Linked:
    """Of a run on cores: the operators that compute, of every thread."""
    ops, inner = trace.ops, find_kernel_ops(trace)
    none = np.full(len(inner), -1)
    kept = Spans(**{name: getattr(ops, name)[inner] for name in Spans.__annotations__})
    blank = replace(kept, correlation=none, shape=none, types=none, detail=none)
    return Linked(trace, blank, inner, none, on_host=True)


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
        steps = [
            step for step in look() if len(step.kernels) >= _LEAST_KERNELS and step.seconds > 0.0
        ]
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
    launched = linked.launch_s
    begins = np.array([mark.start for mark in marks])
    number = np.searchsorted(begins, launched, side="right") - 1
    known = (linked.call >= 0) | linked.on_host
    number = np.where(known, number, -1)
    after_end = np.array([mark.end for mark in marks])[np.maximum(number, 0)]
    number = np.where(launched <= np.maximum(after_end, marks[-1].start), number, len(marks))
    earlier = linked.kernels.end[number == -1]
    steps, before = [], float(earlier.max()) if len(earlier) else marks[0].start
    for i, mark in enumerate(marks):
        own = np.flatnonzero(number == i)
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
        op = linked.op[at]
        key = (int(linked.kernels.name[at]), int(op >= 0 and linked.trace.ops.name[op]))
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
    span = linked.kernels.end.max() - linked.kernels.start.min()
    for name, _ in sorted(zip(names, counts, strict=True), key=lambda pair: pair[1]):
        starts: Any = linked.kernels.start[linked.kernels.name == name]
        if len(starts) < 3:
            continue
        apart = np.diff(starts)
        if apart.max() < 1.2 * apart.min() and apart.sum() > 0.4 * span:
            return starts.tolist()
    return []
