"""The choice without which a question that has no legal layout would have some: the rule that it
breaks, and the nearest legal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from fourfold.errors import sentence
from fourfold.search.candidates import Candidates, candidates
from fourfold.search.legal import Refusal, why_not
from fourfold.search.plan_answer import Choice
from fourfold.search.query import PlanQuery
from fourfold.search.rules.case import divisors
from fourfold.spec.layout import AXES, EXPERT_AXES, MODEL_AXES
from fourfold.spec.words import CP_KINDS, RECOMPUTE_KINDS, SCHEDULES, SHARDINGS

# Fields that a user may decide -> the column of a search, and words for its numbers.
_COLUMNS: dict[str, tuple[str, Sequence[str]]] = {
    **{axis: (axis, ()) for axis in (*EXPERT_AXES, *MODEL_AXES)},
    "dp": ("dp", ()),
    "micro_batch": ("micro_batch", ()),
    "virtual_stages": ("virtual_stages", ()),
    "sharding": ("zero", SHARDINGS),
    "cp_kind": ("cp_kind", CP_KINDS),
    "schedule": ("schedule", SCHEDULES),
    "recompute": ("recompute", RECOMPUTE_KINDS),
}


def culprit(query: PlanQuery) -> str:
    """Return a sentence on that choice; '' where no choice alone is to blame. Of several, the one
    that the broken rule is about is named."""
    sentences = []
    for name in _COLUMNS:
        if name in query.fixed and (grid := candidates(_without(query, name))).legal:
            refusal = _broken_rule(query, name, grid)
            sentences.append(
                (refusal.field.rpartition(".")[2] != name, _sentence(query, name, grid, refusal))
            )
    return min(sentences, default=(False, ""), key=itemgetter(0))[1]


def _without(query: PlanQuery, name: str) -> PlanQuery:
    """Return the query with one choice left open."""
    gone = {name, "replicate"} if name == "dp" else {name}
    policy = replace(query.policy, schedule="1f1b") if name == "schedule" else query.policy
    fixed = {key: value for key, value in query.fixed.items() if key not in gone}
    return replace(query, policy=policy, fixed=fixed)


def _sentence(query: PlanQuery, name: str, grid: Candidates, refusal: Refusal) -> str:
    flag, asked = f"--{name.replace('_', '-')}", query.fixed[name]
    rule = sentence(refusal.rule, field=refusal.field, value=refusal.value)
    legal = _slices(query) if name == "etp" else _legal_values(name, grid)
    near = (
        [value for value in legal if value != asked] if _COLUMNS[name][1] else _around(legal, asked)
    )
    return f"no layout has {flag} {asked}: {rule}; use {' or '.join(f'{flag} {v}' for v in near)}"


def _legal_values(name: str, grid: Candidates) -> list[Any]:
    column, words = _COLUMNS[name]
    values = np.unique(_points(grid)[column]).tolist()
    return [words[value] if words else value for value in values]


def _slices(query: PlanQuery) -> list[int]:
    """Return the legal `etp` next below and above the asked one: a search tries few by itself."""
    asked, sizes = query.fixed["etp"], divisors(query.gpus)
    size = asked if isinstance(asked, int) else 0
    sides = ([n for n in reversed(sizes) if n < size], [n for n in sizes if n > size])
    nearest = (next((n for n in side if _allows_slices(query, n)), None) for side in sides)
    return [etp for etp in nearest if etp is not None]


def _allows_slices(query: PlanQuery, etp: int) -> bool:
    return candidates(replace(query, fixed=query.fixed | {"etp": etp})).legal > 0


def _points(grid: Candidates) -> dict[str, Any]:
    points = grid.table.points(np.flatnonzero(grid.table.legal))
    return points | {"dp": points["replicate"] * points["shard"]}


def _around(values: list[int], asked: object) -> list[int]:
    """Return the nearest value below, and the nearest above."""
    size = asked if isinstance(asked, int) else 0
    below, above = [v for v in values if v < size], [v for v in values if v > size]
    return [*below[-1:], *above[:1]]


def _broken_rule(query: PlanQuery, name: str, grid: Candidates) -> Refusal:
    """Return the first rule that the plainest legal point breaks with the user's value."""
    column, words = _COLUMNS[name]
    points, asked = _points(grid), query.fixed[name]
    code = (
        words.index(str(asked).partition("-")[0] if name == "recompute" else str(asked))
        if words
        else asked
    )
    keys = ("recompute", "zero", "micro_batch", "virtual_stages", *AXES[::-1])
    plainest = int(np.lexsort([points[key] for key in keys])[0])
    point = {key: values[plainest : plainest + 1] for key, values in points.items()}
    point["shard" if column == "dp" else column] = np.array([code])
    choice = Choice.at(0, point, query.policy)
    batch = replace(query.batch, micro_batch=choice.micro_batch)
    target = replace(query.target, gpus=None)
    for refusal in why_not(query.model, choice.layout, batch, choice.policy, target):
        return refusal
    return Refusal(
        "world", name, asked, f"does not go with {query.gpus} GPUs and the other choices"
    )
