"""How many bytes must a compiled step of our own engine move besides its matrix products?

Every kernel reads its inputs and writes its outputs once: norms with their residual adds, rotary
positions, activations, the loss on logits that become their own gradient, the update of weights in
one pass. `bench --against floor` takes these bytes at the memory's speed for what can't be avoided;
the step's estimate multiplies those of activations by the coefficient `elem`. Bytes of one rank;
broadcasts.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.memory.own_alone import is_alone
from fourfold.spec.words import DTYPES

_FP8 = DTYPES.index("fp8")
# `elem` is about 1.8 for engines whose passes are guessed; counted ones take about 1.2 of their
# bytes at the memory's rate by its data sheet.
EXACT = 0.67
# Of a logit: 30 for its row's maximum and sum, 58 for its gradient (parallel/lean_loss.py).
_EAGER_LEAN_BYTES = 88.0


def layer_bytes(c: Columns, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of one layer and micro batch, casts to fp8 left out."""
    split = np.where(c.sp > 0, c.tp, 1.0)
    # A norm reads the residual and what is added to it, and writes both sums; backwards it reads
    # the gradients of both and its input.
    hidden = 8.0 * c.hidden / split
    turned = np.where(c.rope > 0, 2.0 * (c.width + c.kv_width), 0.0) / c.tp
    wide = (1.0 + c.gated) * c.ffn / c.tp
    narrow = c.ffn / c.tp
    # The gradient of a bias is a sum over what its product's output hands back.
    biases = c.bias * (c.qkv_width / c.tp + 2.0 * c.hidden / split + wide)
    each = tokens * c.act_bytes
    return each * (hidden + turned + wide + narrow), each * (
        hidden + turned + 2.0 * wide + narrow + biases
    )


def cast_bytes(c: Columns, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of turning operands into fp8: each is read for its largest value, read
    again and written; inputs and weights once more in the backward pass, transposed."""
    qkv = c.qkv_width / c.tp
    ins = 2.0 * c.hidden + (c.width + c.ffn) / c.tp
    outs = qkv + 2.0 * c.hidden + (1.0 + c.gated) * c.ffn / c.tp
    weights = c.layer_weights / c.tp
    low = np.where(c.precision == _FP8, 1.0, 0.0)
    forward = low * 5.0 * (tokens * ins + weights)
    return forward, low * (tokens * (3.0 * ins + 6.0 * outs) + 3.0 * weights)


def loss_bytes(c: Columns, tokens: Floats) -> Floats:
    """Logits are read for their sums, and read and written as their own gradient."""
    return 3.0 * tokens * np.ceil(c.vocab / c.tp) * c.act_bytes


def lean_bytes(c: Columns, tokens: Floats) -> Floats:
    """The same by our lean loss; uncompiled it goes through logits in a dozen operators, most of
    them in fp32 on both sides."""
    eager = tokens * np.ceil(c.vocab / c.tp) * _EAGER_LEAN_BYTES
    return np.where(c.own_kernels > 0, loss_bytes(c, tokens), eager)


def update_bytes(c: Columns, params: Floats) -> Floats:
    """Weights and moments read and written, gradients read for their norm and for the update, the
    copies that layers compute with written."""
    shards = np.where(c.zero >= 1, c.shard, 1.0)
    micros = c.micros
    sums = np.where(is_alone(c) & (micros < 2), c.act_bytes, c.acc_bytes)
    copies = np.where(is_alone(c) & (c.param_bytes != c.act_bytes), c.act_bytes, 0.0)
    each = 2.0 * (c.param_bytes + c.moment_bytes) + 2.0 * sums + copies
    return params * each / shards


def adding_bytes(c: Columns, params: Floats) -> Floats:
    """Gradients added up, mean over micro batches; without FSDP the first one's are the sum."""
    micros = c.micros
    share = np.where(is_alone(c), (micros - 1.0) / np.maximum(micros, 1.0), 1.0)
    return params * (c.act_bytes + 2.0 * c.acc_bytes) * share


def ends_bytes(c: Columns, tokens: Floats, *, first: bool, last: bool) -> Floats:
    """Of the ends of a model, both ways: rows of the embedding read, written and added to; the last
    norm and the loss."""
    each = tokens * c.act_bytes * c.hidden
    return first * 5.0 * each + last * (5.0 * each + loss_bytes(c, tokens))
