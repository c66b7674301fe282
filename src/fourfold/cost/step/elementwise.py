"""How long do norms, activations, residuals and casts take? They move memory, little else.

Seconds of one layer and one micro batch, forward and backward. Counting of passes: Korthikanti et
al., "Reducing Activation Recomputation" (arXiv 2205.05198), table 2, read as bytes moved.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.step.gemm import Coefficients, Floats
from fourfold.cost.step.own_engine import EXACT, cast_bytes, layer_bytes
from fourfold.spec.words import DTYPES

# Plain framework calls read and write what a fused kernel keeps in registers (SwiGLU: 3 kernels of
# 2 to 3 passes against one of 3).
EAGER = 1.5


def elementwise_s(c: Columns, coef: Coefficients, *, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward): norms, residual adds and dropout on hidden; rope or bias and the
    activation on what the tensor-parallel GEMMs make. Without sequence parallelism every TP rank
    repeats the first kind."""
    norms = np.where(c.fused_norm > 0, 1.0, coef["norm"])
    split = np.where(c.sp > 0, c.tp, 1.0)
    on_hidden = (4.0 * norms + 6.0 + 2.0 * (1.0 - c.gated)) * c.hidden / split
    on_shards = (2.0 * c.qkv_width + (2.0 + c.gated) * c.ffn) / c.tp
    passes = coef["elem"] * np.where(c.eager > 0, EAGER, 1.0)
    forward = 2.0 * tokens * (on_hidden + on_shards) * passes / c.hbm
    casts = cast_s(c, tokens=tokens)
    own = [
        EXACT * coef["elem"] * (least + cast) / c.hbm
        for least, cast in zip(layer_bytes(c, tokens), cast_bytes(c, tokens), strict=True)
    ]
    ours = c.own_kernels > 0
    return (
        np.where(ours, own[0], forward + casts),
        np.where(ours, own[1], 2.0 * (forward + casts)),
    )


def cast_s(c: Columns, *, tokens: Floats) -> Floats:
    """Forward seconds of turning GEMM inputs into fp8 or fp4: read 2 bytes, write value and
    transpose; scales per block need a second look at the data."""
    low = (c.precision == DTYPES.index("fp8")) | (c.precision == DTYPES.index("fp4"))
    split = np.where(c.sp > 0, c.tp, 1.0)
    values = tokens * (2.0 * c.hidden / split + (c.width + c.ffn) / c.tp)
    return np.where(low, values * (4.0 + 2.0 * c.block_scale) / c.hbm, 0.0)
