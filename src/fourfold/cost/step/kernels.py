"""Seconds of matrix products and of the attention core of one layer and one micro batch."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import reduce
from typing import Any

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.ops.op import Op
from fourfold.result.profile import AttentionPoint
from fourfold.spec.words import CP_KINDS, PRICED_ATTENTION

# (rows, columns, relative speed) of the tiles libraries choose from; speeds as measured by NVIDIA
# ("Matrix Multiplication Background User's Guide") for large products, the smaller ones re-read
# their inputs more often.
TILES = (
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.93),
    (64.0, 128.0, 0.78),
    (64.0, 64.0, 0.6),
)
_FUSED, _UNFUSED, _FLASH1, _FLASH2 = (
    PRICED_ATTENTION.index(kind) for kind in ("fused-softmax", "unfused", "flash1", "flash2")
)
# FlashAttention 2 on Hopper, against kernels that use its asynchronous products and copies, where
# neither loses to the shape of its work; on an H200 at 8,192 tokens 0.52 forwards, 0.59 backwards.
OLDER_KERNEL = 0.51
# Tokens of a rank at which pieces cost half of what they cost more where they are short: of runs of
# 1M tokens the whole of it was 60% too much.
SHORT_PIECE = 8192.0
_RING, _ALLGATHER = CP_KINDS.index("ring"), CP_KINDS.index("allgather")


_MISALIGNMENT = np.log2(64.0 / np.gcd(np.arange(64), 64))


def misalignment(size: Floats) -> Floats:
    """log2 of how far a leading dimension misses 64 elements (128 bytes): 0 aligned, 6 odd."""
    return _MISALIGNMENT.take(np.maximum(size, 1.0).astype(np.int64) & 63)


def tile_waves(m: Floats, n: Floats, *, sms: Floats, wave: Floats | float) -> Floats:
    """Time of the best tiling in units of (SM-FLOP / K): min over tiles of waves x tile area.

    A wave of tiles takes as long as one tile; `wave` in 0..1 says how much of the last, partly
    filled wave is paid (schedulers and split-K hide some of it).
    """
    costs = []
    down, across = (
        {size: np.ceil(side / size) for size in {tile[i] for tile in TILES}}
        for i, side in enumerate((m, n))
    )
    for rows, cols, speed in TILES:
        filled = down[rows] * across[cols] / sms
        waves = np.maximum(0.5, (1.0 - wave) * filled + wave * np.ceil(filled))
        costs.append(waves * sms * (2.0 * rows * cols / speed))
    return reduce(np.minimum, costs)


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
    k = np.maximum(k, 1.0)  # of a product that only other runs have
    skew = misalignment(n) + misalignment(k)
    shape = (k / (k + 128.0)) * np.maximum(0.25, 1.0 - coef["align"] * skew)
    busy = tile_waves(m, n, sms=sms, wave=coef["wave"]) * k / (rate * shape)
    return np.maximum(busy, 2.0 * (m * k + n * k + m * n) / hbm)


# Rows per expert at which half of a grouped product's rate is lost: whole tiles of 128 rows, and
# experts that have more than others. On an H200 (torch 2.13, six shapes, 4 to 128 experts) 40 where
# all have as many and 200 where not; Transformer Engine on a B200 270, A100 140; gradients of
# weights, whose rows are summed over, about twice that.
HALF_ROWS, HALF_ROWS_WEIGHTS = 150.0, 300.0
# Of the memory's rate that weights are read with where rows are few; and its launch.
GROUPED_MEMORY, GROUPED_START_S = 0.6, 1e-5


def grouped_s(op: Op, *, rate: Floats | float, hbm: Floats, is_weights: bool) -> Floats:
    """Seconds of products that run as one kernel, one for each expert of a rank."""
    rows, half = (op.k, HALF_ROWS_WEIGHTS) if is_weights else (op.m, HALF_ROWS)
    lost = 1.0 if is_weights else 1.0 + 128.0 / np.maximum(op.k, 1.0)
    flops = 2.0 * op.groups * op.m * op.n * op.k
    busy = flops * (1.0 + half / np.maximum(rows, 1.0)) * lost / rate
    moved = 2.0 * op.groups * (op.m * op.k + op.n * op.k + op.m * op.n)
    return np.maximum(busy, moved / (GROUPED_MEMORY * hbm)) + GROUPED_START_S


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashShape:
    """What a flash kernel loses to the shape of its work. It takes 128 rows of one head at a time.
    Such a block costs so many keys beside its own (half a tile of the diagonal, loading, writing;
    backwards also gradients that blocks add up), and at the end of a kernel each multiprocessor
    waits for the last ones as long as `last_blocks` mean blocks take."""

    forward_keys: Any
    backward_keys: Any
    backward_rate: Any  # against the forward pass
    last_blocks: Any

    def filled(self, blocks: Any, sms: Any) -> Any:
        """The share of its rate that so few blocks leave."""
        return blocks / (blocks + self.last_blocks * sms)

    def share(self, point: AttentionPoint, sms: int) -> float:
        """Of a kernel's rate in both passes of a measured shape."""
        forward = 1.0 + self.forward_keys / point.seq_len
        backward = (1.0 + self.backward_keys / point.seq_len) / self.backward_rate
        blocks = point.batch * point.heads * point.seq_len / BLOCK_ROWS
        return 7.0 / (2.0 * forward + 5.0 * backward) * self.filled(blocks, sms)


