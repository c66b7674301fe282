"""The fastest points of a table, by branch and bound: no point is timed whose lower bound is above
the seconds of those that would push it out.

A cell holds the points of a table that differ only in their copies of the sharded state. Seconds in
the pipeline know nothing of sharding: they are computed once for all ZeRO stages, with gathered
weights costing nothing. Of gradients and updates a point pays at least what is left when a backward
pass of any length hides them; a cell pays what the cheapest of its points does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.step.estimate import (
    end_of_step_s,
    ends_s,
    estimate,
    fixed_s,
    handover_s,
    stage_times,
    waiting_s,
)
from fourfold.cost.step.layer import layer_times
from fourfold.cost.step.pipeline import pipeline_s
from fourfold.search.candidates import Ints, Places, repeats, row_numbers
from fourfold.search.cores import CHUNK
from fourfold.search.query import PlanQuery
from fourfold.search.space import Bools, Space
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.words import SHARDINGS

SLACK = 1e-9  # rounding between the bound and the closed form
CELLS = 2048  # timed before bounds are compared again
LAYOUT = (*MODEL_AXES, "cp_kind")  # what makes two rows the same layout; dp follows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Rows of a table in groups that differ in their copies only, with [groups, ways] seconds that
    no point of a cell undercuts."""

    space: Space
    order: Places  # rows of the table, group by group
    starts: Places  # of each group in `order`
    counts: Places
    layouts: Places  # a number from 0 for the layout of each group
    least_s: Floats
    more_s: Floats  # of each row: how much more than its group it pays at least

    def holding(self, mask: Bools) -> Places:
        """Cells with points of the mask, by their place in `least_s` read row by row."""
        if not len(self.starts):
            return np.zeros(0, dtype=np.intp)
        # Eight ways at a time.
        some = np.bitwise_or.reduceat(np.packbits(mask, axis=1)[self.order], self.starts, axis=0)
        return np.flatnonzero(np.unpackbits(some, axis=1, count=mask.shape[1]))

    def layout(self, cells: Places) -> Places:
        return self.layouts[cells // self.least_s.shape[1]]

    def points(self, cells: Places, mask: Bools) -> tuple[Places, Places]:
        """(points of the mask in these cells, for each the place of its cell among them)."""
        group, way = np.divmod(cells, mask.shape[1])
        place, within = repeats(self.counts[group])
        index = self.order[self.starts[group][place] + within] * mask.shape[1] + way[place]
        inside = mask.reshape(-1)[index]
        return index[inside], place[inside]

    def bound_s(self, index: Places, cells: Places) -> Floats:
        """Seconds that points undercut no more than rounding, given the cell of each."""
        return self.least_s.reshape(-1)[cells] + self.more_s[index // self.least_s.shape[1]]


def cells_of(space: Space) -> Cells:
    alike = row_numbers(space.rows, (*LAYOUT, "virtual_stages", "schedule"))
    _, pipes, pipe = np.unique(alike, return_index=True, return_inverse=True)
    number = pipe.reshape(-1) * len(SHARDINGS) + space.rows["zero"]
    order = np.argsort(number, kind="stable")
    _, starts, counts = np.unique(number[order], return_index=True, return_counts=True)
    groups = {name: column[pipes] for name, column in space.rows.items()}
    groups["shard"] = groups["replicate"] * groups["shard"]
    groups |= dict.fromkeys(("replicate", "zero"), np.ones_like(groups["shard"]))
    _, layouts = np.unique(row_numbers(groups, LAYOUT), return_inverse=True)
    of_group = pipe.reshape(-1)[order[starts]]
    once = once_s(space.query, space.rows) * (1.0 - SLACK)
    least_once = np.minimum.reduceat(once[order], starts) if len(starts) else once
    more_s = np.empty_like(once)
    more_s[order] = once[order] - np.repeat(least_once, counts)
    pipe_s = least_s(space.query, groups, space.ways) * (1.0 - SLACK)
    return Cells(
        space=space,
        order=order,
        starts=starts,
        counts=counts,
        layouts=layouts.reshape(-1)[of_group],
        least_s=pipe_s[of_group] + least_once[:, None],
        more_s=more_s,
    )


def once_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds that every way to run a row pays for gradients and updates, with the waiting that
    they add to a step."""
    coef, found = query.entry.coefficients, []
    # A single micro batch may be updated from as it is, without sums.
    for micro in (1, query.batch.global_batch):
        one = {"micro_batch": np.array([micro]), "recompute": np.zeros(1, np.int64)}
        c = query.columns(rows | one, is_open=True)
        found.append(sum(end_of_step_s(c, coef, window=np.array([np.inf])), np.zeros(())))
    work = np.minimum(*found)
    return work + waiting_s(c, coef, work=work, slots=np.zeros(1))[1]


# Of a layer, of the head and of the embedding.
Seconds = tuple[Floats, Floats, Floats]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Seconds of one layer, of the head and of the embedding, [rows, sizes, kinds of recompute]; a
    layer knows neither pipeline stages nor, below zero3, how the state is sharded."""

    rows: Places  # of each group
    sizes: Ints  # sequences in a micro batch, sorted
    seconds: Seconds

    def of(self, groups: slice, micro: Ints) -> Seconds:
        """[groups, ways], at micro batches [groups or 1, micro batches]."""
        rows, sizes = self.rows[groups, None], np.searchsorted(self.sizes, micro)
        layer, head, embed = (seconds[rows, sizes] for seconds in self.seconds)
        shape = (len(layer), -1)
        return layer.reshape(shape), head.reshape(shape), embed.reshape(shape)


def _pieces(query: PlanQuery, groups: dict[str, Ints], sizes: Ints, kinds: Ints) -> _Pieces:
    # Ranks that nobody shares tokens with add gradients up differently: one dp stands for all.
    few = {name: groups[name] for name in LAYOUT}
    few["shard"] = np.minimum(groups["shard"], 2)
    few["pp"] = np.ones_like(few["shard"])
    number = row_numbers(few, (*LAYOUT, "shard"))
    _, first, back = np.unique(number, return_index=True, return_inverse=True)
    points: dict[str, Any] = {name: column[first][:, None] for name, column in few.items()}
    # One micro batch in a step: then a rank adds nothing up, which no other number undercuts.
    ones = dict.fromkeys(("replicate", "virtual_stages", "zero"), np.ones((1, 1), np.int64))
    once = {"micro_batch": 1, "global_batch": 1, "recompute": np.tile(kinds, len(sizes))[None, :]}
    c = query.columns(points | ones | {"schedule": np.zeros((1, 1), np.int64)} | once, is_open=True)
    micro = np.repeat(sizes, len(kinds))[None, :].astype(np.float64)
    coef = query.entry.coefficients
    head, embed, _ = ends_s(c, coef, micro)
    shape = (len(first), len(sizes), len(kinds))
    every = (layer_times(c, coef, micro=micro).total, head, embed)
    filled = [np.broadcast_to(one, (shape[0], shape[1] * shape[2])).reshape(shape) for one in every]
    return _Pieces(back.reshape(-1), sizes, (filled[0], filled[1], filled[2]))


def least_s(query: PlanQuery, groups: dict[str, Ints], ways: dict[str, Ints]) -> Floats:
    """[groups, ways] seconds that no sharding of these rows undercuts, what happens once a step
    left out."""
    found = np.zeros((len(groups["shard"]), len(ways["recompute"])))
    if not found.size:
        return found
    kinds = ways["recompute"][ways["micro_batch"] == ways["micro_batch"][0]]
    micros = ways["micro_batch"][:: len(kinds)]
    share = -(-query.batch.global_batch // groups["shard"])
    rest = share[:, None] % micros
    sizes = np.unique(np.concatenate([micros, rest[rest > 0]]))
    pieces = _pieces(query, groups, sizes, kinds)
    for at in range(0, len(found), max(1, CHUNK // found.shape[1])):
        some = slice(at, at + max(1, CHUNK // found.shape[1]))
        points = {name: column[some, None] for name, column in groups.items()}
        points |= {name: column[None, :] for name, column in ways.items()}
        c = query.columns(points, is_open=True)
        last = np.maximum(rest[some], sizes[0])
        found[some] = _least_s(
            c,
            query.entry.coefficients,
            whole=pieces.of(some, micros[None, :]),
            rest=np.repeat(rest[some], len(kinds), axis=1).astype(np.float64),
            last=pieces.of(some, last),
        )
    return found


def _least_s(c: Columns, coef: Any, *, whole: Seconds, rest: Floats, last: Seconds) -> Floats:
    """The closed form (cost/step/estimate.py) of what happens in the pipeline."""
    stages = stage_times(c, *whole, handover_s(c, coef, c.tokens))
    count = np.floor(c.share / c.micro)
    other = stage_times(c, *last, handover_s(c, coef, rest * c.seq / c.cp))
    slots = count + np.where(rest > 0, other.slowest(c) / stages.slowest(c), 0.0)
    pipe = pipeline_s(c, stages, slots)
    waits, jitter = waiting_s(c, coef, work=pipe, slots=count)
    return pipe + waits + jitter + fixed_s(c, coef)


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
    cell = cells.holding(mask)
    cell = cell[cells.least_s.reshape(-1)[cell] <= most_s]
    bound, layout = cells.least_s.reshape(-1)[cell], cells.layout(cell)
    best_s = np.full((int(cells.layouts.max(initial=0)) + 1, variants), np.inf)
    limit_s = np.full(len(best_s), most_s)
    points, seconds = [np.zeros(0, dtype=np.intp)], [np.zeros(0)]
    now = _first_cells(layout, bound, keep)
    while len(cell):
        index, place = cells.points(cell[now], mask)
        few = cells.bound_s(index, cell[now][place]) <= limit_s[layout[now][place]]
        index, place = index[few], place[few]
        step_s = timed(cells.space, index)
        if holds is not None:
            few = step_s <= limit_s[layout[now][place]]
            few[few] = holds(index[few])
            index, place, step_s = index[few], place[few], step_s[few]
        best_s = _merged(best_s, layout[now][place], place, step_s)
        points.append(index)
        seconds.append(step_s)
        limit_s = np.minimum(best_s[:, -1], min(most_s, _smallest(best_s, keep)))
        later = np.flatnonzero(~now & (bound <= limit_s[layout]))
        cell, bound, layout = cell[later], bound[later], layout[later]
        now = np.ones(len(cell), dtype=bool)
        if len(cell) > CELLS:
            now = bound <= np.partition(bound, CELLS - 1)[CELLS - 1]
    order = np.argsort(index := np.concatenate(points))
    return index[order], np.concatenate(seconds)[order]


def _first_cells(layout: Places, bound: Floats, keep: int | None) -> Bools:
    """The most promising cell of each of the most promising layouts; then come those of all."""
    first = _first_of_each(layout, bound)
    now = np.zeros(len(layout), dtype=bool)
    now[first[np.argsort(bound[first], kind="stable")[:keep]]] = True
    return now


def _first_of_each(layout: Places, bound: Floats) -> Places:
    """For each layout the place of its smallest bound; layouts come sorted."""
    starts = np.flatnonzero(np.diff(layout, prepend=-1))
    smallest = np.repeat(np.minimum.reduceat(bound, starts), np.diff([*starts, len(layout)]))
    hits = np.flatnonzero(bound == smallest)
    return hits[np.unique(layout[hits], return_index=True)[1]]


def timed(space: Space, index: Places) -> Floats:
    """Closed-form seconds of points."""
    coefficients = space.query.entry.coefficients
    return space.priced(index, lambda c: estimate(c, coefficients).step_s)


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
