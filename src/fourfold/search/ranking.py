"""Ranks layouts: memory of every legal point, closed-form seconds of every point that can be among
the best, event simulation of the best few hundred. choice.py has the rule of their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.predict import Predictions
from fourfold.events import Bar
from fourfold.search.bounds import Bounds, bounds_of
from fourfold.search.candidates import Candidates, candidates
from fourfold.search.choice import TIE
from fourfold.search.export import is_written
from fourfold.search.fastest import fastest, timed
from fourfold.search.listed import (
    Listed,
    fewest_s,
    layout_numbers,
    leading,
    listed,
    only,
)
from fourfold.search.near import near_best
from fourfold.search.plan_answer import Choice
from fourfold.search.query import PlanQuery
from fourfold.search.ran import measured_points
from fourfold.search.space import Space, holding, may_fit, space_of, sure, unproven
from fourfold.search.table import Bools, Places, PointTable, Pool
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec

# Of what is named beside a ranking, by closed form: played event by event, another may lead.
ASIDE = 8


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
    pace_s: float  # of the fastest that is likely to fit and that --export writes
    min_fit_chance: float  # of what counts as likely
    held_back: Pool  # the fastest of those that are faster than the first; one row or none
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

    @property
    def tied(self) -> int:
        """Rows that tie for the first place, the first among them."""
        return int(self.points["tied"].sum())

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
        """Return the place by seconds that the first row of another ranking has in this one: 1 and
        how many other layouts are faster in their fastest way to run, played where listed."""
        own = int(layout_numbers(only(other.points, slice(0, 1)))[0])
        listed_s = dict(zip(*(a.tolist() for a in fewest_s(self.points)), strict=True))
        faster = {n for n, step_s in listed_s.items() if step_s < other.step_s[0]}
        ways = self.fastest_ways().items()
        faster |= {n for n, step_s in ways if n not in listed_s and step_s < other.closed_s[0]}
        return 1 + len(faster - {own})

    def layout(self, i: int) -> Layout:
        return self.choice(i).layout

    def choice(self, i: int) -> Choice:
        return Choice.at(i, self.points, self.query.policy)

    def spec(self, i: int) -> RunSpec:
        """The run at a place."""
        return spec_at(self.query, self.points, i)

    def take(self, index: Places) -> Ranking:
        """Those at these places alone, in that order."""
        points = only(self.points, index)
        return replace(self, points=points, predicted=self.predicted.take(index))


def spec_at(query: PlanQuery, points: Pool, i: int) -> RunSpec:
    """Return the run of one of many points."""
    one = Choice.at(i, points, query.policy)
    batch = replace(query.batch, micro_batch=one.micro_batch)
    return replace(query.spec, layout=one.layout, batch=batch, policy=one.policy)


def rank_layouts(
    query: PlanQuery, *, least: int = 10, whole: bool = False, pace_s: float = np.inf
) -> Ranking:
    """Everything legal and fitting; the best priced in full, one way to run each layout, or more
    where there are fewer layouts than `least`. `whole`: also of very many points every one that is
    too slow to be listed has its place. `pace_s`: of the plan that ways to run a layout are
    compared in, as choice.order has it."""
    grid = candidates(query)
    bar = Bar(query.on_event, f"searching {grid.legal:,} configurations")
    for near, limit_s in () if whole else near_best(grid.table, least):
        space = space_of(near, bar)
        found = _ranking(query, grid, (space, space.likely, space.likely), bar, least, pace_s)
        sure_fits = found.fits >= found.min_fit_chance
        quick = np.maximum(found.closed_s, found.step_s) <= limit_s
        known = only(found.points, sure_fits & quick)
        has_ties = (1.0 + TIE) * found.pace_s <= limit_s
        if has_ties and len(np.unique(layout_numbers(known))) >= least:
            return replace(found, slower=grid.legal - int(near.legal.sum()))
    return _ranking(query, grid, _fitting(grid.table, bar), bar, least, pace_s)


def _ranking(
    query: PlanQuery,
    grid: Candidates,
    found: tuple[Space, Bools, Bools],
    bar: Bar,
    least: int,
    pace_s: float,
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
    measured = measured_points(query.own_runs, grid.table)

    def shown_of(ranked: Bools) -> Listed:
        return listed(
            bounds,
            ranked,
            space.roomy,
            new,
            least,
            is_written=is_written_point,
            pace_s=pace_s,
            measured=measured,
        )

    def is_written_point(points: Pool, i: int) -> bool:
        return is_written(query, spec_at(query, points, i))

    shown = shown_of(ranked)
    is_sure = shown.points["fit_chance"] >= 1.0 - query.risk
    if set_aside and not (query.safe or is_sure.any()):
        # What was never measured is still better than what may not fit.
        use_all, ranked, set_aside, aside = True, pool, 0, {}
        shown = shown_of(ranked)
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
        pace_s=shown.pace_s,
        min_fit_chance=shown.min_fit_chance,
        held_back=shown.held_back,
        bounds=bounds,
        ranked=ranked,
    )


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
