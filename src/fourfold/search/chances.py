"""Chances of each layout to be best under what is not known, and what each is expected to lose.

Layouts of one model on one machine share their coefficients, so what is open of those is drawn once
for all of them; what no coefficient explains is drawn for each layout (in the published tables the
spread of the ratio of two layouts is 0.8 to 1.2 times that of independent errors). Away from what
was measured layouts err together: those beyond the same end of an axis share one draw. Whether a
run fits hangs on what its engine keeps, so one draw decides for all: where a layout fits, those
with a larger chance do.

A run that does not fit is a lost try, and the surest fast layout runs instead. The best of a draw
is the fastest of those that fit in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit import spread
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.memory.peak import SURE, fit_chance
from fourfold.cost.predict import Predictions
from fourfold.cost.step.estimate import PARTS

DRAWS = 512
NEAR = 1.02  # within 2% of the best is as good
# Repeats of one run differ by about 1% (bloom, mpt and par4d tables).
REPEATS = 0.01
# Of layouts where nothing but kernels was measured: our engine's steps on a CPU lay 21% below to
# 14% above what its profile said (docs/accuracy.md). What a profile leaves open beyond is the same
# for all of them, and changes no order.
APART = 0.08
# What a try that runs out of memory costs: as much as a run that is 5% slower.
LOST_TRY = 0.05
# What is run in the end, where the layout that is 90% sure does not fit either.
NEARLY_CERTAIN = 0.99


@dataclass(frozen=True, slots=True)
class Chances:
    """Of each candidate: the chance that it fits; that it does and is within 2% of the fastest that
    does; and how much is lost against that one by choosing it (0.01: a percent)."""

    fits: Floats
    near_best: Floats
    regret: Floats

    def take(self, index: NDArray[np.intp]) -> Chances:
        return Chances(self.fits[index], self.near_best[index], self.regret[index])


def chances(
    predicted: Predictions, entry: FittedStack, layouts: NDArray[np.int64] | None = None
) -> Chances:
    """`layouts`: a number for the layout of each candidate, where several are ways to run one. The
    same draws for the same question: no clock and no state enters."""
    if not len(predicted):
        return Chances(np.zeros(0), np.zeros(0), np.zeros(0))
    rng = np.random.default_rng(0)
    step = _drawn_s(rng, predicted, entry, layouts)
    chance = fit_chance(predicted.columns, entry)
    mean_s = step.mean(axis=0)
    fits = (rng.permutation(DRAWS)[:, None] + 0.5) / DRAWS < chance
    best = np.where(fits, step, np.inf).min(axis=1, keepdims=True)
    near = (fits & (step <= NEAR * best)).mean(axis=0)
    then, last = (_fastest_with(chance, mean_s, at_least) for at_least in (SURE, NEARLY_CERTAIN))
    # Where nothing fits no choice is better than another.
    some = fits.any(axis=1)
    step, fits, best = step[some], fits[some], best[some]
    lost = LOST_TRY * best
    again = np.where(fits[:, [then]], step[:, [then]], lost + step[:, [last]])
    paid = np.where(fits, step, lost + again)
    regret = (paid / best).mean(axis=0) - 1.0 if some.any() else np.zeros(len(predicted))
    return Chances(chance, near, regret)


def _fastest_with(chance: Floats, mean_s: Floats, at_least: float) -> int:
    """Of those that fit so surely, or as surely as any."""
    sure = chance >= min(at_least, float(chance.max()))
    return int(np.argmin(np.where(sure, mean_s, np.inf)))


def _drawn_s(
    rng: np.random.Generator,
    predicted: Predictions,
    entry: FittedStack,
    layouts: NDArray[np.int64] | None,
) -> Floats:
    """[draws, candidates] seconds."""
    parts = np.stack([predicted.times.parts[name] for name in PARTS])
    shared = np.ones((DRAWS, len(predicted)))
    if entry.spread:
        weight = spread.KNOWN if entry.rows_time else spread.UNKNOWN
        moves = weight * np.array(entry.spread)
        moved = np.exp(rng.standard_normal((DRAWS, len(moves))) @ moves)
        # A bubble may be counted below zero; a step may not.
        shared = np.maximum(moved @ parts / predicted.step_s, 0.05)
    noise = spread.noise_of(predicted.columns, entry.noise, entry.growth, entry.values)
    apart = noise if entry.rows_time else np.minimum(noise, APART)
    own = np.maximum(REPEATS, spread.NOISE * apart)
    count = len(predicted) if layouts is None else int(layouts.max()) + 1
    alone = rng.standard_normal((DRAWS, count))
    alone = alone if layouts is None else alone[:, layouts]
    return predicted.step_s * shared * np.exp(own * alone + _far(rng, predicted.columns, entry))


def _far(rng: np.random.Generator, c: Columns, entry: FittedStack) -> Floats:
    """[draws, candidates] errors (log) of what lies beyond either end of each axis."""
    error = np.zeros((DRAWS, len(c)))
    for name, away in spread.offsets(c, entry.values).items():
        below, above = rng.standard_normal((2, DRAWS, 1))
        side = np.where(away < 0, below, above)
        error += spread.PER_DOUBLING[name] / spread.TWO_SIDED_80 * np.abs(away) * side
    return error
