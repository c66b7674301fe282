"""The fastest points of a table, by branch and bound: no point is timed whose lower bound is above
the seconds of those that would push it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.step.estimate import estimate
from fourfold.search.bounds import Bounds
from fourfold.search.table import Bools, Places, PointTable

AT_ONCE = 4096  # points looked at before bounds are compared again


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Points that may be among the fastest: their bounds and layouts."""

    index: Places
    least_s: Floats
    layout: Places

    def only(self, some: Bools | Places) -> _Waiting:
        return _Waiting(self.index[some], self.least_s[some], self.layout[some])


def fastest(
    bounds: Bounds,
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
    left = _waiting(bounds, mask, most_s)
    best_s = np.full((int(bounds.layouts.max(initial=0)) + 1, variants), np.inf)
    limit_s = np.full(len(best_s), most_s)
    points, seconds = [np.zeros(0, dtype=np.intp)], [np.zeros(0)]
    now = _first_points(left, keep)
    while len(left.index):
        some = left.only(now & (left.least_s <= limit_s[left.layout]))
        index, step_s = some.index, timed(bounds.table, some.index)
        if holds is not None:
            few = step_s <= limit_s[some.layout]
            few[few] = holds(index[few])
            index, step_s = index[few], step_s[few]
        best_s = _merged(best_s, bounds.layout(index), bounds.variant(index), step_s)
        points.append(index)
        seconds.append(step_s)
        limit_s = np.minimum(best_s[:, -1], min(most_s, _smallest(best_s, keep)))
        left = left.only(np.flatnonzero(~now & (left.least_s <= limit_s[left.layout])))
        now = np.ones(len(left.index), dtype=bool)
        if len(now) > AT_ONCE:
            now = left.least_s <= np.partition(left.least_s, AT_ONCE - 1)[AT_ONCE - 1]
    order = np.argsort(index := np.concatenate(points))
    return index[order], np.concatenate(seconds)[order]


def _waiting(bounds: Bounds, mask: Bools, most_s: float) -> _Waiting:
    index = np.flatnonzero(mask)
    least_s = bounds.of(index)
    index, least_s = index[least_s <= most_s], least_s[least_s <= most_s]
    return _Waiting(index, least_s, bounds.layout(index))


def _first_points(left: _Waiting, keep: int | None) -> Bools:
    """The most promising point of each of the most promising layouts; then come those of all."""
    now = np.zeros(len(left.index), dtype=bool)
    by_bound = np.argsort(left.least_s, kind="stable")
    first = np.unique(left.layout[by_bound], return_index=True)[1]
    now[by_bound[np.sort(first)[:keep]]] = True
    return now


def timed(table: PointTable, index: Places) -> Floats:
    """Closed-form seconds of points."""
    entry = table.query.resolved.entry
    return table.priced(index, lambda c: estimate(c, entry.coefficients).step_s)


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
