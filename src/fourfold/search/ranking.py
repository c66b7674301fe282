"""Ranks layouts: memory of every legal point, closed-form seconds of every point that can be among
the best, event simulation of the best few hundred. Seconds per step decide, memory breaks ties; the
first is the one that is expected to lose least against the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.predict import Predictions, playable, predictions
from fourfold.events import Bar
from fourfold.search.candidates import Candidates, candidates
from fourfold.search.chances import chances
from fourfold.search.fastest import Cells, cells_of, fastest, timed
from fourfold.search.query import PlanQuery
from fourfold.search.space import Bools, Pool, Space, holding, space_of, sure, unproven
from fourfold.spec.layout import MODEL_AXES, SIZES, Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import CHOSEN, RunSpec, chosen_layout, chosen_policy

# The best by closed form, whose pipelines are then played event by event; of one layout a few, so
# that a playing can still change which of them is best.
PLAYED, PLAYED_VARIANTS = 300, 3
PLAYED_EVENTS = 150_000  # of all of them together: about a second of work
LOOKED_AT = 24  # of those, which may be first
LOOKED_THROUGH = 4096  # points at a time while the best are picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The best points in full, best first."""

    query: PlanQuery
    grid: Candidates
    points: Pool
    predicted: Predictions
    fitting: int
    dropped: int  # by --where
    set_aside: int  # without evidence, and no --explore
    unproven_best: Pool  # the fastest of those, one row or none
    near_miss: Pool  # the fastest that is over the limit by our best estimate; one row or none
    cells: Cells
    ranked: Bools  # of the table's points

    @property
    def ways(self) -> int:
        """Points ranked, of all layouts."""
        return int(self.ranked.sum())

    @property
    def layouts(self) -> int:
        """Layouts ranked."""
        return len(np.unique(self.cells.layout(self.cells.holding(self.ranked))))

    def fastest_ways(self) -> dict[int, float]:
        """By number of each layout ranked, the closed form's seconds of the fastest way to run
        it."""
        index, step_s = fastest(self.cells, self.ranked, keep=None, variants=1)
        numbers, back = np.unique(
            layout_numbers(self.cells.space.points(index)), return_inverse=True
        )
        fewest = np.full(len(numbers), np.inf)
        np.minimum.at(fewest, back.reshape(-1), step_s)
        return dict(zip(numbers.tolist(), fewest.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def step_s(self) -> Floats:
        return self.predicted.step_s

    @property
    def closed_s(self) -> Floats:
        return self.predicted.closed_s

    def place(self, other: Ranking) -> int:
        """Where the first of another ranking would stand in this one's table, which has one row a
        layout: 1 and how many other layouts are faster, played where they were played."""
        (own,) = layout_numbers(_only(other.points, slice(0, 1)))
        listed = layout_numbers(self.points)
        faster = set(listed[self.step_s < other.step_s[0]].tolist())
        played = set(listed.tolist())
        ways = self.fastest_ways().items()
        faster |= {n for n, step_s in ways if n not in played and step_s < other.closed_s[0]}
        return 1 + len(faster - {int(own)})

    def layout(self, i: int) -> Layout:
        return chosen_layout(self.points, i)

    def policy(self, i: int) -> Policy:
        return chosen_policy(self.query.policy, self.points, i)

    def spec(self, i: int) -> RunSpec:
        """The run at a place."""
        batch = replace(self.query.batch, micro_batch=int(self.points["micro_batch"][i]))
        return replace(self.query.spec, layout=self.layout(i), batch=batch, policy=self.policy(i))


def rank_layouts(query: PlanQuery, *, least: int = 10) -> Ranking:
    """Everything legal and fitting; the best priced in full, one way to run each layout, or more
    where there are fewer layouts than `least`."""
    grid = candidates(query)
    bar = Bar(query.on_event, f"searching {grid.legal:,} ways to run it")
    space = space_of(query, grid, bar)
    cells = cells_of(space)
    bar(0.85)
    may_fit = space.likely | space.near
    pool = _where(space, may_fit)
    fitting, left = int(may_fit.sum()), int(pool.sum())
    pool, over = _likely(space, pool)
    new = np.broadcast_to(unproven(space), pool.shape)
    proven = pool & ~new
    use_all = query.explore or not proven.any()
    ranked = pool if use_all else proven
    rivals = over if query.explore else over & ~new
    set_aside = int(pool.sum()) - int(ranked.sum())
    aside = {} if use_all else _best(_pool(cells, pool & new, new, 1, 1), 1, 1)
    ranked = sure(space, ranked) if query.safe else ranked
    bar(0.95)
    points, predicted = _full(cells, ranked, new, least)
    return Ranking(
        query=query,
        grid=grid,
        points=points,
        predicted=predicted,
        fitting=fitting,
        dropped=fitting - left,
        set_aside=set_aside,
        unproven_best=aside,
        near_miss=_best(_pool(cells, rivals, new, 1, 1), 1, 1),
        cells=cells,
        ranked=ranked,
    )


def _size(pool: Pool) -> int:
    return len(pool["pp"])


def _only(pool: Pool, mask: NDArray[np.intp] | slice) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def _where(space: Space, mask: Bools) -> Bools:
    """What the user's conditions leave; those about seconds are asked once seconds are known."""
    asked = space.query.where
    mask = holding(space, mask, [one for one in asked if "step_s" not in one.names])
    priced = [one for one in asked if "step_s" in one.names]
    return holding(space, mask, priced, timed(space, np.flatnonzero(mask))) if priced else mask


def _likely(space: Space, mask: Bools) -> tuple[Bools, Bools]:
    """(points that fit by our best estimate, all where none does; the others)."""
    fits = mask & space.likely
    return (fits, mask & ~fits) if fits.any() else (mask, np.zeros_like(mask))


def _pool(cells: Cells, mask: Bools, new: Bools, keep: int, variants: int) -> Pool:
    """All that can be among the fastest, with its seconds and bytes."""
    index, step_s = fastest(cells, mask, keep=keep, variants=variants)
    found = {"step_s": step_s, "peak_bytes": cells.space.peak_bytes(index)}
    return cells.space.points(index) | found | {"unproven": new[np.divmod(index, mask.shape[1])]}


def layout_numbers(points: Pool) -> NDArray[np.int64]:
    """One number for what `_layout_keys` tells apart; dp follows from the other axes."""
    sizes = (points[name].astype(np.int64) for name in ("cp_kind", *MODEL_AXES[::-1]))
    number = np.zeros(_size(points), dtype=np.int64)
    for size in sizes:
        number = (number << 20) + size
    return number


def _layout_keys(points: Pool) -> list[tuple[int, ...]]:
    """What makes two points the same layout: the sizes of the axes and the kind of cp."""
    dp = points["replicate"] * points["shard"]
    columns = (points["pp"], dp, points["cp"], points["tp"], points["cp_kind"])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _best(pool: Pool, keep: int, variants: int) -> Pool:
    """The fastest points, at most `variants` of each layout. Splits of dp into copies that change
    nothing else are one point: the faster, then the smaller, then the plainer stands for all."""
    order = np.lexsort((pool["replicate"], pool["peak_bytes"], pool["step_s"]))
    rest = [name for name in CHOSEN if name not in SIZES]
    chosen: list[int] = []
    seen: set[tuple[int, ...]] = set()
    used: dict[tuple[int, ...], int] = {}
    for block in range(0, len(order), LOOKED_THROUGH):
        part = order[block : block + LOOKED_THROUGH]
        keys = _layout_keys(_only(pool, part))
        others = zip(*(pool[name][part].tolist() for name in rest), strict=True)
        for i, layout, other in zip(part.tolist(), keys, others, strict=True):
            if used.get(layout, 0) < variants and (*layout, *other) not in seen:
                seen.add((*layout, *other))
                used[layout] = used.get(layout, 0) + 1
                chosen.append(i)
                if len(chosen) == keep:
                    return _only(pool, np.array(chosen, dtype=np.intp))
    return _only(pool, np.array(chosen, dtype=np.intp))


def _full(cells: Cells, ranked: Bools, new: Bools, least: int) -> tuple[Pool, Predictions]:
    """A few points, best first, with simulated pipelines, intervals and memory."""
    query, points = cells.space.query, {}
    for variants in (PLAYED_VARIANTS, max(PLAYED_VARIANTS, least)):
        points = _best(_pool(cells, ranked, new, PLAYED, variants), PLAYED, variants)
        if _size(points) >= PLAYED_VARIANTS * least:
            break
    c = query.columns(points)
    count = max(least, playable(c, PLAYED_EVENTS))
    points, c = _only(points, slice(count)), c.take(slice(count))
    predicted = predictions(c, query.entry)
    order = np.lexsort((points["peak_bytes"], predicted.step_s))
    order = order[_first_few(_layout_keys(_only(points, order)), least)]
    if len(order):  # of those that may be best, the one expected to lose least comes first
        first = np.argmin(chances(predicted.take(order[:LOOKED_AT]), query.entry).regret)
        order = np.concatenate([order[[first]], np.delete(order, first)])
    return _only(points, order), predicted.take(order)


def _first_few(keys: list[tuple[int, ...]], least: int) -> NDArray[np.bool_]:
    """True for the first of each key, or for the first few, as many as give `least` in all."""
    used: Counter[tuple[int, ...]] = Counter()
    place = np.zeros(len(keys), dtype=np.int64)
    for i, key in enumerate(keys):
        used[key] += 1
        place[i] = used[key]
    few = 1
    while (place <= few).sum() < min(least, len(keys)):
        few += 1
    return place <= few
