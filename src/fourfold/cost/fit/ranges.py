"""What was measured of each axis, and how far runs lie from it, in doublings."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fourfold.cost.columns import Columns, Floats

Ranges = dict[str, tuple[float, float]]  # least and largest measured value of each axis, log2
FURTHEST = 4.0  # doublings: further is as unknown


def axes(c: Columns) -> dict[str, Floats]:
    """What distances are taken in, as log2."""
    values = {
        "hidden": c.hidden,
        "seq": c.seq,
        "gpus": c.gpus,
        "tp": c.tp,
        "cp": c.cp,
        "pp": c.pp,
        "vpp": c.vpp,
        "tokens": c.micro * c.seq / c.cp,
        "micros": np.maximum(1.0, c.batch / (c.dp * c.micro)),
        "low_precision": c.peak_low / c.peak,
    }
    return {name: np.log2(value) for name, value in values.items()}


def ranges(c: Columns) -> Ranges:
    return {
        name: (float(value.min().round(3)), float(value.max().round(3)))
        for name, value in axes(c).items()
    }


def joined_ranges(many: Iterable[Ranges]) -> Ranges:
    """Of several keys together."""
    found: Ranges = {}
    for one in many:
        for name, (low, high) in one.items():
            least, most = found.get(name, (low, high))
            found[name] = (min(least, low), max(most, high))
    return found


def offsets(c: Columns, known: Ranges) -> dict[str, Floats]:
    """Doublings from each run to the measured range of each axis, below zero where it lies below; 0
    inside, and where no range is kept."""
    found = {}
    for name, value in axes(c).items():
        if name in known:
            low, high = known[name]
            away = np.minimum(value - low, 0.0) + np.maximum(value - high, 0.0)
            # Files keep three digits.
            found[name] = np.where(np.abs(away) < 1e-3, 0.0, np.clip(away, -FURTHEST, FURTHEST))
    return found
