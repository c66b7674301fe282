"""What micro batches keep on a rank of our own engine, which knows nothing of how its state is
sharded; and, from that and the state, bytes that no way to run undercuts, and bytes that none
exceeds.

What one layer keeps, and what its backward pass holds beside that: a walk of keeps and frees
over its operations (cost/ops), in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.memory.stage import Stage, Weights, embed_weights, of_stages
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op
from fourfold.spec.words import SCHEDULES


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
    split = late = np.zeros(())
    if np.any(c.schedule == _ZERO_BUBBLE):
        split = _most(c, ops, is_split=True) + between
        both = (_input(c, op) + op.m * op.n * op.groups * c.act_bytes for op in products)
        late = sum(both, late)
    return LayerBytes(
        between=between,
        whole=whole,
        kept=_counted(c, ops),
        backward=_most(c, ops, is_split=False) + between,
        split=split,
        late=late,
    )


def stage_layer_bytes(c: Columns, every: list[Stage]) -> list[LayerBytes]:
    """Of the mean layer of each stage."""
    if all(stage.routed is c.routed for stage in every):
        return [layer_bytes(c)] * len(every)
    at = replace(c, routed=np.stack([stage.routed for stage in every]))
    one = layer_bytes(at)
    values = [of_stages(c, at, getattr(one, field.name)) for field in fields(LayerBytes)]
    return [LayerBytes(*of_stage) for of_stage in zip(*values, strict=True)]


def _input(c: Columns, op: Op) -> Floats:
    return op.m * op.k * op.groups * c.act_bytes


def _most(c: Columns, ops: list[Op], *, is_split: bool) -> Floats:
    """Through a layer from its end: each operation makes a gradient of its input, and of its
    weights, before the gradient that it got and what it kept are let go. A split pass makes none of
    weights and keeps inputs and gradients of its products."""
    most = live = given = np.zeros(())
    for op in reversed(ops):
        is_product = op.kind.endswith("product")
        stays = is_split and is_product
        weights = op.n * op.k * op.groups * c.act_bytes if is_product and not is_split else 0.0
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


GPIPE, _ZERO_BUBBLE = SCHEDULES.index("gpipe"), SCHEDULES.index("zero-bubble")


@dataclass(frozen=True, slots=True)
class Held:
    """In a backward pass."""

    layer: LayerBytes
    base: Floats  # what other micro batches keep, and messages between stages
    own: Floats  # what this one keeps when its forward is over
    left: Floats  # ... and the loss is behind it: what the head read is gone
    one: Floats  # ... in the mean layer
    top: Floats  # most that the top layer's backward holds, and what computing it again adds
    late_loss: Floats


def held(c: Columns, one: LayerBytes, stage: Stage, flight: Floats, micros: Floats) -> Held:
    s = one
    each = stage.again * s.between + (stage.layers - stage.again) * one.kept
    own = each + s.between
    late_loss = stage.last * (s.whole + logits(c) * c.loss_chunks * c.act_bytes)
    late, gpipe = np.minimum(stage.late, flight - 1.0), c.schedule == GPIPE
    # GPipe has the loss of every micro batch before the first goes back; others one at a time.
    losses = np.where(gpipe, flight - 1.0, late)
    lost = np.where(gpipe & (c.loss_chunks > 1), stage.last * s.whole, late_loss)
    base = (flight - 1.0 - late) * own + late * stage.layers * one.late + losses * lost
    return Held(
        layer=one,
        base=base + _messages(c, stage, micros) * s.between,
        own=own,
        left=own - stage.last * s.between,
        one=each / np.maximum(stage.layers, 1.0),
        top=backward_bytes(c, one, stage.top_again),
        late_loss=late_loss,
    )


def _messages(c: Columns, stage: Stage, micros: Floats) -> Floats:
    """Between stages, beside the gradient that a pass begins with: the one sent before, and the
    next input, while there is one. The first stage neither sends gradients nor receives inputs,
    unless virtual stages follow. GPipe's backwards begin when all is sent."""
    two = (c.vpp > 1) | (micros > stage.flight + 1.0)
    some = (c.pp > 1) & (micros * c.vpp > 1) & ((c.vpp > 1) | (stage.first <= 0))
    return np.where(some & (c.schedule != GPIPE), np.where(two, 2.0, 1.0), 0.0)


def backward_bytes(c: Columns, one: LayerBytes, again: Floats) -> Floats:
    """The most that a layer's backward holds beside what the layer kept."""
    made_again = np.where(again > 0, one.kept - one.between, 0.0)
    return made_again + np.where(is_split(c), one.split, one.backward)


def is_split(c: Columns) -> NDArray[np.bool_]:
    return (c.schedule == _ZERO_BUBBLE) & (c.pp > 1)


