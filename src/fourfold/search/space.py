"""Which points of a question's table may fit, were measured, and hold by the user's conditions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.interval import choices
from fourfold.cost.memory.peak import (
    FRAGMENTS,
    FSDP2_FRAGMENTS,
    REFUSED,
    SURE,
    fit_chance,
    lean_coefficients,
    memory,
    moves,
)
from fourfold.events import Bar
from fourfold.search.peaks import peaks
from fourfold.search.table import Bools, Places, PointTable, alike, blocks, on_cores
from fourfold.spec.expression import Expression, memory_values
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

ROUNDING = 1e-9
ABOUT = 1.01  # the normal distribution is known to three digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(PointTable):
    """`likely` points fit by our best estimate; no others than `roomy` ones are 90% sure to;
    `close` ones are above the limit, but an engine that wastes nothing, or whose fragments are as
    few as they get, would fit: their chance is 10% or more."""

    likely: Bools
    roomy: Bools
    close: Bools


def space_of(table: PointTable, bar: Bar, *, every: bool = False) -> Space:
    """Rows with points that fit or are close to it, or every row. Which points are legal is equal
    for what shares its pipeline."""
    # How context parallelism attends matters only where tensors are counted one by one.
    by_kind = table.query.resolved.engine.habits.counted
    names = tuple(name for name in table.rows if by_kind or name != "cp_kind")
    first, back = alike(table.rows, names)
    likely, roomy, close = _fitting(table.only(first), bar)
    some = np.logical_or.reduce(likely | close, axis=1) | every
    used = np.flatnonzero(some[back])
    few, back = table.only(used), back[used]
    return Space(
        query=few.query,
        rows=few.rows,
        ways=few.ways,
        legal=few.legal,
        likely=likely[back],
        roomy=roomy[back],
        close=close[back],
    )


def _fitting(table: PointTable, bar: Bar) -> tuple[Bools, Bools, Bools]:
    """(fits by our best estimate, may surely fit, may fit though it is above the limit)."""
    query, asked = table.query, table.legal
    entry, limit, lean = (
        query.resolved.entry,
        query.limit_bytes,
        lean_coefficients(query.resolved.entry),
    )
    counted = query.resolved.engine.habits.counted
    usual = peaks(table, entry.coefficients)
    # Counted tensors are the same whatever an engine wastes.
    least = usual if counted else peaks(table, lean)
    half = FSDP2_FRAGMENTS if counted else FRAGMENTS
    # Fragments at their best, and of a lean engine more of the device (memory/peak.fit_chance).
    reach = limit * np.exp(half)
    lean_reach = reach * lean["room"] / entry.coefficients["room"]
    least_sure, most = limit * np.exp(-half), max(reach, lean_reach) * (1.0 + ROUNDING)
    likely, roomy, close, tied = (np.zeros_like(asked) for _ in range(4))
    near = np.flatnonzero(usual.may_be_below(reach) | least.may_be_below(lean_reach))

    def check(some: Places) -> None:
        rows = near[some]
        peak = usual.of(rows, least_sure, most)
        fits = peak < limit
        likely[rows], roomy[rows] = fits, peak < least_sure * (1.0 + ROUNDING)
        wasteless = peak if counted else least.of(rows, 0.0, most)
        close[rows] = ~fits & ((peak < reach) | (wasteless < lean_reach))
        tied[rows] = np.abs(peak - limit) < ROUNDING * limit

    on_cores(check, blocks(asked[near]), bar.part(0.1, 0.8))
    index = np.flatnonzero(tied)
    if len(index):
        peak = table.peak_bytes(index)
        likely.reshape(-1)[index], close.reshape(-1)[index] = peak < limit, peak >= limit
    return likely, roomy, close


def widest_half(entry: FittedStack) -> float:
    """Half an interval (log) that no run's exceeds: no coefficient moves a sum of bytes by more
    than its own factor."""
    ends = [(entry.coefficients[one.name], end) for one, end in moves(entry, "memory")]
    factors = [end / value for value, end in ends if value > 0]
    return float(np.sqrt((np.log(factors) ** 2).sum() / 2.0 + FRAGMENTS**2))


def may_fit(space: PointTable) -> Bools:
    """All points that fit by a chance of 10% or more. None is asked about that is further above the
    limit than any interval reaches, even if the engine wastes nothing."""
    query, index = space.query, np.flatnonzero(space.legal)
    lean = lean_coefficients(query.resolved.entry)
    reach = query.limit_bytes * np.exp(widest_half(query.resolved.entry)) * ABOUT
    wasteless = space.priced(index, lambda c: memory(c, lean).worst_bytes)
    near = wasteless * query.resolved.entry.coefficients["room"] / lean["room"] < reach
    return _with_chance(space, index[near], REFUSED)


def sure(space: Space, mask: Bools) -> Bools:
    """Of these points, those that fit by a chance of 90% or more; all, where none does."""
    kept = _with_chance(space, np.flatnonzero(mask & space.roomy), SURE)
    return kept if kept.any() else mask


def _with_chance(space: PointTable, index: Places, least: float) -> Bools:
    """Which of these points fit by a chance of `least` or more."""
    chance = space.priced(index, lambda c: fit_chance(c, space.query.resolved.entry))
    kept = np.zeros_like(space.legal)
    kept.reshape(-1)[index[chance >= least]] = True
    return kept


# How choices that a field of the query decides begin, as precision always is: nobody is to be kept
# from what was asked for.
_DECIDED = {
    "sharding": "zero",
    "recompute": "recompute",
    "cp_kind": "context parallel",
    "schedule": "schedule",
    "virtual_stages": "virtual stages",
    "micro_batch": "more than one sequence",
}


def unproven(space: PointTable) -> Bools:
    """Which points make a choice of their own that no measured row of the calibration makes;
    broadcasts against the table."""
    points = {name: column[:, None] for name, column in space.rows.items()}
    points |= {name: column[None, :] for name, column in space.ways.items()}
    evidence, fixed = space.query.evidence, space.query.fixed
    decided = ["precision", *(start for name, start in _DECIDED.items() if name in fixed)]
    decided += ["hybrid"] * (fixed.get("replicate") == "several")
    new = np.zeros((1, 1), dtype=bool)
    made = choices(space.query.columns(points, is_open=True)) if evidence else {}
    # Narrow ones first: what rows and ways choose together is the last to be joined.
    for name, mask in sorted(made.items(), key=lambda item: item[1].size):
        if not evidence.get(name, 0) and not name.startswith(tuple(decided)):
            new = new | mask
    return new


def holding(
    space: PointTable, mask: Bools, conditions: list[Expression], step_s: Floats | None = None
) -> Bools:
    """Points of the mask for which the user's conditions hold."""
    index = np.flatnonzero(mask)
    if not conditions or not len(index):
        return mask
    query, points = space.query, space.points(index)
    values = {
        **{axis: points[axis] for axis in (*MODEL_AXES, *EXPERT_AXES)},
        "dp": points["replicate"] * points["shard"],
        "vp": points["virtual_stages"],
        "micro_batch": points["micro_batch"],
        "global_batch": query.batch.global_batch,
        "seq_len": query.batch.seq_len,
        "gpus": query.gpus,
        "nodes": -(-query.gpus // query.resolved.cluster.host_gpus),
        "layers": query.model.layers,
        "hidden": query.model.hidden,
        "heads": query.model.heads,
        **memory_values(space.peak_bytes(index)),
        "step_s": step_s,
    }
    held = np.ones(len(index), dtype=bool)
    for one in conditions:
        held &= one.holds(values)
    kept = np.zeros_like(mask)
    kept.reshape(-1)[index[held]] = True
    return kept
