"""Ranks layouts: memory of every legal point, closed-form seconds of every point that fits, event
simulation of the best few hundred. Seconds per step decide, memory breaks ties; the first is the
one that is expected to lose least against the others.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.interval import choices
from fourfold.cost.memory.peak import SURE, fit_chance, memory, memory_bounds
from fourfold.cost.predict import Predictions, playable, predictions
from fourfold.cost.step.estimate import estimate
from fourfold.events import Event
from fourfold.search.candidates import Candidates, candidates
from fourfold.search.chances import chances
from fourfold.search.query import PlanQuery
from fourfold.spec.expression import in_gib
from fourfold.spec.layout import MODEL_AXES, SIZES, Layout
from fourfold.spec.policy import Policy
from fourfold.spec.run import CHOSEN, RunSpec, chosen_layout, chosen_policy

CHUNK = 16384
WIDEST = 1.5  # no interval of memory reaches further above its limit
PATIENCE_S = 2.0
# The best by closed form, whose pipelines are then played event by event; of one layout a few, so
# that a playing can still change which of them is best.
PLAYED, PLAYED_VARIANTS = 300, 3
PLAYED_EVENTS = 150_000  # of all of them together: about a second of work
LOOKED_AT = 24  # of those, which may be first

# Columns by CHOSEN and by what was computed about them.
Pool = dict[str, NDArray[Any]]


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
    all_step_s: Floats  # closed-form seconds of everything ranked, sorted
    layouts: NDArray[np.int64]  # a number for each layout ranked ...
    layouts_s: Floats  # ... and the closed form's seconds of the fastest way to run it

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
        unplayed = ~np.isin(self.layouts, listed)
        faster |= set(self.layouts[unplayed & (self.layouts_s < other.closed_s[0])].tolist())
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
    """Everything legal and fitting, priced; the best in full, one way to run each layout, or more
    where there are fewer layouts than `least`."""
    grid = candidates(query)
    pool = _that_fit(query, grid)
    fitting = _size(pool)
    pool = _where(query, pool, priced=False)
    pool["step_s"] = _chunked(
        query, pool, lambda c: estimate(c, query.entry.coefficients).step_s, "layouts timed:"
    )
    pool = _where(query, pool, priced=True)
    dropped = fitting - _size(pool)
    pool, near_miss = _likely(query, pool)
    proven = _only(pool, ~pool["unproven"])
    use_all = query.explore or not _size(proven)
    ranked = pool if use_all else proven
    aside = {} if use_all else _best(_only(pool, pool["unproven"]), 1, 1)
    set_aside = _size(pool) - _size(ranked)
    ranked = _surely(query, ranked) if query.safe else ranked
    points, predicted = _full(query, ranked, least)
    layouts, layouts_s = _fastest_ways(ranked)
    return Ranking(
        query=query,
        grid=grid,
        points=points,
        predicted=predicted,
        fitting=fitting,
        dropped=dropped,
        set_aside=set_aside,
        unproven_best=aside,
        near_miss=near_miss,
        all_step_s=np.sort(ranked["step_s"]),
        layouts=layouts,
        layouts_s=layouts_s,
    )


def _fastest_ways(pool: Pool) -> tuple[NDArray[np.int64], Floats]:
    """Every layout of a pool, and the seconds of its fastest point."""
    numbers, back = np.unique(layout_numbers(pool), return_inverse=True)
    fastest = np.full(len(numbers), np.inf)
    np.minimum.at(fastest, back, pool["step_s"])
    return numbers, fastest


def _size(pool: Pool) -> int:
    return len(pool["pp"])


def _only(pool: Pool, mask: NDArray[Any] | slice) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def _chunked(query: PlanQuery, points: Pool, compute: Any, telling: str = "") -> Floats:
    """compute(columns) of every point, a cache-sized piece at a time; long work tells how far."""
    pieces, size = [], _size(points)
    told_at = time.monotonic()
    for start in range(0, size, CHUNK):
        pieces.append(compute(query.columns(_only(points, slice(start, start + CHUNK)))))
        if telling and time.monotonic() - told_at > PATIENCE_S:
            told_at = time.monotonic()
            text = f"{telling} {min(start + CHUNK, size):,} of {size:,}"
            query.on_event(Event(text, "progress"))
    return np.concatenate(pieces) if pieces else np.zeros(0)


def _that_fit(query: PlanQuery, grid: Candidates) -> Pool:
    """Legal points whose fullest stage may fit, its bytes, and whether rows back the choices."""
    limit = query.limit_bytes

    def peak(c: Columns) -> Floats:
        return memory(c, query.entry.coefficients).worst_bytes

    rows = np.flatnonzero(_chunked(query, grid.smallest(), peak) < WIDEST * limit)
    points: Pool = dict(grid.points(rows))
    points["peak_bytes"] = _chunked(query, points, peak, "layouts checked for memory:")
    points = _only(points, points["peak_bytes"] < WIDEST * limit)
    # Above the limit, but not surely: kept, with their chance.
    over = np.flatnonzero(points["peak_bytes"] >= limit)
    near = _only(points, over)
    low = _chunked(query, near, lambda c: memory_bounds(c, query.entry)[0])
    fits = points["peak_bytes"] < limit
    fits[over] = low < limit
    points = _only(points, fits)
    points["unproven"] = _chunked(query, points, lambda c: unproven(query, c)).astype(bool)
    return points


def _likely(query: PlanQuery, pool: Pool) -> tuple[Pool, Pool]:
    """Points that fit by our best estimate, all where none does; and the fastest of the others
    whose choices were measured (or are explored)."""
    fits = pool["peak_bytes"] < query.limit_bytes
    if not fits.any():
        return pool, {}
    over = ~fits if query.explore else ~fits & ~pool["unproven"]
    return _only(pool, fits), _best(_only(pool, over), 1, 1)


def _surely(query: PlanQuery, pool: Pool) -> Pool:
    """Points that fit by a chance of 90% or more; all, where none does."""
    sure = _only(pool, _chunked(query, pool, lambda c: fit_chance(c, query.entry)) >= SURE)
    return sure if _size(sure) else pool


def unproven(query: PlanQuery, c: Columns) -> NDArray[np.bool_]:
    """Which candidates make a choice that no measured row of the calibration makes."""
    new = np.zeros(len(c), dtype=bool)
    for name, made in choices(c).items():
        if query.evidence and not query.evidence.get(name, 0):
            new |= made
    return new


def _where(query: PlanQuery, pool: Pool, *, priced: bool) -> Pool:
    """What the user's conditions leave; those about seconds are asked once seconds are known."""
    asked = [one for one in query.where if ("step_s" in one.names) == priced]
    if not asked or not _size(pool):
        return pool
    values = {
        **{axis: pool[axis] for axis in MODEL_AXES},
        "dp": pool["replicate"] * pool["shard"],
        "vp": pool["virtual_stages"],
        "micro_batch": pool["micro_batch"],
        "global_batch": query.batch.global_batch,
        "seq_len": query.batch.seq_len,
        "gpus": query.gpus,
        "nodes": -(-query.gpus // query.cluster.host_gpus),
        "layers": query.model.layers,
        "hidden": query.model.hidden,
        "heads": query.model.heads,
        **in_gib(pool["peak_bytes"]),
        "step_s": pool.get("step_s"),
    }
    held = np.ones(_size(pool), dtype=bool)
    for one in asked:
        held &= one.holds(values)
    return _only(pool, held)


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
    for block in range(0, len(order), CHUNK):
        part = order[block : block + CHUNK]
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


def _full(query: PlanQuery, ranked: Pool, least: int) -> tuple[Pool, Predictions]:
    """A few points, best first, with simulated pipelines, intervals and memory."""
    points = _best(ranked, PLAYED, PLAYED_VARIANTS)
    if _size(points) < PLAYED_VARIANTS * least:
        points = _best(ranked, PLAYED, max(PLAYED_VARIANTS, least))
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
