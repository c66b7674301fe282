"""What the host did while the device waited: a call that blocks, memory, data, its own launches.

A step on the device: each instant belongs to the part that runs in it, computation before
communication; instants in which nothing runs belong to whoever the device waited for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.traces import parts
from fourfold.traces.events import Floats, Ints
from fourfold.traces.linked import Linked, TracedStep

# A device needs as long from one kernel to the next, even if both are there.
NO_GAP_S = 10e-6


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of a step's timeline; `what` names the call or the kernel that a gap waited for."""

    part: str
    start: float
    end: float
    what: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class TracedTimes:
    """Seconds of a step: `parts` add up to it. `moved`: of communication by axis, hidden or not."""

    seconds: float
    parts: dict[str, float]
    moved: dict[str, float]
    spans: tuple[Stretch, ...]

    @property
    def gaps(self) -> list[Stretch]:
        return [span for span in self.spans if span.part in parts.IDLE and span.what != "-"]


def step_times(
    linked: Linked, part: dict[int, str], step: TracedStep, host: HostCalls
) -> TracedTimes:
    own = sorted(step.kernels, key=lambda at: (linked.kernels.start[at], linked.kernels.end[at]))
    computes = [at for at in own if not part[at].startswith(parts.COMMUNICATION)]
    moves = [at for at in own if part[at].startswith(parts.COMMUNICATION)]
    spans = _in_turn(linked, part, computes, step)
    moved: dict[str, float] = defaultdict(float)
    for at in moves:
        moved[part[at]] += float(linked.kernels.seconds[at])
    spans = _with_moves(linked, part, moves, spans, step)
    spans += _gaps(linked, sorted(spans, key=lambda span: span.start), step, own, host)
    spans.sort(key=lambda span: span.start)
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.part] += span.seconds
    return TracedTimes(step.seconds, seconds, moved, tuple(spans))


def _in_turn(
    linked: Linked, part: dict[int, str], own: list[int], step: TracedStep
) -> list[Stretch]:
    """Kernels in the order they begin; one that overlaps has what the one before leaves."""
    spans, until = [], step.start
    starts, ends = linked.kernels.start, linked.kernels.end
    for at in own:
        begin, end = max(float(starts[at]), until), min(float(ends[at]), step.end)
        if end > begin:
            spans.append(Stretch(part[at], begin, end))
            until = end
    return spans


def _with_moves(
    linked: Linked, part: dict[int, str], moves: list[int], spans: list[Stretch], step: TracedStep
) -> list[Stretch]:
    """What is seen of communication: where nothing is computed."""
    if not moves:
        return spans
    begins = np.array([span.start for span in spans] + [step.end])
    finishes = np.array([step.start] + [span.end for span in spans])
    found, until = list(spans), step.start
    for at in moves:
        start = max(float(linked.kernels.start[at]), until)
        end = min(float(linked.kernels.end[at]), step.end)
        place = max(0, int(np.searchsorted(finishes, start, side="right")) - 1)
        while place < len(begins) and finishes[place] < end:
            low, high = max(start, finishes[place]), min(end, begins[place])
            if high > low:
                found.append(Stretch(part[at], low, high))
            place += 1
        until = max(until, end)
    return found


def _gaps(
    linked: Linked, spans: list[Stretch], step: TracedStep, own: list[int], host: HostCalls
) -> list[Stretch]:
    """Where nothing runs, with the kernel that ends it."""
    if not own:
        return []
    starts: Floats = linked.kernels.start[np.array(own)]
    gaps, until = [], step.start
    for span in (*spans, Stretch("", step.end, step.end)):
        if span.start > until:
            gap = span.start - until
            at = min(int(np.searchsorted(starts, span.start - 1e-9)), len(own) - 1)
            if gap <= NO_GAP_S:
                gaps.append(Stretch(parts.BETWEEN, until, span.start, "-"))
            else:
                cause, what = host.waited_for(until, span.start, own[at], step)
                gaps.append(Stretch(cause, until, span.start, what))
        until = max(until, span.end)
    return gaps