BLOCK_ROWS = 128.0
# cuDNN's kernels on an H200 (results/h200/kernels.csv), from 512 to 16,384 tokens and from 256
# blocks to 4,096: median error 3%, at most 10% but for one shape.
NEWER_FLASH = FlashShape(
    forward_keys=400.0, backward_keys=900.0, backward_rate=0.88, last_blocks=1.2
)
# FlashAttention 2, which older GPUs run too: keys as measured on the H200. Its last blocks were not
# measured alone: half of one, as where any multiprocessor takes the next, explains tables of A100.
FLASH2 = FlashShape(forward_keys=300.0, backward_keys=660.0, backward_rate=0.92, last_blocks=0.5)


def attention_s(c: Columns, coef: Coefficients, *, micro: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of one layer on one rank, mean over layers with and without a window.

    Context parallelism leaves each rank s/c queries and s keys, however they travel. Kernels lose
    what their kind does to the shape of their work.
    """
    head = c.core_width / c.heads
    queries = micro * (c.seq / c.cp) * c.heads / c.tp
    pairs, blocks = queries * c.reach, queries / BLOCK_ROWS
    flash_f, flash_b = _flash(c, coef, pairs=pairs, head=head, blocks=blocks)
    square_f, square_b = _square(c, coef, pairs=pairs, head=head, micro=micro)
    is_flash = (c.attention != _FUSED) & (c.attention != _UNFUSED)
    # A ring computes in pieces. Gathered keys leave whole rows, cut unevenly by the mask; Ulysses
    # leaves whole sequences of fewer heads.
    slower = 1.0 + (coef["cp_attention"] - 1.0) * SHORT_PIECE / (SHORT_PIECE + c.seq / c.cp)
    pieces = np.where(c.cp_kind == _ALLGATHER, np.sqrt(slower), 1.0)
    pieces = np.where(c.cp_kind == _RING, slower, pieces)
    uneven = np.where(c.cp > 1, pieces, 1.0)
    forward = np.where(is_flash, flash_f, square_f) * uneven
    backward = np.where(is_flash, flash_b, square_b) * uneven
    return forward, backward


def _flash_shape(c: Columns) -> FlashShape:
    """As the device has it; of FlashAttention 2 where that leaves a newer device's behind."""
    last = np.where(c.older_flash > 0, FLASH2.last_blocks, NEWER_FLASH.last_blocks)
    own = FlashShape(
        forward_keys=c.forward_keys,
        backward_keys=c.backward_keys,
        backward_rate=c.backward_rate,
        last_blocks=last,
    )
    is_older = ((c.attention == _FLASH1) | (c.attention == _FLASH2)) & (c.older_flash == 0)
    if not is_older.any():
        return own
    fields = (field.name for field in fields_of(FlashShape))
    return FlashShape(
        **{n: np.where(is_older, getattr(FLASH2, n), getattr(own, n)) for n in fields}
    )


def _flash(
    c: Columns,
    coef: Coefficients,
    *,
    pairs: Floats,
    head: Floats,
    blocks: Floats,
) -> tuple[Floats, Floats]:
    """FlashAttention-2 (Dao, arXiv 2307.08691): 4 and 10 FLOP per score and head element, halved by
    the causal mask. Head sizes are padded to 32; small heads, short rows and few blocks of rows are
    slower: multiprocessors that have no block left wait for the last ones."""
    shape, padded = _flash_shape(c), 32.0 * np.ceil(head / 32.0)
    is_small, over = padded < 128.0, np.maximum(1.0, padded / 128.0)
    small = np.where(is_small, 1.25 * padded / (padded + 32.0), 1.0) ** c.small_head
    rows = np.where(c.cp_kind == _RING, c.seq / c.cp, c.seq)
    is_older = (c.attention == _FLASH1) | (c.attention == _FLASH2)
    kernel = np.where(is_older & (c.older_flash == 0), OLDER_KERNEL, 1.0)
    kernel = np.where(c.attention == _FLASH1, kernel * coef["flash1"], kernel)
    # Steps of a ring run two at a time: one begins where the other ends.
    is_ring = (c.cp_kind == _RING) & (c.cp > 1)
    filled = np.where(is_ring, 1.0, shape.filled(blocks, c.sms))
    rate = c.peak * c.clock * c.attention_share * coef["attention"] * kernel * small * filled
    forward = 2.0 * pairs * padded * (1.0 + shape.forward_keys / rows) / rate
    backward = 5.0 * pairs * padded * (1.0 + shape.backward_keys / rows) / rate
    backward = backward / (shape.backward_rate * over**c.large_head_backward)
    return forward / over**c.large_head, backward


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
    rate = c.peak * c.clock * c.product_share * coef["product"] * shape
    product = 4.0 * pairs * head * slow128 / rate
    per_rank = np.floor(c.heads / c.tp) * micro
    fused = (c.attention == _FUSED) & (np.mod(per_rank, 4.0) == 0.0)
    scores = 2.0 * pairs * coef["softmax"] / c.hbm * np.where(fused, 1.0, 2.5)
    return product + 6.0 * scores, 2.0 * product + 9.0 * scores
