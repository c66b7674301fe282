"""How sure a prediction is, and which choices of a run were measured: evidence by name.

A choice is something a planner can take or leave (virtual stages, ZeRO-3, Ulysses), not a size. The
interval of 80% comes from cross-validated residuals. Outside the calibrated range it grows with the
distance in doublings, feature by feature: a fit that never saw 512 GPUs knows less about 2048 than
about 1024.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.step.traffic import crosses
from fourfold.spec.words import CP_KINDS, DTYPES, SCHEDULES

Bools = NDArray[np.bool_]


def choices(c: Columns) -> dict[str, Bools]:
    """For each choice which runs make it."""
    shared = c.dp * c.cp > 1
    kept = (c.full_ckpt == 0) & (c.attn_ckpt == 0)
    found = {
        "tensor parallel": c.tp > 1,
        "tensor parallel across nodes": crosses(c, c.tp, np.ones_like(c.tp)),
        "sequence parallel": (c.tp > 1) & (c.sp > 0),
        "tensor parallel without sequence parallel": (c.tp > 1) & (c.sp == 0),
        "pipeline": c.pp > 1,
        "virtual stages": (c.pp > 1) & (c.vpp > 1),
        "data parallel": c.dp > 1,
        "hybrid sharding": (c.zero > 0) & (c.shard < c.dp * c.cp),
        "recompute none": kept,
        "recompute selective": c.attn_ckpt > 0,
        "recompute full": c.full_ckpt == 1,
        "recompute of some layers": (c.full_ckpt > 0) & (c.full_ckpt < 1),
        "more than one sequence a micro batch": c.micro > 1,
    }
    for stage in range(4):
        found[f"zero{stage}"] = shared & (c.zero == stage)
    for code, kind in enumerate(CP_KINDS):
        found[f"context parallel ({kind})"] = (c.cp > 1) & (c.cp_kind == code)
    for kind in ("gpipe", "zero-bubble"):
        found[f"schedule {kind}"] = (c.pp > 1) & (c.schedule == SCHEDULES.index(kind))
    for kind in sorted({*DTYPES} - {"bf16", "fp16"}):
        found[f"precision {kind}"] = c.precision == DTYPES.index(kind)
    return found


def counts(c: Columns) -> dict[str, int]:
    """How many of these runs make each choice."""
    return {name: int(mask.sum()) for name, mask in choices(c).items()}


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