def in_later(c: Columns, stage: Stage, micros: Floats) -> Floats:
    """Micro batches in flight in the first backward that finds gradients of every layer."""
    plain = np.clip(micros - 1.0, 1.0, np.maximum(stage.flight, 1.0))
    looped = _in_visits(c, stage, micros, (c.vpp - 1.0) * c.pp + 1.0)
    return np.where((c.vpp > 1) & (micros > c.pp), looped, plain)


def _in_visits(c: Columns, stage: Stage, micros: Floats, gone: Floats) -> Floats:
    """Micro batches in flight when `gone` virtual stages have gone back and the next one does. Of a
    last round that is cut short, the missing visits are left out (cost/schedule.py)."""
    ahead = np.where(stage.last > 0, 0.0, 2.0 * (c.pp - 1.0) - np.where(stage.first > 0, 0.0, 2.0))
    visits = (c.vpp - 1.0) * c.pp + 1.0 + ahead + gone
    rounds = np.floor(micros / c.pp)
    whole, rest = rounds * c.pp * c.vpp, micros - rounds * c.pp
    beyond = np.clip(visits - whole, 0.0, c.pp * c.vpp)
    cut = np.floor(beyond / c.pp) * rest + np.minimum(np.mod(beyond, c.pp), rest)
    return np.maximum(np.minimum(visits, whole) + cut - gone, c.vpp) / c.vpp


def in_single_round(c: Columns, micros: Floats) -> NDArray[np.bool_]:
    """The top virtual stage goes back before others have any gradients."""
    return (micros <= c.pp) & (c.vpp > 1)


def sums_bytes(c: Columns, w: Weights) -> Floats:
    """Gradients of earlier micro batches."""
    return np.where(c.zero < 2, w.all * c.acc_bytes, w.all / w.shards * c.param_bytes)


def beside_bytes(
    c: Columns, one: LayerBytes, stage: Stage, micros: Floats
) -> tuple[Floats, Floats, Floats]:
    """Of what is there beside the state, at least: in the top layer's backward or in the loss of
    the first pass, and in the top layer's of a later one, where all gradients are there.

    And at most: all that is kept, and the largest of what layers and the loss hold for a moment.
    Infinite for split backwards, which hold more."""
    early = held(c, one, stage, np.maximum(stage.flight, 1.0), micros)
    late = held(c, one, stage, in_later(c, stage, micros), micros)
    some, is_later = stage.layers >= 1, (micros > 1) & ~in_single_round(c, micros)
    lost = loss_bytes(c, stage.last * embed_weights(c))
    loss = stage.last * (one.whole + lost)
    least = early.base + np.maximum(early.left + early.top, early.own + loss)
    layers = [backward_bytes(c, one, again) for again in (stage.next_again, stage.low_again)]
    moment = np.maximum(np.maximum(early.top, 2.0 * one.between), np.maximum(*layers))
    loss = stage.last * (one.whole + np.maximum(lost, logits_bytes(c)))
    most = early.base + early.own + np.maximum(moment, loss)
    return (
        np.where(some, least, -np.inf),
        np.where(some & is_later, late.base + late.left + late.top, -np.inf),
        np.where(some, np.where(is_split(c), np.inf, most), 0.0),
    )


def least_state(c: Columns, w: Weights) -> list[Floats]:
    """State and weights beside those: without gradients, and with them."""
    copied = np.where(c.param_bytes != c.act_bytes, w.all * c.act_bytes, 0.0)
    # Alone, what the head's copies give back is no more than copies and gradients.
    late = np.where(c.is_alone, 0.0, sums_bytes(c, w) + w.later)
    return [w.state + np.where(c.is_alone, copied, w.unsharded), w.state + late]


def most_state(c: Columns, w: Weights) -> Floats:
    """State, weights, gradients and every buffer that their exchange may need, as if all were there
    at once. Infinite where nobody else sees other tokens, which is counted otherwise."""
    a, g = c.act_bytes, c.acc_bytes
    copied = np.where(c.dp * c.cp > w.shards, g / w.shards, 0.0)
    sending = np.maximum(a, np.maximum(w.back, w.divided)) + g
    last = (np.maximum(w.root, w.layer) + (c.vpp - 1.0) * w.layer) * g
    kept = np.where(c.zero >= 2, last + w.all * copied, 0.0)
    reduced = w.all * (copied + c.param_bytes / w.shards)
    one = w.ahead + w.head * a + w.layer * (2.0 * a + g) + (w.layer + w.root) * sending
    total = w.state + sums_bytes(c, w) + w.unsharded + one + kept + reduced
    return np.where(c.is_alone, np.inf, total)
