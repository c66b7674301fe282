"""Of a question with very many points, those that can be listed, by bounds of their seconds: memory
that is counted tensor by tensor is counted for these alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fourfold.cost.memory.peak import FSDP2_FRAGMENTS, SURE, fit_chance
from fourfold.search.bounds import Bounds, bounds_of
from fourfold.search.fastest import timed
from fourfold.search.space import unproven
from fourfold.search.table import Bools, PointTable
from fourfold.spec.words import RECOMPUTE

MANY = 200_000  # fewer points are counted as quickly, ten times as many are worth two tries
# How much slower than the fastest that surely fits a listed one is, as a rule; where only the first
# is asked for, that one itself: seconds of the pipeline, played through, differ from closed forms.
LISTED, FIRST = 1.25, 1.03
# Blocks of points looked through for one that fits: of ways that recompute all, or nothing.
BLOCK = 2048
TRIES = {"full": 32, "none": 6}


def near_best(table: PointTable, least: int) -> Iterator[tuple[PointTable, float]]:
    """More and more of the points, until `least` layouts can be listed: layouts with points that
    are within a limit, and the limit. None at all where every point has to be looked at: there are
    few, or the user's conditions choose among them, or none that surely fits was found quickly."""
    query, legal = table.query, table.legal
    count = int(legal.sum())
    if query.where or count < MANY or not query.resolved.engine.habits.counted:
        return
    bounds = bounds_of(table)
    sure_s = _sure_s(bounds)
    if not np.isfinite(sure_s):
        return
    # What sharding does not decide of memory is computed once for all of a pipe: it stays whole.
    once_s = np.full(len(bounds.least_s), np.inf)
    np.minimum.at(once_s, bounds.pipe, bounds.per_step_s)
    least_s = bounds.least_s + once_s[:, None]
    for slack in (FIRST, LISTED) if least == 1 and count > 10 * MANY else (LISTED,):
        asked = legal & (least_s <= slack * sure_s)[bounds.pipe]
        yield replace(table, legal=asked).only(np.flatnonzero(asked.any(axis=1))), slack * sure_s


def _sure_s(bounds: Bounds) -> float:
    """Seconds of a point that surely fits and whose choices were measured; infinite where none is
    found. Those that keep least are tried, then those that keep all; promising ones first."""
    table, best_s = bounds.table, np.inf
    mask = table.legal & (table.rows["replicate"] == 1)[:, None]
    mask = mask if table.query.explore else mask & ~unproven(table)
    kinds = {kind: table.ways["recompute"] == RECOMPUTE.index(kind) for kind in TRIES}
    if not any(has.any() for has in kinds.values()):  # the user chose another kind
        return _sure_of(bounds, mask, max(TRIES.values()), best_s)
    for kind, has in kinds.items():
        best_s = _sure_of(bounds, mask & has, TRIES[kind], best_s)
    return best_s


def _sure_of(bounds: Bounds, mask: Bools, tries: int, best_s: float) -> float:
    """The same of the points of a mask; what is not faster than `best_s` is of no use."""
    table, entry = bounds.table, bounds.table.query.resolved.entry
    index = np.flatnonzero(mask)
    least_s = bounds.of(index)
    order = np.argsort(least_s, kind="stable")
    room = table.query.limit_bytes * np.exp(-FSDP2_FRAGMENTS)
    chance = max(SURE, 1.0 - table.query.risk)
    for at in range(0, min(len(order), tries * BLOCK), BLOCK):
        some = order[at : at + BLOCK]
        if least_s[some[0]] > best_s:
            break
        few = index[some]
        few = few[table.peak_bytes(few) < room]
        few = few[table.priced(few, lambda c: fit_chance(c, entry)) >= chance]
        best_s = min(best_s, float(timed(table, few).min(initial=np.inf)))
    return best_s
