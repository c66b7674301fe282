"""The fastest points of a table, by branch and bound: no point is timed whose lower bound is above
the seconds of those that would push it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.step.estimate import estimate
from fourfold.search.bounds import Cells
from fourfold.search.candidates import Places
from fourfold.search.space import Bools, Space

CELLS = 2048  # looked at before bounds are compared again


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Cells that may hold a point of the fastest: their bounds, layouts, and whether a closer bound
    has not been asked for."""

    cell: Places
    least_s: Floats
    layout: Places
    is_rough: Bools

    def only(self, some: Bools | Places) -> _Waiting:
        return _Waiting(self.cell[some], self.least_s[some], self.layout[some], self.is_rough[some])

    def closer(self, cells: Cells, mask: Bools, now: Bools) -> tuple[_Waiting, Bools]:
        """(with the closer bounds of these, those of them that are still below the others)."""
        rough = now & self.is_rough
        if not rough.any():
            return self, now
        index, place = cells.points(self.cell[rough], mask)
        found, least_s = np.full(int(rough.sum()), np.inf), self.least_s.copy()
        np.minimum.at(found, place, cells.gathered_s(index))
        least_s[rough] = np.maximum(least_s[rough], found)
        left = _Waiting(self.cell, least_s, self.layout, self.is_rough & ~rough)
        return left, now & (least_s <= self.least_s[now].max())


def fastest(
    cells: Cells,
    mask: Bools,
    *,
    keep: int | None,
    variants: int,
    holds: Callable[[Places], Bools] | None = None,
    most_s: float = np.inf,
) -> tuple[Places, Floats]:
    """(points, seconds): all points of the mask that can be among its fastest `keep`, of each
    layout at most `variants`, which copies of a shard do not tell apart; and some others. `holds`:
    asked of points that can be, which of them count; slower ones than `most_s` do not."""
    left = _waiting(cells, mask, most_s)
    best_s = np.full((int(cells.layouts.max(initial=0)) + 1, variants), np.inf)
    limit_s = np.full(len(best_s), most_s)
    points, seconds = [np.zeros(0, dtype=np.intp)], [np.zeros(0)]
    now = _first_cells(left, keep)
    while len(left.cell):
        left, now = left.closer(cells, mask, now)
        some = left.only(now)
        index, place = cells.points(some.cell, mask)
        few = cells.bound_s(index, some.cell[place]) <= limit_s[some.layout[place]]
        index, place = index[few], place[few]
        step_s = timed(cells.space, index)
        if holds is not None:
            few = step_s <= limit_s[some.layout[place]]
            few[few] = holds(index[few])
            index, place, step_s = index[few], place[few], step_s[few]
        best_s = _merged(best_s, some.layout[place], place, step_s)
        points.append(index)
        seconds.append(step_s)
        limit_s = np.minimum(best_s[:, -1], min(most_s, _smallest(best_s, keep)))
        left = left.only(np.flatnonzero(~now & (left.least_s <= limit_s[left.layout])))
        now = np.ones(len(left.cell), dtype=bool)
        if len(now) > CELLS:
            now = left.least_s <= np.partition(left.least_s, CELLS - 1)[CELLS - 1]
    order = np.argsort(index := np.concatenate(points))
    return index[order], np.concatenate(seconds)[order]


def _waiting(cells: Cells, mask: Bools, most_s: float) -> _Waiting:
    cell = cells.holding(mask)
    cell = cell[cells.least_s.reshape(-1)[cell] <= most_s]
    least_s = cells.least_s.reshape(-1)[cell]
    return _Waiting(cell, least_s, cells.layout(cell), cells.gathering(cell))


def _first_cells(left: _Waiting, keep: int | None) -> Bools:
    """The most promising cell of each of the most promising layouts, of those whose bound is as
    close as it gets; then come those of all."""
    now = np.zeros(len(left.cell), dtype=bool)
    close = np.flatnonzero(~left.is_rough)
    first = close[_first_of_each(left.layout[close], left.least_s[close])]
    now[first[np.argsort(left.least_s[first], kind="stable")[:keep]]] = True
    return now


def _first_of_each(layout: Places, bound: Floats) -> Places:
    """For each layout the place of its smallest bound; layouts come sorted."""
    if not len(layout):
        return np.zeros(0, dtype=np.intp)
    starts = np.flatnonzero(np.diff(layout, prepend=-1))
    smallest = np.repeat(np.minimum.reduceat(bound, starts), np.diff([*starts, len(layout)]))
    hits = np.flatnonzero(bound == smallest)
    return hits[np.unique(layout[hits], return_index=True)[1]]


def timed(space: Space, index: Places) -> Floats:
    """Closed-form seconds of points."""
    entry = space.query.entry
    return space.priced(index, lambda c: estimate(c, entry.coefficients).step_s)


def _merged(best_s: Floats, layout: Places, variant: Places, step_s: Floats) -> Floats:
    """The fewest seconds of each layout's variants, with those of further points."""
    _, first, back = np.unique(variant, return_index=True, return_inverse=True)
    fewest = np.full(len(first), np.inf)
    np.minimum.at(fewest, back.reshape(-1), step_s)
    count, variants = best_s.shape
    layout = np.concatenate([np.repeat(np.arange(count), variants), layout[first]])
    seconds = np.concatenate([best_s.reshape(-1), fewest])
    order = np.lexsort((seconds, layout))
    starts = np.searchsorted(layout[order], np.arange(count))
    return seconds[order][starts[:, None] + np.arange(variants)]


def _smallest(best_s: Floats, keep: int | None) -> float:
    """The seconds of the last of the fastest `keep`; no limit where there are fewer."""
    if keep is None or best_s.size < keep:
        return np.inf
    return float(np.partition(best_s.reshape(-1), keep - 1)[keep - 1])
