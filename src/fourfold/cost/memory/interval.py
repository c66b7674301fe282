"""How sure a prediction of memory is: an 80% interval from what rows left open of the coefficients,
and a verdict: yes, tight (the limit lies in the interval) or no."""

from __future__ import annotations

from math import exp

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.coefficients import COEFFICIENTS, Coefficient
from fourfold.cost.memory.peak import limit_bytes, memory

# 80% of a normal distribution lies within 1.28 sd.
TWO_SIDED_80 = 1.2816
# Half width (log) that no fit removes: 8 of 10 held-out runs of bloom are within 7.5%. Of our own
# engine tensors are counted, and allocators still differ.
FRAGMENTS, OWN_FRAGMENTS = 0.08, 0.05
YES, TIGHT, NO = "yes", "tight", "no"
# An engine that wastes nothing: tensors as counted, norms that keep less than their inputs, a fused
# loss, nothing gathered kept, and the whole device. Engines whose memory was measured (most of them
# academic) need more, so a blend of theirs says little about the least another one may need.
LEAN = {"act": 1.0, "kept_hidden": 0.8, "state": 1.0, "logits": 0.5, "gathered": 0.02,
        "base_gib": 0.5}  # fmt: skip
LEAN_ROOM = 1.0


def moves(entry: FittedStack, part: str) -> list[tuple[Coefficient, float]]:
    """(coefficient, an end of its 80% range): what rows taught narrows the prior's spread."""
    ends = []
    for one in COEFFICIENTS:
        spread = one.spread * (1.0 - entry.informed.get(one.name, 0.0)) * TWO_SIDED_80
        if one.part == part and spread > 1e-3:
            moved = (entry.coefficients[one.name] * exp(way * spread) for way in (-1.0, 1.0))
            ends += [(one, min(max(end, one.low), one.high)) for end in moved]
    return ends


def moved_coefficients(
    entry: FittedStack, ends: list[tuple[Coefficient, float]]
) -> dict[str, Floats]:
    """Coefficients as [moves, 1] arrays, one of them moved at a time."""
    coef = {name: np.full((len(ends), 1), value) for name, value in entry.coefficients.items()}
    for i, (coefficient, value) in enumerate(ends):
        coef[coefficient.name][i] = value
    return coef


def memory_bounds(c: Columns, entry: FittedStack) -> tuple[Floats, Floats]:
    """(low, high) bytes of the fullest stage: every coefficient at the ends of its 80% range, the
    effects added as independent ones, with what an allocator's fragments always add or save."""
    worst = memory(c, entry.coefficients).worst_bytes
    always = np.where(c.own > 0, OWN_FRAGMENTS, FRAGMENTS)
    effect = np.zeros((1, len(c)))
    if not np.all(c.own > 0):
        moved = memory(c, moved_coefficients(entry, moves(entry, "memory"))).worst_bytes
        effect = np.log(moved / worst)
    half = np.sqrt((effect**2).sum(axis=0) / 2.0 + always**2)
    return worst * np.exp(-half), worst * np.exp(half)


def lean_coefficients(entry: FittedStack) -> dict[str, float]:
    """Coefficients of a lean engine, as far as rows leave them open."""

    def moved(name: str, value: float) -> float:
        own = entry.coefficients[name]
        return own * (value / own) ** (1.0 - entry.informed.get(name, 0.0))

    lean = {name: min(entry.coefficients[name], moved(name, value)) for name, value in LEAN.items()}
    room = max(entry.coefficients["room"], moved("room", LEAN_ROOM))
    return {**entry.coefficients, **lean, "room": room}


def verdicts(c: Columns, entry: FittedStack) -> NDArray[np.str_]:
    """yes, tight or no of every run, against what the driver and the learned margin leave. No is
    said only where a lean engine does not fit either."""
    low, high = memory_bounds(c, entry)
    limit, lean = limit_bytes(c, entry.coefficients), lean_coefficients(entry)
    least = memory(c, lean).worst_bytes * np.exp(-np.where(c.own > 0, OWN_FRAGMENTS, FRAGMENTS))
    may_fit = (low < limit) | (least < limit_bytes(c, lean))
    return np.where(high < limit, YES, np.where(may_fit, TIGHT, NO))
