"""Layouts that an answer names beside its first choice: faster ones, the fastest that surely fits,
what may not fit, what was never measured; and what was measured of a run's choices."""

from __future__ import annotations

from typing import Any

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.fit.interval import choices
from fourfold.cost.fit.ranges import axes
from fourfold.cost.memory.peak import fit_chance
from fourfold.cost.predict import playable, predictions
from fourfold.search.plan_answer import Alternative
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Pool, Ranking
from fourfold.spec.layout import MODEL_AXES
from fourfold.spec.run import chosen_layout, chosen_policy

# Calibration files keep three digits of measured values.
ROUNDED = 1e-3
FEW_EVENTS = 10_000  # played of what is only named: some hundredths of a second
_SIZES = (*MODEL_AXES, "gpus", "seq", "hidden", "tokens")


def evidence(query: PlanQuery, c: Columns) -> dict[str, int]:
    """Measured rows behind each choice that one run makes."""
    made = (name for name, mask in choices(c).items() if mask[0])
    return {name: query.evidence.get(name, 0) for name in made} if query.evidence else {}


def outside(query: PlanQuery, c: Columns) -> list[str]:
    """Sizes beyond what was measured: 'tp 4 (measured 8 to 8)'."""
    texts = []
    for name, value in axes(c).items():
        low, high = query.entry.ranges.get(name, (-np.inf, np.inf))
        if name in _SIZES and not low - ROUNDED <= value[0] <= high + ROUNDED:
            sizes = [f"{2.0**end:.0f}" for end in (float(value[0]), low, high)]
            texts.append(f"{name} {sizes[0]} (measured {sizes[1]} to {sizes[2]})")
    return texts


def _played(query: PlanQuery, points: Pool) -> Pool:
    """The fastest of a few points once their pipelines are played, as those that are ranked are."""
    if not points or not len(points["pp"]):
        return {}
    count = max(1, playable(query.columns(points), FEW_EVENTS))
    few = {name: column[:count] for name, column in points.items()}
    few["step_s"] = predictions(query.columns(few), query.entry).step_s
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
    chance = float(fit_chance(query.columns(points), query.entry)[0])
    peak_bytes = float(points["peak_bytes"][0])
    return alternative(query, points, fit_chance=chance, peak_bytes=peak_bytes)


def faster(ranking: Ranking) -> Alternative | None:
    """The fastest of what is ranked, where that is not the first."""
    points = ranking.fastest
    if not points or not len(points["pp"]) or points["step_s"][0] >= ranking.step_s[0]:
        return None
    return alternative(ranking.query, points, fit_chance=float(points["fit_chance"][0]))


def alternative(query: PlanQuery, points: Pool, **more: Any) -> Alternative:
    policy = chosen_policy(query.policy, points, 0)
    return Alternative(
        layout=chosen_layout(points, 0),
        cp_kind=policy.cp_kind,
        sharding=policy.sharding,
        recompute=policy.recompute,
        virtual_stages=policy.virtual_stages,
        micro_batch=int(points["micro_batch"][0]),
        step_s=float(points["step_s"][0]),
        **more,
    )
