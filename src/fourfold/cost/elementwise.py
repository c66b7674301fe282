"""How long do norms, activations, residuals and casts take? They move memory, little else.

Seconds of one layer and one micro batch, forward and backward. Counting of passes: Korthikanti et
al., "Reducing Activation Recomputation" (arXiv 2205.05198), table 2, read as bytes moved.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.gemm import Floats, Knobs


def elementwise_s(c: Columns, knobs: Knobs, *, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward): norms, residual adds and dropout on hidden; rope or bias and the
    activation on what the tensor-parallel GEMMs make. Without sequence parallelism every TP rank
    repeats the first kind."""
    norms = np.where(c.fused_norm > 0, 1.0, knobs["norm"])
    split = np.where(c.sp > 0, c.tp, 1.0)
    on_hidden = (4.0 * norms + 6.0 + 2.0 * (1.0 - c.gated)) * c.hidden / split
    qkv = c.hidden + 2.0 * c.hidden * c.kv_heads / c.heads
    on_shards = (2.0 * qkv + (2.0 + c.gated) * c.ffn) / c.tp
    forward = 2.0 * tokens * (on_hidden + on_shards) * knobs["elem"] / c.hbm
    return forward, 2.0 * forward
