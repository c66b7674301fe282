"""What one layer keeps, and what its backward pass holds beside that: a walk of keeps and frees
over its operations (cost/ops), in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """`kept` for a layer's backward pass, its input (`between` blocks) among it; the most that its
    backward pass holds beside that, and what of a `split` one waits for gradients of weights.
    `whole`: a block's input, gathered where sequence parallelism divides it."""

    between: Floats
    whole: Floats
    kept: Floats
    backward: Floats
    split: Floats
    late: Floats


def kept_bytes(c: Columns, ops: Iterable[Op], coef: Coefficients) -> Floats:
    """Of one layer and micro batch: tensors as they are counted, or by an engine's habits."""
    if np.all(c.fsdp2 > 0):
        return _counted(c, ops)
    habits = {"": 1.0, **{name: coef[name] for name in ("kept_hidden", "gathered")}}
    kept = (op.keeps * op.share * habits[op.habit] for op in ops)
    return sum(kept, np.zeros(())) * coef["act"]


def _counted(c: Columns, ops: Iterable[Op]) -> Floats:
    share = np.where(c.attn_ckpt > 0, c.selective_share, 1.0)
    return sum((op.keeps * op.share for op in ops), np.zeros(())) * share


def layer_bytes(c: Columns) -> LayerBytes:
    ops = [op for op in decoder_layer(c, c.micro) if op.phase == "forward"]
    products = [op for op in ops if op.kind.endswith("product")]
    whole = c.tokens * c.hidden * c.act_bytes
    between = whole / c.split
    late = sum((_input(c, op) + op.m * op.n * op.groups * c.act_bytes for op in products),
               np.zeros(()))  # fmt: skip
    return LayerBytes(
        between=between,
        whole=whole,
        kept=_counted(c, ops),
        backward=_most(c, ops, is_split=False) + between,
        split=_most(c, ops, is_split=True) + between,
        late=late,
    )


def _input(c: Columns, op: Op) -> Floats:
    return op.m * op.k * op.groups * c.act_bytes


def _most(c: Columns, ops: list[Op], *, is_split: bool) -> Floats:
    """Through a layer from its end: each operation makes a gradient of its input, and of its
    weights, before the gradient that it got and what it kept are let go. A split pass makes none of
    weights and keeps inputs and gradients of its products."""
    most = live = given = np.zeros(())
    for op in reversed(ops):
        stays = is_split and op.kind.endswith("product")
        weights = 0.0 if is_split else op.n * op.k * op.groups * c.act_bytes
        gives = op.share * op.gives
        most = np.maximum(most, live + gives + op.share * (op.holds + weights))
        live = live + gives + op.share * weights
        if not stays:
            live = live - given - op.share * op.keeps
        given = gives
    return most


def logits(c: Columns) -> Floats:
    """Of one chunk of the loss."""
    return np.ceil(c.tokens / c.loss_chunks) * np.ceil(c.vocab / c.tp)


def logits_bytes(c: Columns) -> Floats:
    """Logits in their format and three times in fp32 (cut by vocabulary), or two and a half."""
    wide = np.maximum(4.0, c.act_bytes)
    return logits(c) * np.where(c.tp > 1, c.act_bytes + 3.0 * wide, 3.0 * wide)


def loss_bytes(c: Columns, embed: Floats) -> Floats:
    """The most that the loss holds, forwards or backwards."""
    all_logits, own = logits_bytes(c), logits(c) * c.act_bytes
    whole = c.tokens * c.hidden * c.act_bytes
    # In parts the gradient of the head's weights is added up: old, new and sum.
    head = embed * c.act_bytes
    parts = np.maximum(all_logits + head, 2.0 * own + 3.0 * head)
    plain = np.where(c.loss_chunks > 1, parts + whole, all_logits)
    # The lean one: the gradient takes the logits' place; in parts it makes the weights' at once.
    lean = own + np.where(c.loss_chunks > 1, head + whole, 0.0)
    plain = np.where(c.compiled_loss > 0, 2.0 * own, plain)
    return np.where(c.lean_loss > 0, lean, plain)
