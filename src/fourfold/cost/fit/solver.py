"""The smallest misfit of many groups of rows at once: Levenberg-Marquardt on logarithms with
Gaussian priors; residuals weighted as Student's t (a run that was disturbed teaches little).

Groups share nothing but the questions to the model: one question answers all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats

Places = NDArray[np.intp]
# Logs of coefficients [moves, rows, coefficients], and which rows -> residuals [moves, rows].
Residuals = Callable[[Floats, Places], Floats]

STEP = 1e-4
FREEDOM = 4.0  # degrees of freedom of the t weights
ENOUGH = 1e-3  # of the logarithm of a posterior: less is no better
_ROUNDS, _MOST_DAMPED = 40, 1e4


@dataclass(frozen=True, slots=True)
class Prior:
    """Gaussian priors on log coefficients [groups, coefficients], with hard bounds; what is not
    `free` stays where it is."""

    mean: Floats
    spread: Floats
    low: Floats
    high: Floats
    free: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Minimum:
    """Log coefficients [groups, coefficients], and the second derivatives of the posterior."""

    x: Floats
    hessian: Floats


class _Search:
    """Where all groups are: their coefficients, residuals and slopes of their rows, and cost."""

    def __init__(
        self, residuals: Residuals, groups: Places, prior: Prior, scale: float, begin: Floats
    ) -> None:
        self.residuals, self.groups, self.prior, self.scale = residuals, groups, prior, scale
        self.x = begin.copy()
        self.moves = np.vstack([np.zeros(begin.shape[1]), np.eye(begin.shape[1]) * STEP])
        self.left, self.slopes = self._asked(begin, np.arange(len(groups)))
        self.cost = self._cost(self.x, self.left)

    def _asked(self, x: Floats, index: Places) -> tuple[Floats, Floats]:
        """(residuals, slopes [rows, coefficients]) of some rows at x."""
        found = self.residuals(x[self.groups[index]][None] + self.moves[:, None], index)
        return found[0], ((found[1:] - found[0]) / STEP).T

    def _cost(self, x: Floats, left: Floats) -> Floats:
        misfit = 0.5 * FREEDOM * np.log1p((left / self.scale) ** 2 / FREEDOM)
        away = np.where(self.prior.free, (x - self.prior.mean) / self.prior.spread, 0.0)
        return np.bincount(self.groups, misfit, minlength=len(x)) + 0.5 * (away**2).sum(axis=1)

    def newton(self) -> tuple[Floats, Floats]:
        """(second, first derivatives) of each group; what is not free is nailed down."""
        weights = 1.0 / (1.0 + (self.left / self.scale) ** 2 / FREEDOM) / self.scale**2
        scaled, size = self.slopes * weights[:, None], self.x.shape[1]
        hessian, pull = np.zeros((len(self.x), size, size)), np.zeros(self.x.shape)
        ends = np.searchsorted(self.groups, np.arange(len(self.x) + 1))
        for group, (first, last) in enumerate(pairwise(ends)):
            hessian[group] = scaled[first:last].T @ self.slopes[first:last]
            pull[group] = scaled[first:last].T @ self.left[first:last]
        free, precision = self.prior.free, self.prior.spread**-2.0
        hessian = np.where(free[:, :, None] & free[:, None, :], hessian, 0.0)
        hessian = hessian + precision[:, :, None] * np.eye(size)
        return hessian, np.where(free, pull + (self.x - self.prior.mean) * precision, 0.0)

    def tried(self, x: Floats, going: NDArray[np.bool_]) -> Floats:
        """What each group gains at x; those that gain go there."""
        index = np.flatnonzero(going[self.groups])
        left, slopes = self.left.copy(), self.slopes.copy()
        left[index], slopes[index] = self._asked(x, index)
        cost = self._cost(x, left)
        gain = np.where(going, self.cost - cost, 0.0)
        better = gain > 0.0
        rows = better[self.groups]
        self.x[better], self.cost[better] = x[better], cost[better]
        self.left[rows], self.slopes[rows] = left[rows], slopes[rows]
        return gain


def minimise(
    residuals: Residuals, groups: Places, prior: Prior, *, scale: float, begin: Floats
) -> Minimum:
    """Most probable log coefficients of every group. `groups`: of each row, from 0 on and sorted;
    `scale`: the size of an ordinary residual."""
    at = _Search(residuals, groups, prior, scale, begin)
    damp, going = np.full(len(begin), 1e-2), np.ones(len(begin), dtype=bool)
    for _ in range(_ROUNDS):
        hessian, pull = at.newton()
        steep = np.einsum("kii->ki", hessian)[:, :, None] * np.eye(begin.shape[1])
        move = np.linalg.solve(hessian + damp[:, None, None] * steep, pull[:, :, None])[:, :, 0]
        gain = at.tried(np.clip(at.x - move, prior.low, prior.high), going)
        damp = np.where(gain > 0.0, damp * 0.3, damp * 5.0)
        going &= np.where(gain > 0.0, gain > ENOUGH, damp < _MOST_DAMPED)
        if not going.any():
            break
    return Minimum(at.x, at.newton()[0])
