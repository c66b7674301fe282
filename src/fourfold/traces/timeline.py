"""A step on the device: each instant belongs to the part that runs in it, computation before
communication; instants in which nothing runs belong to whoever the device waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fourfold.traces import parts
from fourfold.traces.events import Floats
from fourfold.traces.host import HostCalls
from fourfold.traces.linked import Linked
from fourfold.traces.steps import TracedStep

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
