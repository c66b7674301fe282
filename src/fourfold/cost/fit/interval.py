"""How sure is a prediction? An 80% interval from cross-validated residuals, wider outside.

Outside the calibrated range the interval grows with the distance in doublings, feature by feature:
a fit that never saw 512 GPUs knows less about 2048 than about 1024.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.step.gemm import Floats

PER_DOUBLING = 0.04  # half width (log) added in quadrature per doubling outside the range


def features(c: Columns) -> dict[str, Floats]:
    """What a range is kept of, as log2."""
    micros = np.maximum(1.0, c.batch / (c.dp * c.micro))
    values = {
        "hidden": c.hidden,
        "seq": c.seq,
        "gpus": c.gpus,
        "tp": c.tp,
        "cp": c.cp,
        "pp": c.pp,
        "tokens": c.micro * c.seq / c.cp,
        "micros": micros,
        "vpp": c.vpp,
        "low_precision": c.peak_low / c.peak,
    }
    return {name: np.log2(value) for name, value in values.items()}


def ranges(c: Columns) -> dict[str, tuple[float, float]]:
    """(low, high) of each feature over these rows."""
    return {
        name: (float(np.min(value)), float(np.max(value))) for name, value in features(c).items()
    }


def outside(c: Columns, known: dict[str, tuple[float, float]]) -> Floats:
    """Doublings outside the calibrated ranges, summed over features."""
    total = np.zeros(len(c))
    for name, value in features(c).items():
        low, high = known.get(name, (-np.inf, np.inf))
        total = total + np.maximum(0.0, low - value) + np.maximum(0.0, value - high)
    return total


def bounds(c: Columns, entry: FittedStack, step_s: Floats) -> tuple[Floats, Floats]:
    """(low, high) seconds that hold 80% of measured runs."""
    extra = PER_DOUBLING * outside(c, entry.ranges)
    low = -np.sqrt(min(entry.low, -0.005) ** 2 + extra**2)
    high = np.sqrt(max(entry.high, 0.005) ** 2 + extra**2)
    return step_s * np.exp(low), step_s * np.exp(high)
