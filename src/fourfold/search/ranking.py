"""Ranks layouts: memory of every legal point, closed-form seconds of every point that can be among
the best, event simulation of the best few hundred. The first is the fastest that is sure to fit and
that an engine with settings to write can run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.predict import Predictions
from fourfold.events import Bar
from fourfold.search.bounds import Bounds, bounds_of
from fourfold.search.candidates import Candidates, candidates
from fourfold.search.choice import sure_line
from fourfold.search.export import is_written
from fourfold.search.fastest import fastest, timed
from fourfold.search.listed import fewest_s, layout_numbers, leading, listed, only
from fourfold.search.near import near_best
from fourfold.search.plan_answer import Choice
from fourfold.search.query import PlanQuery
from fourfold.search.space import Space, holding, may_fit, space_of, sure, unproven
from fourfold.search.table import Bools, Places, PointTable, Pool
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec

# Of what is named beside a ranking, by closed form: played event by event, another may lead.
ASIDE = 8
LOOKED_AT = 40  # for one that an engine can run


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
    unproven_best: Pool  # the fastest of those, at most ASIDE rows
    near_miss: Pool  # faster ones that are over the limit by our best estimate; at most ASIDE rows
    fastest: Pool  # of all that were played, one row or none
    bounds: Bounds
    ranked: Bools  # of the table's points
    slower: int = 0  # legal points that are too slow to be listed: not looked at

    @property
    def ways(self) -> int:
        """Points ranked, of all layouts."""
        return int(self.ranked.sum())

    @property
    def layouts(self) -> int:
        """Layouts ranked."""
        return len(np.unique(self.bounds.layouts[self.ranked.any(axis=1)]))

    def fastest_ways(self) -> dict[int, float]:
        """By number of each layout ranked, the closed form's seconds of the fastest way to run
        it."""
        index, step_s = fastest(self.bounds, self.ranked, keep=None, variants=1)
        both = fewest_s(self.bounds.table.points(index) | {"step_s": step_s})
        return dict(zip(*(one.tolist() for one in both), strict=True))

    def __len__(self) -> int:
        return len(self.predicted)

    @property
    def fits(self) -> Floats:
        """Chances."""
        return self.points["fit_chance"]

    @property
    def step_s(self) -> Floats:
        return self.predicted.step_s

    @property
    def closed_s(self) -> Floats:
        return self.predicted.closed_s

    def place(self, other: Ranking) -> int:
        """Where the layout of another ranking's first stands in this one's table; of one that is
        not listed, 1 and how many layouts are faster, played where they were played."""
        own = int(layout_numbers(only(other.points, slice(0, 1)))[0])
        numbers = layout_numbers(self.points)
        if own in numbers:
            return len(set(numbers[: int(np.argmax(numbers == own)) + 1].tolist()))
        faster = set(numbers[self.step_s < other.step_s[0]].tolist())
        played = set(numbers.tolist())
        ways = self.fastest_ways().items()
        faster |= {n for n, step_s in ways if n not in played and step_s < other.closed_s[0]}
        return 1 + len(faster - {own})

    def layout(self, i: int) -> Layout:
        return self.choice(i).layout

    def choice(self, i: int) -> Choice:
        return Choice.at(i, self.points, self.query.policy)

    def spec(self, i: int) -> RunSpec:
        """The run at a place."""
        one = self.choice(i)
        batch = replace(self.query.batch, micro_batch=one.micro_batch)
        return replace(self.query.spec, layout=one.layout, batch=batch, policy=one.policy)

    def take(self, index: Places) -> Ranking:
        """Those at these places alone, in that order."""
        points = only(self.points, index)
        return replace(self, points=points, predicted=self.predicted.take(index))


def rank_layouts(query: PlanQuery, *, least: int = 10, whole: bool = False) -> Ranking:
    """Everything legal and fitting; the best priced in full, one way to run each layout, or more
    where there are fewer layouts than `least`. `whole`: also of very many points every one that is
    too slow to be listed has its place."""
    grid = candidates(query)
    bar = Bar(query.on_event, f"searching {grid.legal:,} configurations")
    for near, limit_s in () if whole else near_best(grid.table, least):
        space = space_of(near, bar)
        found = _ranking(query, grid, (space, space.likely, space.likely), bar, least)
        sure_fits = found.fits >= sure_line(found.fits, query.risk)
        quick = np.maximum(found.closed_s, found.step_s) <= limit_s
        known = only(found.points, sure_fits & quick)
        if len(np.unique(layout_numbers(known))) >= least:
            return _runnable_first(replace(found, slower=grid.legal - int(near.legal.sum())))
    return _runnable_first(_ranking(query, grid, _fitting(grid.table, bar), bar, least))


def _ranking(
    query: PlanQuery, grid: Candidates, found: tuple[Space, Bools, Bools], bar: Bar, least: int
) -> Ranking:
    space, fits, pool = found
    fitting, left = int(fits.sum()), int(pool.sum())
    bar(0.85)
    bounds = bounds_of(space, pool | space.close)
    new = np.broadcast_to(unproven(space), pool.shape)
    proven = pool & ~new
    use_all = query.explore or not proven.any()
    ranked = pool if use_all else proven
    set_aside = int(pool.sum()) - int(ranked.sum())
    aside = {} if use_all else leading(bounds, pool & new, new, ASIDE, 1)
    ranked = sure(space, ranked) if query.safe else ranked
    bar(0.95)
    shown = listed(bounds, ranked, space.roomy, new, least)
    is_sure = shown.points["fit_chance"] >= 1.0 - query.risk
    if set_aside and not (query.safe or is_sure.any()):
        # What was never measured is still better than what may not fit.
        use_all, ranked, set_aside, aside = True, pool, 0, {}
        shown = listed(bounds, ranked, space.roomy, new, least)
    return Ranking(
        query=query,
        grid=grid,
        points=shown.points,
        predicted=shown.predicted,
        fitting=fitting,
        dropped=fitting - left,
        set_aside=set_aside,
        unproven_best=aside,
        near_miss=_near_miss(bounds, space.close & ~ranked & (use_all | ~new), new, shown.least_s),
        fastest=shown.fastest,
        bounds=bounds,
        ranked=ranked,
    )


def _runnable_first(ranking: Ranking) -> Ranking:
    """The first that is sure to fit and that --export writes for the engine whose seconds these are
    comes first; as it was, where none of those looked at is."""
    query = ranking.query
    line = sure_line(ranking.fits, query.risk)
    sure = np.flatnonzero(ranking.fits >= line)[:LOOKED_AT]
    first = next((int(i) for i in sure if is_written(query, ranking.spec(int(i)))), 0)
    if first == 0:
        return ranking
    return ranking.take(np.insert(np.delete(np.arange(len(ranking)), first), 0, first))


def _where(space: PointTable, mask: Bools) -> Bools:
    """What the user's conditions leave; those about seconds are asked once seconds are known."""
    asked = space.query.where
    mask = holding(space, mask, [one for one in asked if "step_s" not in one.names])
    priced = [one for one in asked if "step_s" in one.names]
    return holding(space, mask, priced, timed(space, np.flatnonzero(mask))) if priced else mask


def _fitting(table: PointTable, bar: Bar) -> tuple[Space, Bools, Bools]:
    """(the table, what fits by our best estimate, what the user's conditions leave of it); where
    that is nothing, the same of all that may fit."""
    space = space_of(table, bar)
    fits = space.likely
    pool = _where(space, fits)
    if not pool.any():
        space = space_of(table, bar, every=True)
        fits = may_fit(space)
        pool = _where(space, fits)
    return space, fits, pool


def _near_miss(bounds: Bounds, rivals: Bools, new: Bools, least_s: float) -> Pool:
    """The fastest that may fit although our best estimate says no, where nothing ranked is as
    fast."""
    rivals = _where(bounds.table, rivals) if np.isfinite(least_s) else np.zeros_like(rivals)
    found = leading(bounds, rivals, new, ASIDE, 1, most_s=least_s)
    return only(found, found["step_s"] < least_s)
