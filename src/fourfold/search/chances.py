"""Chances of each layout to be best under what is not known, and what each is expected to lose.

Layouts of one model on one machine share their coefficients, so what is open of those is drawn once
for all of them; what no coefficient explains is drawn for each (in the published tables the spread
of the ratio of two layouts is 0.8 to 1.2 times that of independent errors).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit import spread
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.predict import Predictions
from fourfold.cost.step.estimate import PARTS

DRAWS = 512
NEAR = 1.02  # within 2% of the best is as good
# Repeats of one run differ by about 1% (bloom, mpt and par4d tables).
REPEATS = 0.01


@dataclass(frozen=True, slots=True)
class Chances:
    """Of each candidate: the chance of being within 2% of the fastest of them, and how much slower
    than the fastest it is expected to be (0.01: a percent)."""

    near_best: Floats
    regret: Floats


def chances(predicted: Predictions, entry: FittedStack) -> Chances:
    """The same draws for the same question: no clock and no state enters."""
    if not len(predicted):
        return Chances(np.zeros(0), np.zeros(0))
    step = _drawn_s(predicted, entry)
    ratio = step / step.min(axis=1, keepdims=True)
    return Chances((ratio <= NEAR).mean(axis=0), ratio.mean(axis=0) - 1.0)


def _drawn_s(predicted: Predictions, entry: FittedStack) -> Floats:
    """[draws, candidates] seconds."""
    rng = np.random.default_rng(0)
    parts = np.stack([predicted.times.parts[name] for name in PARTS])
    shared = np.ones((DRAWS, len(predicted)))
    if entry.spread:
        weight = spread.KNOWN if entry.rows_time else spread.UNKNOWN
        moves = weight * np.array(entry.spread)
        moved = np.exp(rng.standard_normal((DRAWS, len(moves))) @ moves)
        # A bubble may be counted below zero; a step may not.
        shared = np.maximum(moved @ parts / predicted.step_s, 0.05)
    away = spread.from_distance(predicted.columns, entry.values) / spread.TWO_SIDED_80**2
    own = np.sqrt(np.maximum(REPEATS, spread.NOISE * entry.noise) ** 2 + away)
    alone = np.exp(own * rng.standard_normal((DRAWS, len(predicted))))
    return predicted.step_s * shared * alone
