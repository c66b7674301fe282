"""Layouts that an answer names beside its first choice: faster ones, the fastest that surely fits,
what may not fit, what was never measured; what was measured of a run's choices; and which uncertain
coefficient would change the first choice."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.coefficients import Coefficient
from fourfold.cost.fit.interval import TWO_SIDED_80, choices, scatter
from fourfold.cost.fit.ranges import axes
from fourfold.cost.memory.peak import fit_chance, moved_coefficients, moves
from fourfold.cost.predict import playable, predictions
from fourfold.cost.step.estimate import estimate
from fourfold.search.export import is_written
from fourfold.search.plan_answer import Alternative, Choice, Reversal
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Pool, Ranking, spec_at
from fourfold.spec.layout import MODEL_AXES

# Calibration files keep three digits of measured values.
ROUNDED = 1e-3
FEW_EVENTS = 10_000  # played of what is only named: some hundredths of a second
_SIZES = (*MODEL_AXES, "gpus", "seq", "hidden", "tokens")


def evidence(query: PlanQuery, c: Columns) -> dict[str, int]:
    """Measured rows behind each choice that one run makes."""
    made = {name: query.evidence.get(name, 0) for name, mask in choices(c).items() if mask[0]}
    if "recompute none" in made and c.moe_ckpt[0] + c.moe_act_ckpt[0] > 0:
        made["recompute none or of experts"] = made.pop("recompute none")  # counted as one
    return made if query.evidence else {}


def outside(query: PlanQuery, c: Columns) -> list[str]:
    """Sizes beyond what was measured: 'tp=4 (measured only at 8)'."""
    texts = []
    for name, value in axes(c).items():
        low, high = query.resolved.entry.ranges.get(name, (-np.inf, np.inf))
        if name in _SIZES and not low - ROUNDED <= value[0] <= high + ROUNDED:
            sizes = [f"{2.0**end:.0f}" for end in (float(value[0]), low, high)]
            only = f"only at {sizes[1]}" if sizes[1] == sizes[2] else f"{sizes[1]} to {sizes[2]}"
            texts.append(f"{name}={sizes[0]} (measured {only})")
    return texts


def _played(query: PlanQuery, points: Pool) -> Pool:
    """The fastest of a few points once their pipelines are played, as those that are ranked are."""
    if not points or not len(points["pp"]):
        return {}
    count = max(1, playable(query.columns(points), FEW_EVENTS))
    few = {name: column[:count] for name, column in points.items()}
    few["step_s"] = predictions(query.columns(few), query.resolved.entry).step_s
    best = int(np.argmin(few["step_s"]))
    return {name: column[best : best + 1] for name, column in few.items()}


def unproven_best(ranking: Ranking) -> Alternative | None:
    """The fastest of what was set aside for want of evidence."""
    query = ranking.query
    points = _played(query, ranking.unproven_best)
    if not points:
        return None
    rows = evidence(query, query.columns(points))
    without = tuple(name for name, count in rows.items() if not count)
    return alternative(query, points, without_rows=without)


def near_miss(ranking: Ranking) -> Alternative | None:
    """The fastest that may fit although our best estimate says no, if nothing ranked is faster."""
    query = ranking.query
    points = _played(query, ranking.near_miss)
    if not points or points["step_s"][0] >= ranking.step_s.min(initial=np.inf):
        return None
    chance = float(fit_chance(query.columns(points), query.resolved.entry)[0])
    peak_bytes = float(points["peak_bytes"][0])
    return alternative(query, points, fit_chance=chance, peak_bytes=peak_bytes)


def faster(ranking: Ranking) -> Alternative | None:
    """Return the fastest of what is faster than the first row and held back."""
    points = ranking.held_back
    if not points or not len(points["pp"]):
        return None
    query = ranking.query
    exported = is_written(query, spec_at(query, points, 0))
    chance = float(points["fit_chance"][0])
    return alternative(query, points, fit_chance=chance, exported=exported)


def alternative(query: PlanQuery, points: Pool, **more: Any) -> Alternative:
    one = Choice.at(0, points, query.policy)
    return Alternative(
        layout=one.layout,
        cp_kind=one.policy.cp_kind,
        sharding=one.policy.sharding,
        recompute=one.policy.recompute,
        virtual_stages=one.policy.virtual_stages,
        micro_batch=one.micro_batch,
        step_s=float(points["step_s"][0]),
        **more,
    )


LOOKED_AT = 24  # of the first layouts: which may be best
ONE_SIDED_80 = 0.8416  # 80% of a normal distribution lies below 0.84 sd
# Repeats of one run differ by about 1% (bloom, mpt and par4d tables).
REPEATS = 0.01
# What layouts of one stack that nobody measured err apart; the rest of its doubt moves all alike.
APART = 0.08


def tie_width(entry: FittedStack) -> float:
    """Log ratio of two predictions below which their order is right less than 4 times in 5: what is
    open of coefficients moves both."""
    sd = scatter(entry) / TWO_SIDED_80
    sd = max(REPEATS, sd if entry.rows_time else min(sd, APART))
    return ONE_SIDED_80 * sqrt(2.0) * sd


def _moved(ranking: Ranking, count: int) -> tuple[list[tuple[Coefficient, float]], Floats]:
    """(what is moved and how far, [moves, candidates] seconds of the first candidates with one
    coefficient moved at a time)."""
    entry, c = ranking.query.resolved.entry, ranking.predicted.columns.take(slice(count))
    ends = moves(entry, "time")
    step = estimate(c, moved_coefficients(entry, ends)).step_s
    return ends, np.broadcast_to(step, (len(ends), len(c)))


def reversals(ranking: Ranking) -> tuple[Reversal, ...]:
    """Coefficients that, moved within what is not known of them, make a layout fastest that is
    slower than the first without; the largest gain first, one of each coefficient."""
    count = min(LOOKED_AT, len(ranking))
    if count < 2:
        return ()
    ends, step = _moved(ranking, count)
    # What simulation added to the closed form stays added.
    step = step * (ranking.step_s[:count] / ranking.closed_s[:count])
    turned: list[Reversal] = []
    for (coefficient, other), row in zip(ends, step, strict=True):
        winner = int(np.argmin(row))
        gain = float(row[0] / row[winner])
        if ranking.step_s[winner] <= ranking.step_s[0]:
            continue  # the first is it, or stands before it for other reasons
        if gain > 1.0 + REPEATS and ranking.layout(winner) != ranking.layout(0):
            reversal = Reversal(
                knob=coefficient.name,
                about=coefficient.about,
                value=ranking.query.resolved.entry.coefficients[coefficient.name],
                other=other,
                winner=winner + 1,
                layout=ranking.layout(winner),
                gain=gain,
            )
            turned.append(reversal)
    best: dict[str, Reversal] = {}
    for one in sorted(turned, key=lambda one: -one.gain):
        best.setdefault(one.knob, one)
    return tuple(best.values())


def deciding(ranking: Ranking, runs: int = 3) -> list[int]:
    """The candidates to measure: the first, and those that may be best whose order to it is most
    open.

    Open = a small difference where the coefficients say little: difference over its own spread.
    """
    if not len(ranking):
        return []
    apart = np.abs(np.log(ranking.step_s[:LOOKED_AT] / ranking.step_s[0]))
    tied = 1 + int(
        np.max(np.flatnonzero(apart <= 2.0 * tie_width(ranking.query.resolved.entry)), initial=0)
    )
    if tied < 2:
        return []
    _, step = _moved(ranking, tied)
    ratio = np.log(step / step[:, :1]) - np.log(ranking.closed_s[:tied] / ranking.closed_s[0])
    spread = np.sqrt((ratio**2).sum(axis=0) / 2.0) / TWO_SIDED_80
    gap = np.log(ranking.step_s[:tied] / ranking.step_s[0])
    doubt = (spread + REPEATS) / (np.abs(gap) + REPEATS)
    chosen, layouts = [0], {ranking.layout(0)}
    for i in np.argsort(-doubt, kind="stable"):
        if len(chosen) < runs and ranking.layout(int(i)) not in layouts:
            chosen.append(int(i))
            layouts.add(ranking.layout(int(i)))
    return chosen if len(chosen) > 1 else []
