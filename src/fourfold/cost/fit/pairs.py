"""Pairs of measured runs that differ in one setting: whether the faster one was predicted to be,
and how far their ratio was off. What a planner is asked; nothing that a pair shares can help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from fourfold.cost.fit.accuracy import APART, Result, timed_rows
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

KNOBS: dict[str, tuple[str, ...]] = {
    "micro batch": ("mbs",),
    "precision": ("precision",),
    "recompute": ("act_ckpt", "recompute_modules"),
    "dispatcher": ("dispatcher",),
    "overlap": ("a2a_overlap",),
    "routing": ("routing",),
    "capacity": ("capacity_factor",),
}
_SHARED = (
    "source",
    "stack",
    "cluster",
    "hardware",
    "model",
    "n_layers",
    "d_model",
    "seq_len",
    "n_gpus",
    "gbs",
    *MODEL_AXES,
    *EXPERT_AXES,
    "vpp",
    "sharding",
    "cuda_graph",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScore:
    """Of one knob: pairs whose seconds are over 2% apart, those of which the faster one was
    predicted to be, and how far their ratio was off in the median."""

    how: str
    knob: str
    pairs: int
    signs_pct: float
    ratio_pct: float


def pair_scores(results: tuple[Result, ...]) -> tuple[PairScore, ...]:
    """Of every way to predict: each knob that some pair turns, and all of them together."""
    return tuple(score for one in results for score in _of_result(one))


def _of_result(one: Result) -> Iterator[PairScore]:
    found: dict[str, list[tuple[float, float]]] = {}
    for knob, i, j in _pairs(one):
        measured, guessed = (
            float(np.log(step[i] / step[j])) for step in (one.rows.step_s, one.answers.step_s)
        )
        if abs(measured) > np.log1p(APART):
            found.setdefault(knob, []).append((measured, guessed))
    if found:
        found["all"] = [pair for pairs in found.values() for pair in pairs]
    for knob, pairs in found.items():
        measured, guessed = np.array(pairs).T
        yield PairScore(
            how=one.how,
            knob=knob,
            pairs=len(pairs),
            signs_pct=100.0 * float(np.mean(measured * guessed > 0)),
            ratio_pct=100.0 * float(np.median(np.abs(np.expm1(guessed - measured)))),
        )


def _pairs(one: Result) -> Iterator[tuple[str, int, int]]:
    """(knob, row, row); of virtual stages and graphs both say the same, or nothing."""
    column = one.rows.table.column
    shared = list(zip(*map(column, _SHARED), strict=True))
    knobs = [list(zip(*map(column, names), strict=True)) for names in KNOBS.values()]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in np.flatnonzero(one.within & timed_rows(one.rows, one.answers)).tolist():
        groups.setdefault(shared[i], []).append(i)
    for group in groups.values():
        for i, j in combinations(group, 2):
            turned = [name for name, said in zip(KNOBS, knobs, strict=True) if said[i] != said[j]]
            if len(turned) == 1:
                yield turned[0], i, j
