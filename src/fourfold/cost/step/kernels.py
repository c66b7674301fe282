"""How long do a layer's kernels take? Matrix products, the attention core, what only moves memory.

Seconds of one micro batch. Tile and wave quantisation, alignment of shards to 128 bytes: NVIDIA,
"Matrix Multiplication Background User's Guide", and the BigScience head-count tables. Flash: Dao,
FlashAttention-2 (arXiv 2307.08691): 4 and 10 FLOP per score and head element, halved by the causal
mask; fused and unfused softmax (Megatron) compute the full square and move every score through
memory. Passes over memory: Korthikanti et al. (arXiv 2205.05198), table 2. Broadcasts.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step.own_engine import EXACT, cast_bytes, layer_bytes
from fourfold.spec.words import CP_KINDS, DTYPES, PRICED_ATTENTION

# (rows, columns, relative speed) of the tiles libraries choose from; speeds as measured by NVIDIA
# for large products, the smaller ones re-read their inputs more often.
TILES = (
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.93),
    (64.0, 128.0, 0.78),
    (64.0, 64.0, 0.6),
)


def misalignment(size: Floats) -> Floats:
    """log2 of how far a leading dimension misses 64 elements (128 bytes): 0 aligned, 6 odd."""
    whole = np.maximum(size, 1.0).astype(np.int64)
    return np.log2(64.0 / np.gcd(whole, 64))


def tile_waves(m: Floats, n: Floats, *, sms: Floats, wave: Floats | float) -> Floats:
    """Time of the best tiling in units of (SM-FLOP / K): min over tiles of waves x tile area.

    A wave of tiles takes as long as one tile; `wave` in 0..1 says how much of the last, partly
    filled wave is paid (schedulers and split-K hide some of it).
    """
    best: Floats | None = None
    for rows, cols, speed in TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / cols)
        filled = tiles / sms
        waves = np.maximum(0.5, (1.0 - wave) * filled + wave * np.ceil(filled))
        cost = waves * sms * (2.0 * rows * cols / speed)
        best = cost if best is None else np.minimum(best, cost)
    assert best is not None
    return best


def gemm_s(
    m: Floats,
    n: Floats,
    k: Floats,
    *,
    rate: Floats | float,
    hbm: Floats,
    sms: Floats,
    coef: Coefficients,
) -> Floats:
    """Seconds of one product at `rate` FLOP/s for a perfect shape; never faster than memory."""
    skew = misalignment(n) + misalignment(k)
    shape = (k / (k + 128.0)) * np.maximum(0.25, 1.0 - coef["align"] * skew)
    busy = tile_waves(m, n, sms=sms, wave=coef["wave"]) * k / (rate * shape)
    return np.maximum(busy, 2.0 * (m * k + n * k + m * n) / hbm)


_FUSED = PRICED_ATTENTION.index("fused-softmax")
_UNFUSED = PRICED_ATTENTION.index("unfused")
_FLASH1 = PRICED_ATTENTION.index("flash1")
_RING = CP_KINDS.index("ring")
_ALLGATHER = CP_KINDS.index("allgather")
_FLASH3 = PRICED_ATTENTION.index("flash3")


def attention_s(c: Columns, coef: Coefficients, *, micro: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of one layer on one rank, mean over layers with and without a window.

    Context parallelism leaves each rank s/c queries and s keys, however they travel.
    """
    head = c.width / c.heads
    pairs = micro * (c.seq / c.cp) * c.reach * c.heads / c.tp
    flash_f, flash_b = _flash(c, coef, pairs=pairs, head=head)
    square_f, square_b = _square(c, coef, pairs=pairs, head=head, micro=micro)
    is_flash = (c.attention != _FUSED) & (c.attention != _UNFUSED)
    # A ring computes in pieces. Gathered keys leave whole rows, cut unevenly by the mask; Ulysses
    # leaves whole sequences of fewer heads.
    pieces = np.where(c.cp_kind == _ALLGATHER, np.sqrt(coef["cp_attention"]), 1.0)
    pieces = np.where(c.cp_kind == _RING, coef["cp_attention"], pieces)
    uneven = np.where(c.cp > 1, pieces, 1.0)
    forward = np.where(is_flash, flash_f, square_f) * uneven
    backward = np.where(is_flash, flash_b, square_b) * uneven
    return forward, backward


def _flash(c: Columns, coef: Coefficients, *, pairs: Floats, head: Floats) -> tuple[Floats, Floats]:
    """Head sizes are padded to 32; small heads and short rows keep the tensor cores less busy."""
    padded = 32.0 * np.ceil(head / 32.0)
    small = np.where(padded < 128.0, 1.25 * padded / (padded + 32.0), 1.0) ** coef["small_head"]
    rows = np.where(c.cp_kind == _RING, c.seq / c.cp, c.seq)
    kernel = np.where(c.attention == _FLASH1, coef["flash1"], 1.0)
    kernel = np.where(c.attention == _FLASH3, 1.6, kernel)
    rate = c.peak * c.clock * coef["flash"] * kernel * small * rows / (rows + 512.0)
    forward = 2.0 * pairs * padded / rate
    return forward, 5.0 * pairs * padded / (0.85 * rate)


def _square(
    c: Columns, coef: Coefficients, *, pairs: Floats, head: Floats, micro: Floats
) -> tuple[Floats, Floats]:
    """Two batched products over the full square and passes over the scores (6 and 9 of 2 bytes).

    Megatron's fused softmax wants (heads/tp) x micro divisible by 4; without it, it falls back to
    separate kernels (BigScience notes). Batched products of 2022 ran head size 128 slowly: the
    only two measured tables with it (96 heads of 12288, 112 of 14336) agree within 2%.
    """
    shape = head / (head + 64.0) * np.maximum(0.25, 1.0 - coef["align"] * misalignment(head))
    slow128 = np.where(head == 128.0, coef["head128"], 1.0)
    product = 4.0 * pairs * head * slow128 / (c.peak * c.clock * coef["gemm"] * shape)
    per_rank = np.floor(c.heads / c.tp) * micro
    fused = (c.attention == _FUSED) & (np.mod(per_rank, 4.0) == 0.0)
    scores = 2.0 * pairs * coef["softmax"] / c.hbm * np.where(fused, 1.0, 2.5)
    return product + 6.0 * scores, 2.0 * product + 9.0 * scores


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
