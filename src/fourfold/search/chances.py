"""Chances of each layout to be best under what is not known, and what each is expected to lose.

Layouts of one model on one machine share their coefficients, so what is open of those is drawn once
for all of them; what no coefficient explains is drawn for each layout (in the published tables the
spread of the ratio of two layouts is 0.8 to 1.2 times that of independent errors). Away from what
was measured layouts err together: those beyond the same end of an axis share one draw. Whether a
run fits hangs on what its engine keeps, so one draw decides for all: where a layout fits, those
with a larger chance do.

Who finds that a run does not fit has lost a try, and goes on with what is then expected to take the
fewest seconds, further tries counted. The best of a draw is the fastest of those that fit in it.
Draws are of seconds alone, each quantity at evenly spread chances (a Latin hypercube); over what
the engine keeps, a mean is a sum. 512 of them leave less than 0.1% open between two layouts; as
many independent ones left 0.4%.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.count.params import model_params
from fourfold.cost.fit import spread
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.memory.peak import SURE, fit_chance
from fourfold.cost.predict import Predictions
from fourfold.cost.step.estimate import PARTS
from fourfold.search.query import PlanQuery

DRAWS = 512
NEAR = 1.02  # within 2% of the best is as good
# Repeats of one run differ by about 1% (bloom, mpt and par4d tables).
REPEATS = 0.01
# Of losses closer than half of that, which nobody would see, the surer to fit is chosen: a run that
# fills its device has less room for what is not counted. Draws leave a fifth of it open at most.
ALIKE = REPEATS / 2
# Of layouts where nothing but kernels was measured: our engine's steps on a CPU lay 21% below to
# 14% above what its profile said (docs/accuracy.md). What a profile leaves open beyond is the same
# for all of them, and changes no order.
APART = 0.08
# A job that waits, runs out of memory and is changed takes an hour; of a short training, whose jobs
# are small, no more than this share. Nobody measured that.
TRY_S, MOST_LOST = 3600.0, 0.05
# The length of a training if nobody says: Hoffmann et al. (arXiv 2203.15556); today's are longer.
TOKENS_PER_PARAM = 20.0


@dataclass(frozen=True, slots=True)
class Chances:
    """Of each candidate: the chance that it fits; that it does and is within 2% of the fastest that
    does; and how much is lost against that one by trying it first (0.01: a percent)."""

    fits: Floats
    near_best: Floats
    regret: Floats

    def take(self, index: NDArray[np.intp]) -> Chances:
        return Chances(self.fits[index], self.near_best[index], self.regret[index])

    def order(self, layouts: NDArray[np.int64], *ties: Floats) -> NDArray[np.intp]:
        """The first choice, then one way to run each layout, then the others, each by what it
        loses. Chosen is what loses least, or of what loses about as little the surest to fit, up to
        90%. `layouts`: a number from 0 for each."""
        by_loss, surest = (*ties[::-1], self.regret), -np.minimum(self.fits, SURE)
        fewest = np.full(int(layouts.max(initial=-1)) + 1, np.inf)
        np.minimum.at(fewest, layouts, self.regret)
        more = self.regret > fewest[layouts] + ALIKE
        in_layout = np.lexsort((*by_loss, surest, more, layouts))
        other = np.ones(len(layouts), dtype=bool)
        other[in_layout[np.unique(layouts[in_layout], return_index=True)[1]]] = False
        far = self.regret > self.regret.min(initial=np.inf) + ALIKE
        first = np.lexsort((*by_loss, surest, far))[:1]
        order = np.lexsort((*by_loss, other))
        return np.concatenate([first, order[~np.isin(order, first)]])


def lost_try(query: PlanQuery, step_s: float) -> float:
    """What a try that runs out of memory costs, as a share of the training."""
    tokens = query.tokens
    if tokens is None:
        tokens = TOKENS_PER_PARAM * model_params(query.model, query.batch.seq_len)
    training_s = step_s * tokens / query.batch.tokens / (1.0 - query.lost)
    return min(MOST_LOST, TRY_S / training_s)


def chances(
    predicted: Predictions,
    entry: FittedStack,
    layouts: NDArray[np.int64] | None = None,
    *,
    lost: float,
) -> Chances:
    """`layouts`: a number for the layout of each candidate, where several are ways to run one;
    `lost`: what a try costs, as a share of the best. The same draws for the same question: no clock
    and no state enters."""
    if not len(predicted):
        return Chances(np.zeros(0), np.zeros(0), np.zeros(0))
    step = _drawn_s(np.random.default_rng(0), predicted, entry, layouts)
    chance = fit_chance(predicted.columns, entry)
    order = np.lexsort((step.mean(axis=0), -chance))
    near, regret = np.zeros((2, len(order)))
    if chance[order[0]] > 0.0:
        step = step[:, order]
        best = np.minimum.accumulate(step, axis=1)
        near[order] = _near_best(step, best, chance[order])
        regret[order] = _regret(step, best, chance[order], lost)
    return Chances(chance, near, regret)


# From here on candidates come surest first: what the engine keeps decides how many of them fit, and
# `best` is the fastest up to each.


def _near_best(step: Floats, best: Floats, chance: Floats) -> Floats:
    """Of the larger rooms, in which more layouts fit, the best is faster: near it up to a room."""
    ends, total = np.append(chance, 0.0), np.zeros(len(chance))
    for step_s, best_s in zip(step, best, strict=True):
        first_too_fast = np.searchsorted(-best_s, -step_s / NEAR, side="right")
        total += np.maximum(chance - ends[first_too_fast], 0.0)
    return total / len(step)


def _regret(step: Floats, best: Floats, chance: Floats, lost: float) -> Floats:
    """Where nothing fits no choice is better than another: of the rest."""
    mean_s, most = step.mean(axis=0), chance[0]
    # 1 / best over all rooms in which a candidate fits.
    upto = np.cumsum((-np.diff(np.append(chance, 0.0)) / best)[:, ::-1], axis=1)[:, ::-1]
    then = _next_tries(mean_s, chance, lost)
    failed = lost * (most - chance)
    after = np.zeros_like(step)  # the share of the best that is paid where a candidate does not fit

    def fill(some: NDArray[np.intp]) -> None:
        other = then[some]
        again = step[:, other] * (upto[:, other] - upto[:, some])
        after[:, some] = failed[some] + again + after[:, other]

    for one in np.unique(then):
        fill(np.array([one]))
    fill(np.arange(len(chance)))
    return ((step * upto + after) / most).mean(axis=0) - 1.0


def _next_tries(mean_s: Floats, chance: Floats, lost: float) -> NDArray[np.intp]:
    """What to try where each candidate does not fit: the least of the seconds that are then
    expected; after the surest, itself."""
    # No other is worth a try: one that is as sure is faster.
    tries = np.flatnonzero(mean_s < np.append(np.inf, np.minimum.accumulate(mean_s)[:-1]))
    lost_s = lost * mean_s.min()
    later_s = np.zeros(len(tries))  # expected where a try fails; times the chance, as all here

    def going_on(below: Floats, count: int) -> Floats:
        """[candidates, tries]"""
        some = tries[:count]
        more = chance[some] - below[:, None]
        paid_s = more * mean_s[some] + lost_s * (chance[0] - chance[some]) + later_s[:count]
        return np.where(more > 0.0, paid_s, np.inf)

    for k, one in enumerate(tries[1:], 1):
        later_s[k] = going_on(chance[one : one + 1], k).min()
    then = tries[np.argmin(going_on(chance, len(tries)), axis=1)]
    return np.where(chance < chance[0], then, 0)


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
        moved = np.exp(_normals(rng, len(moves)) @ moves)
        # A bubble may be counted below zero; a step may not.
        shared = np.maximum(moved @ parts / predicted.step_s, 0.05)
    noise = spread.noise_of(predicted.columns, entry.noise, entry.growth, entry.values)
    apart = noise if entry.rows_time else np.minimum(noise, APART)
    own = np.maximum(REPEATS, spread.NOISE * apart)
    count = len(predicted) if layouts is None else int(layouts.max()) + 1
    alone = _normals(rng, count)
    alone = alone if layouts is None else alone[:, layouts]
    return predicted.step_s * shared * np.exp(own * alone + _far(rng, predicted.columns, entry))


def _far(rng: np.random.Generator, c: Columns, entry: FittedStack) -> Floats:
    """[draws, candidates] errors (log) of what lies beyond either end of each axis."""
    error = np.zeros((DRAWS, len(c)))
    for name, away in spread.offsets(c, entry.values).items():
        below, above = _normals(rng, 2).T
        side = np.where(away < 0, below[:, None], above[:, None])
        error += spread.PER_DOUBLING[name] / spread.TWO_SIDED_80 * np.abs(away) * side
    return error


def _normals(rng: np.random.Generator, count: int) -> Floats:
    """[draws, count]: the normal distribution at evenly spread chances, of each quantity in an
    order of its own."""
    return rng.permuted(np.tile(_even_normals(DRAWS), (count, 1)), axis=1).T


@cache
def _even_normals(count: int) -> Floats:
    at = np.linspace(-4.0, 4.0, 4097)
    below = [0.5 * (1.0 + erf(z / sqrt(2.0))) for z in at.tolist()]
    return np.interp((np.arange(count) + 0.5) / count, below, at)
