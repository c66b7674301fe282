"""How many FLOPs does a token of each run take, by the convention its table prints? Arrays.

The same formulas as `flops`, over columns instead of one model; a test holds them together.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.count.flops import DEFAULT
from fourfold.cost.step.gemm import Floats

ALIASES = {"all-params-full-attention": "mpt", "": DEFAULT}


def flops_per_token(c: Columns, rule: str, *, learned_positions: Floats) -> Floats | None:
    """FLOPs per token as printed under `rule`; None for a rule nobody knows."""
    rule = ALIASES.get(rule, rule)
    attention = 12.0 * c.layers * c.width * c.reach
    linear = 6.0 * (c.layers * _layer(c) + c.vocab * c.hidden)
    square = c.layers * c.hidden**2
    shape = 1.0 + c.seq / (6.0 * c.hidden) + c.vocab / (16.0 * c.layers * c.hidden)
    old = 12.0 * square + c.layers * (7.0 + 6.0 * c.tp) * c.hidden + 4.0 * c.tp * c.pp * c.hidden
    every = 6.0 * all_params(c, learned_positions=learned_positions)
    known = {
        "mpt": every + attention,
        "6n": every,
        "full-attention": linear + attention,
        "causal": linear + attention / 2.0,
        "megatron-recompute": 96.0 * square * shape,
        "megatron-norecompute": 72.0 * square * shape,
        "megatron-old": 8.0 * old,
    }
    return known.get(rule)


def _layer(c: Columns) -> Floats:
    kv = 2.0 * c.hidden * c.kv_width
    return 2.0 * c.hidden * c.width + kv + (2.0 + c.gated) * c.hidden * c.ffn


def all_params(c: Columns, *, learned_positions: Floats) -> Floats:
    """All parameters: matrices, norms, biases, embeddings. Ungated families have LayerNorm and
    biases (13 L d in all), gated ones RMSNorm and none."""
    small = np.where(
        c.gated > 0, 2.0 * c.hidden, 4.0 * c.hidden + 4.0 * c.hidden + c.ffn + c.hidden
    )
    ends = c.vocab * c.hidden * np.where(c.tied > 0, 1.0, 2.0)
    final = np.where(c.gated > 0, 1.0, 2.0) * c.hidden
    return c.layers * (_layer(c) + small) + ends + final + learned_positions * c.seq * c.hidden
