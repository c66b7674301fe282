"""How sure a prediction is, and which choices of a run were measured: evidence by name.

A choice is something a planner can take or leave (virtual stages, ZeRO-3, Ulysses), not a size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.spread import distances, half_widths, noise_of
from fourfold.cost.step.estimate import Times
from fourfold.cost.step.traffic import crosses
from fourfold.spec.words import CP_KINDS, DTYPES, SCHEDULES

Bools = NDArray[np.bool_]


def choices(c: Columns) -> dict[str, Bools]:
    """For each choice which runs make it."""
    shared = c.dp * c.cp > 1
    kept = (c.full_ckpt == 0) & (c.attn_ckpt == 0) & (c.norm_ckpt == 0)
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
        "recompute of norms and activations": (c.norm_ckpt > 0) & (c.mlp_ckpt == 0),
        "recompute of norms and MLPs": c.mlp_ckpt > 0,
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


WIDE = 0.12  # half of an interval (log) that asks for a reason
_CALLED = {"hidden": "the width", "seq": "the sequence", "gpus": "the number of GPUs",
           "tokens": "the number of tokens in a micro batch",
           "micros": "the number of micro batches", "vpp": "the number of virtual stages",
           "low_precision": "the format of products"}  # fmt: skip


def why_wide(c: Columns, entry: FittedStack, times: Times) -> str:
    """What makes the interval of the one run in `c` wide; '' where it is not."""
    low, high = bounds(c, entry, times)
    if np.log(high[0] / low[0]) < 2.0 * WIDE:
        return ""
    reasons = [] if entry.rows_time else ["nothing of this stack was measured on this machine"]
    far = {name: float(away[0]) for name, away in distances(c, entry.values).items()}
    worst = sorted((name for name in far if far[name] >= 1.0), key=lambda name: -far[name])
    reasons += [
        f"{_CALLED.get(name, name)} is {far[name]:.1f} doublings from anything measured"
        for name in worst[:2]
    ]
    return "; ".join(reasons) or "the measured runs leave its coefficients open"


def bounds(c: Columns, entry: FittedStack, times: Times) -> tuple[Floats, Floats]:
    """(low, high) seconds that hold 80% of measured runs."""
    below, above = half_widths(
        c,
        times,
        spread=entry.spread,
        noise=noise_of(c, entry.noise, entry.growth, entry.values),
        values=entry.values,
        is_known=entry.rows_time > 0,
    )
    return times.step_s * np.exp(-below), times.step_s * np.exp(above)
