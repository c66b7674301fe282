"""The smallest misfit: Levenberg-Marquardt on logarithms with Gaussian priors; residuals
weighted as Student's t (a run that was disturbed teaches little)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats

# (k, n_params) log coefficients -> (k, n_rows) residuals
Residuals = Callable[[Floats], Floats]

STEP = 1e-4
FREEDOM = 4.0  # degrees of freedom of the t weights


@dataclass(frozen=True, slots=True)
class Prior:
    """Gaussian prior on log coefficients, with hard bounds."""

    mean: Floats
    spread: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, slots=True)
class Minimum:
    """Where it ended: log coefficients, their covariance (Laplace), weights of the rows."""

    x: Floats
    covariance: Floats
    weights: Floats


def _weights(r: Floats, scale: float) -> Floats:
    return (FREEDOM + 1.0) / (FREEDOM + (r / scale) ** 2) / (1.0 + 1.0 / FREEDOM)


def _cost(r: Floats, x: Floats, prior: Prior, scale: float) -> float:
    fit = 0.5 * FREEDOM * np.sum(np.log1p((r / scale) ** 2 / FREEDOM))
    return float(fit + 0.5 * np.sum(((x - prior.mean) / prior.spread) ** 2))


def minimise(
    residuals: Residuals, prior: Prior, *, scale: float, rounds: int = 60, row_weight: float = 1.0
) -> Minimum:
    """Most probable log coefficients. `scale` is the size of an ordinary residual."""
    x = np.clip(prior.mean, prior.low, prior.high)
    damp = 1e-2
    moves = np.vstack([np.zeros_like(x), np.eye(x.size) * STEP])
    precision = np.diag(prior.spread**-2.0)
    rows = residuals(x + moves)
    cost = _cost(rows[0], x, prior, scale)
    hessian = precision
    weights = _weights(rows[0], scale)
    for _ in range(rounds):
        r, slope = rows[0], ((rows[1:] - rows[0]) / STEP).T
        weights = _weights(r, scale)
        hessian = row_weight * (slope.T * weights) @ slope / scale**2 + precision
        pull = row_weight * (slope.T * weights) @ r / scale**2
        pull = pull + (x - prior.mean) / prior.spread**2
        x_new, rows_new, cost_new, damp = _damped(
            residuals, prior, x=x, hessian=hessian, pull=pull, damp=damp, cost=cost, scale=scale
        )
        if cost_new >= cost - 1e-6 * max(1.0, cost):
            break
        x, rows, cost = x_new, rows_new, cost_new
    return Minimum(x, np.linalg.inv(hessian), weights)


def _damped(residuals, prior, *, x, hessian, pull, damp, cost, scale):  # type: ignore[no-untyped-def]
    """Shorten the step until the cost falls; returns the last trial when it never does."""
    moves = np.vstack([np.zeros_like(x), np.eye(x.size) * STEP])
    diag = np.diag(np.diag(hessian))
    for _ in range(8):
        trial = np.clip(x - np.linalg.solve(hessian + damp * diag, pull), prior.low, prior.high)
        rows = residuals(trial + moves)
        trial_cost = _cost(rows[0], trial, prior, scale)
        if trial_cost < cost:
            return trial, rows, trial_cost, damp * 0.3
        damp *= 5.0
    return x, residuals(x + moves), cost, damp
