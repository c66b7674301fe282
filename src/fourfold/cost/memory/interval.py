"""How sure is a prediction of memory, and does the run fit? An 80% interval from what rows left
open of the knobs, and a verdict: yes, tight (the limit lies in the interval) or no."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns
from fourfold.cost.fit.calibration import Entry
from fourfold.cost.fit.coefficients import KNOBS, Knob
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.step.gemm import Floats

# 80% of a normal distribution lies within 1.28 sd.
TWO_SIDED_80 = 1.2816
# Half width (log) that no fit removes: 8 of 10 held-out runs of bloom are within 7.5%. Of our own
# engine tensors are counted, and allocators still differ.
FRAGMENTS, OWN_FRAGMENTS = 0.08, 0.05
YES, TIGHT, NO = "yes", "tight", "no"


def moves(entry: Entry, part: str) -> list[tuple[Knob, float]]:
    """(knob, value at an end of its 80% range): what rows taught narrows the prior's spread."""
    found = []
    for knob in KNOBS:
        spread = knob.spread * (1.0 - entry.informed.get(knob.name, 0.0)) * TWO_SIDED_80
        if knob.part == part and spread > 1e-3:
            value = entry.knobs[knob.name]
            ends = (value * exp(-spread), value * exp(spread))
            found += [(knob, min(max(end, knob.low), knob.high)) for end in ends]
    return found


def moved_knobs(entry: Entry, ends: list[tuple[Knob, float]]) -> dict[str, Floats]:
    """Knobs as [moves, 1] arrays, one of them moved at a time."""
    knobs = {name: np.full((len(ends), 1), value) for name, value in entry.knobs.items()}
    for i, (knob, value) in enumerate(ends):
        knobs[knob.name][i] = value
    return knobs


def memory_bounds(c: Columns, entry: Entry) -> tuple[Floats, Floats]:
    """(low, high) bytes of the fullest stage: every memory knob at the ends of its 80% range, the
    effects added as independent ones, with what an allocator's fragments always add or save."""
    worst = memory(c, entry.knobs).worst_bytes
    always = np.where(c.own > 0, OWN_FRAGMENTS, FRAGMENTS)
    effect = np.zeros((1, len(c)))
    if not np.all(c.own > 0):
        moved = memory(c, moved_knobs(entry, moves(entry, "memory"))).worst_bytes
        effect = np.log(moved / worst)
    half = np.sqrt((effect**2).sum(axis=0) / 2.0 + always**2)
    return worst * np.exp(-half), worst * np.exp(half)


def verdicts(c: Columns, entry: Entry) -> NDArray[np.str_]:
    """yes, tight or no of every run, against what the driver and the learned margin leave."""
    low, high = memory_bounds(c, entry)
    limit = limit_bytes(c, entry.knobs)
    return np.where(high < limit, YES, np.where(low < limit, TIGHT, NO))
