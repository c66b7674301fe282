"""Of a question with very many points, those that can be listed, by bounds of their seconds: memory
that is counted tensor by tensor is counted for these alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.memory.peak import FSDP2_FRAGMENTS, SURE, fit_chance
from fourfold.cost.stacks import stack_defaults
from fourfold.search.bounds import Cells, cells_of
from fourfold.search.candidates import Candidates
from fourfold.search.fastest import CELLS, timed
from fourfold.search.query import PlanQuery
from fourfold.search.space import Bools, Space, unproven, ways_of
from fourfold.spec.words import RECOMPUTE

MANY = 200_000  # fewer points are counted as quickly, ten times as many are worth two tries
# How much slower than the fastest that surely fits a listed one is, as a rule; where only the first
# is asked for, that one itself: seconds of the pipeline, played through, differ from closed forms.
LISTED, FIRST = 1.25, 1.03
# Blocks of cells looked through for one that fits: of ways that recompute all, or nothing.
TRIES = {"full": 32, "none": 6}


@dataclass(frozen=True, slots=True)
class Near:
    """Layouts with points that are within `limit_s`, and [layouts, ways] these points."""

    grid: Candidates
    asked: Bools
    limit_s: float


def near_best(query: PlanQuery, grid: Candidates, least: int) -> Iterator[Near]:
    """More and more of the points, until `least` layouts can be listed. None at all where every
    point has to be looked at: there are few, or the user's conditions choose among them, or none
    that surely fits was found quickly."""
    if query.where or grid.legal < MANY or not stack_defaults(query.stack).counted:
        return
    legal = np.repeat(grid.legal_micros, len(grid.kinds), axis=1)
    nothing = np.zeros_like(legal)
    space = Space(query=query, rows=grid.layouts, ways=ways_of(grid), legal=legal, likely=nothing,
                  roomy=nothing, close=nothing)  # fmt: skip
    cells = cells_of(space)
    sure_s = _sure_s(cells)
    if not np.isfinite(sure_s):
        return
    # What sharding does not decide of memory is computed once for all of a pipe: it stays whole.
    least_s = np.full((int(cells.pipe.max()) + 1, legal.shape[1]), np.inf)
    np.minimum.at(least_s, cells.pipe[cells.order[cells.starts]], cells.least_s)
    for slack in (FIRST, LISTED) if least == 1 and grid.legal > 10 * MANY else (LISTED,):
        asked = legal & (least_s <= slack * sure_s)[cells.pipe]
        some = asked.any(axis=1)
        layouts = {name: column[some] for name, column in grid.layouts.items()}
        few = replace(grid, layouts=layouts, legal_micros=grid.legal_micros[some])
        yield Near(few, asked[some], slack * sure_s)


def _sure_s(cells: Cells) -> float:
    """Seconds of a point that surely fits and whose choices were measured; infinite where none is
    found. Those that keep least are tried, then those that keep all; promising ones first."""
    space, best_s = cells.space, np.inf
    mask = space.legal & (space.rows["replicate"] == 1)[:, None]
    mask = mask if space.query.explore else mask & ~unproven(space)
    kinds = {kind: space.ways["recompute"] == RECOMPUTE.index(kind) for kind in TRIES}
    if not any(has.any() for has in kinds.values()):  # the user chose another kind
        return _sure_of(cells, mask, max(TRIES.values()), best_s)
    for kind, has in kinds.items():
        best_s = _sure_of(cells, mask & has, TRIES[kind], best_s)
    return best_s


def _sure_of(cells: Cells, mask: Bools, tries: int, best_s: float) -> float:
    """The same of the points of a mask; what is not faster than `best_s` is of no use."""
    space, entry = cells.space, cells.space.query.entry
    cell = cells.holding(mask)
    least_s = cells.least_s.reshape(-1)[cell]
    order = np.argsort(least_s, kind="stable")
    room = space.query.limit_bytes * np.exp(-FSDP2_FRAGMENTS)
    chance = max(SURE, 1.0 - space.query.risk)
    for at in range(0, min(len(order), tries * CELLS), CELLS):
        some = order[at : at + CELLS]
        if least_s[some[0]] > best_s:
            break
        index, _ = cells.points(cell[some], mask)
        index = index[space.peak_bytes(index) < room]
        index = index[space.priced(index, lambda c: fit_chance(c, entry)) >= chance]
        best_s = min(best_s, float(timed(space, index).min(initial=np.inf)))
    return best_s
