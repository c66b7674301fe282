"""Runs that would teach most: names K configurations; sees layouts, never results.

Greedy Bayesian design: each pick is the run whose measurement would shrink the mean predictive
variance of all candidates most, with priors as the starting uncertainty (V-optimal;
Chaloner and Verdinelli, "Bayesian Experimental Design", 1995).
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.coefficients import BY_NAME, TIME
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.step.estimate import estimate

NOISE = 0.05  # log error of one measured run under a good model
STEP = 1e-3


def sensitivities(c: Columns, entry: FittedStack) -> Floats:
    """[rows, coefficients] d log(step) / d log(coefficient) in units of its prior's spread."""
    base = np.log(estimate(c, entry.coefficients).step_s)
    found = []
    for name in TIME:
        moved = {**entry.coefficients, name: entry.coefficients[name] * np.exp(STEP)}
        slope = (np.log(estimate(c, moved).step_s) - base) / STEP
        found.append(slope * BY_NAME[name].spread)
    return np.stack(found, axis=1)


def suggest(c: Columns, entry: FittedStack, count: int) -> list[int]:
    """Places of the `count` most telling runs among the candidates, best first."""
    slopes = sensitivities(c, entry)
    fits = memory(c, entry.coefficients).worst_bytes < 0.97 * limit_bytes(c, entry.coefficients)
    allowed = fits if int(fits.sum()) >= count else np.ones(len(c), dtype=bool)
    covariance = np.eye(slopes.shape[1])
    chosen: list[int] = []
    for _ in range(min(count, len(c))):
        spread = slopes @ covariance  # rows x coefficients
        own = np.einsum("ij,ij->i", spread, slopes) + NOISE**2
        # fall of the summed variance of all candidates if row i were measured
        gain = np.einsum("ij,ij->i", spread @ (slopes.T @ slopes), spread) / own
        gain = np.where(allowed, gain, -1.0)
        gain[chosen] = -2.0
        best = int(np.argmax(gain))
        chosen.append(best)
        covariance = covariance - np.outer(spread[best], spread[best]) / own[best]
    return chosen