SYNCS, MEMORY_CALLS = (parts.pattern(kind, re.NOFLAG) for kind in ("sync", "memory"))
# A launch so long before its kernel began did not hold it up.
_AHEAD_S = 100e-6
# Calls shorter than this block nobody.
_BLOCKS_S = 20e-6
# A host that runs nothing for so long does more than prepare its next launch.
_PAUSE_S = 1e-3
_DATA_MARK = parts.pattern("data")


_COMPILED = "CompiledFunction"  # and CompiledFunctionBackward
_WaitKey = tuple[float, int, int]  # step, name and shape of the operator


class HostCalls:
    """The host's calls in a form to be asked about gaps of the device: sorted, so that a question
    costs as little in a trace of a million kernels."""

    def __init__(self, linked: Linked) -> None:
        trace = linked.trace
        self.linked, self.calls = linked, trace.calls
        self.sync, self.memory = self._chosen(SYNCS), self._chosen(MEMORY_CALLS)
        blocking = np.concatenate([self.sync, self.memory])
        blocking = blocking[self.calls.seconds[blocking] > _BLOCKS_S]
        self._blocking = blocking[np.argsort(self.calls.end[blocking], kind="stable")]
        waits = [mark for mark in trace.marks if _DATA_MARK.search(mark.name)]
        self._waits = (np.array([m.start for m in waits]), np.array([m.end for m in waits]))
        compiled = [i for i, text in enumerate(trace.texts) if text.startswith(_COMPILED)]
        calls = np.flatnonzero(np.isin(trace.ops.name, compiled))
        # On cores its kernels are no operators: they run between those that it calls.
        self._compiled = _union(trace.ops.start[calls], trace.ops.end[calls])
        self._busy = _union(
            np.concatenate([trace.ops.start, trace.calls.start]),
            np.concatenate([trace.ops.end, trace.calls.end]),
        )
        known = np.flatnonzero(linked.call >= 0)
        order = known[np.argsort(linked.launch_s[known], kind="stable")]
        self._launches = linked.launch_s[order]
        self._leads = linked.kernels.start[order] - self._launches
        self._early: dict[int, float] = {}
        self._data_keys: set[_WaitKey | None] = set()

    def _chosen(self, pattern: re.Pattern[str]) -> Ints:
        """Calls by name, in the order of their starts."""
        texts, names = self.linked.trace.texts, self.calls.name
        good = [i for i in np.unique(names).tolist() if pattern.search(texts[i])]
        return np.flatnonzero(np.isin(names, good)) if good else np.zeros(0, np.int64)

    def within(self, chosen: Ints, start: float, end: float) -> Ints:
        """Those that overlap a span; a call lasts at most a minute."""
        starts = self.calls.start[chosen]
        near = chosen[np.searchsorted(starts, start - 60.0) : np.searchsorted(starts, end)]
        return near[self.calls.end[near] > start]

    def _overlap(self, chosen: Ints, start: float, end: float) -> float:
        return _inside_s(self.calls.start[chosen], self.calls.end[chosen], start, end)

    def busy_share(self, start: float, end: float) -> float:
        """Of a span: in operators or calls."""
        starts, ends = self._busy
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end)
        busy_s = _inside_s(starts[first:last], ends[first:last], start, end)
        return busy_s / max(end - start, 1e-12)

    def name(self, call: int) -> str:
        return self.linked.trace.texts[self.calls.name[call]]

    def waited_for(
        self, start: float, end: float, kernel: int, step: TracedStep
    ) -> tuple[str, str]:
        """(the part, what is to be named) of a gap that ends with `kernel`."""
        linked = self.linked
        launch = float(linked.launch_s[kernel])
        if linked.on_host:
            return self._between_ops(start, end, kernel, step)
        if linked.call[kernel] < 0:
            return parts.BETWEEN, ""
        memory = self.within(self.memory, start, end)
        if self._overlap(memory, start, end) > 0.3 * (end - start):
            return parts.MEMORY, self._longest(memory)
        if launch < start - _AHEAD_S:  # it was there; the device itself held it up
            return parts.BETWEEN, "another stream"
        quiet = self.busy_share(start, min(launch, end)) < 0.5
        if quiet and (self._is_first(kernel, step) or self._in_data_mark(start, end)):
            self._data_keys.add(self._key(kernel, step))
            return parts.DATA, "host idle before the step's first kernel"
        return self._late(start, end, kernel, step, quiet=quiet)

    def _key(self, kernel: int, step: TracedStep) -> _WaitKey | None:
        """Return what a wait before each micro batch has in common with that before the step: the
        operator after it. None where the trace does not know operators."""
        op, ops = int(self.linked.op[kernel]), self.linked.trace.ops
        return (step.start, int(ops.name[op]), int(ops.shape[op])) if op >= 0 else None

    def _between_ops(
        self, start: float, end: float, kernel: int, step: TracedStep
    ) -> tuple[str, str]:
        """On cores: waits in which no operator runs, before the operator that ends them."""
        where = f"before {self.linked.op_name(kernel)}"
        is_quiet = self.busy_share(start, end) < 0.5
        if is_quiet and self._in_data_mark(start, end):
            return parts.DATA, where
        if _inside_s(*self._compiled, start, end) > 0.5 * (end - start):
            return parts.ELEMENTWISE, "kernels that torch.compile made"
        if not is_quiet or end - start < _PAUSE_S:
            return parts.LAUNCHES, ""
        if self._is_first(kernel, step):
            self._data_keys.add(self._key(kernel, step))
        is_data = self._key(kernel, step) in self._data_keys
        return parts.DATA if is_data else parts.OUTSIDE, where

    def _late(
        self, start: float, end: float, kernel: int, step: TracedStep, *, quiet: bool
    ) -> tuple[str, str]:
        """The host launched too late: since a call that blocked it, or since it is slow."""
        blocked = self._blocked_since(kernel)
        if blocked is not None:
            is_memory = bool(MEMORY_CALLS.search(self.name(blocked)))
            return (parts.MEMORY if is_memory else parts.SYNC), self.name(blocked)
        if quiet and end - start > _PAUSE_S:
            key = self._key(kernel, step)
            if key is not None and key in self._data_keys:
                return parts.DATA, "host idle before a micro batch's first kernel"
            return parts.OUTSIDE, "host outside of torch"
        return parts.LAUNCHES, ""

    def _blocked_since(self, kernel: int) -> int | None:
        """The last call that blocked the host before this launch, if the host has not been ahead of
        the device again since."""
        launch = float(self.linked.launch_s[kernel])
        ends = self.calls.end[self._blocking]
        place = int(np.searchsorted(ends, launch, side="right")) - 1
        if place < 0:
            return None
        call = int(self._blocking[place])
        first, last = np.searchsorted(self._launches, (self.calls.end[call], launch))
        leads = self._leads[first:last]
        return None if len(leads) and float(leads.max()) > 5 * _AHEAD_S else call

    def _longest(self, calls: Ints) -> str:
        return self.name(int(calls[np.argmax(self.calls.seconds[calls])]))

    def _is_first(self, kernel: int, step: TracedStep) -> bool:
        """Among the first kernels that the host launched in this step."""
        key = step.kernels[0]
        if key not in self._early:
            launched = np.sort(self.linked.launch_s[np.array(step.kernels)])
            self._early[key] = float(launched[min(4, len(launched) - 1)])
        return float(self.linked.launch_s[kernel]) <= self._early[key]

    def _in_data_mark(self, start: float, end: float) -> bool:
        return _inside_s(*self._waits, start, end) > 0.5 * (end - start)


def _inside_s(starts: Floats, ends: Floats, start: float, end: float) -> float:
    """Seconds of spans that lie inside one."""
    return float(np.maximum(np.minimum(ends, end) - np.maximum(starts, start), 0.0).sum())


def _union(starts: Any, ends: Any) -> tuple[Any, Any]:
    """Spans without overlaps, by start."""
    if not len(starts):
        return np.zeros(0), np.zeros(0)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])
    places = np.flatnonzero(begins)
    finals = np.concatenate([places[1:] - 1, [len(ends) - 1]])
    return starts[places], ends[finals]
