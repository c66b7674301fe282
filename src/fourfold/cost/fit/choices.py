"""Which choices does a run make, and how many measured runs made them? Evidence, by name.

A choice is something a planner can take or leave (virtual stages, ZeRO-3, Ulysses), not a size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns
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
    for kind in ("fp8", "fp4", "fp32", "fp64"):
        found[f"precision {kind}"] = c.precision == DTYPES.index(kind)
    return found


def counts(c: Columns) -> dict[str, int]:
    """How many of these runs make each choice."""
    return {name: int(mask.sum()) for name, mask in choices(c).items()}
