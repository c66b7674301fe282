"""How long does the attention core of one layer take? Seconds per micro batch, forward, backward.

Flash: Dao, FlashAttention-2 (arXiv 2307.08691): 4 and 10 FLOP per score and head element, halved
by the causal mask. Fused and unfused softmax (Megatron) compute the full square and move every
score through memory. Broadcasts.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.step.gemm import Coefficients, Floats, misalignment
from fourfold.spec.words import CP_KINDS, PRICED_ATTENTION

_FLASH = PRICED_ATTENTION.index("flash")
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
