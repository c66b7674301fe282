"""Moments of a rank of our own engine at which gradients are reduced, or a split backward makes
them: bytes beside state, gradients and weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.memory.own_held import is_split
from fourfold.cost.memory.own_layer import LayerBytes
from fourfold.cost.memory.own_stage import Stage, Weights


@dataclass(frozen=True, slots=True)
class Now:
    """A backward pass, the first (`later` False) or one with gradients of earlier micro batches."""

    layer: LayerBytes
    later: bool
    reduces: NDArray[np.bool_]  # gradients are reduced with this pass
    gathers: NDArray[np.bool_]  # the forward before it gathered weights
    base: Floats  # what other micro batches keep, and messages between stages
    own: Floats  # what this one keeps when its forward is over
    left: Floats  # ... and the loss is behind it
    one: Floats  # ... in the mean layer
    first: Floats  # ... in the top layer, whose backward comes first
    top: Floats  # most that the top layer's backward holds, and what computing it again adds
    second: Floats  # ... the one's below it
    lowest: Floats  # ... the lowest one's, with what it keeps
    head: Floats  # gradient of the head's weights
    kept: Floats  # buffers of reductions before
    late_loss: Floats
    sending: Floats  # bytes a weight while its gradient is reduced


def reductions(c: Columns, stage: Stage, w: Weights, now: Now, micros: Floats) -> list[Floats]:
    """Sending the top layer's gradients; the layer below it, that buffer still there; the last
    layer, gradients of all others made; the ends' own gradients."""
    s, a, g, n = now.layer.sizes, c.act_bytes, c.acc_bytes, stage.layers
    third, only = c.zero >= 3, micros < 2
    # Copies of an earlier pass are there until their own layer's are made.
    old = np.where(now.later, w.all * w.reduced, 0.0)
    beyond = now.base + now.left - now.first + now.head + old
    # With the step's last backward, weights are let go layer by layer whatever is sharded.
    let_go = np.where(third | only, w.layer * a, 0.0)
    own_old = np.where(now.later, w.reduced, 0.0)
    sent = beyond + 2.0 * s.between + w.layer * (now.sending - own_old) - let_go + w.ahead
    made = 0.0 if now.later else c.param_bytes / w.shards
    copies = np.where(w.reduced > 0, 0.0, w.added) if now.later else w.copies
    # A virtual stage that is through for good lets its copies go.
    held_on = np.where(only, np.ceil(n / c.vpp), n) * w.layer * copies
    ahead = np.minimum(w.ahead, np.maximum(np.ceil(n / c.vpp) - 2.0, 0.0) * w.layer * a)
    below = beyond - s.between + now.second + w.layer * (g + made + copies)
    below = below + ahead - np.where(third, 0.0, let_go)
    through = np.maximum(n - 1.0, 0.0) * w.layer
    last = now.base + s.between + now.lowest + now.head + old
    last = (
        last
        + np.where(n > c.vpp, w.layer * g, 0.0)
        + through * (made - np.where(only & ~third, a, 0.0))
        + np.maximum(held_on - w.layer * copies, 0.0)
    )
    ends = now.base + w.root * (now.sending - own_old) + n * w.layer * made + held_on + old
    whole = w.later if now.later else w.unsharded
    ends = ends - np.where(third | only, whole, 0.0)
    return [sent, np.where(n > c.vpp, below, 0.0), last, ends]


def split_bytes(c: Columns, stage: Stage, w: Weights, now: Now, micros: Floats) -> Floats:
    """A split backward keeps inputs and gradients of all products until their weights' turn, and
    the embedding's gradient, which is no product. Weights' gradients need no weights."""
    if not np.any(is_split(c)):
        return np.zeros(())
    late, n, a = now.layer.late, stage.layers, c.act_bytes
    rest, embedding = np.maximum(n / c.vpp - 1.0, 0.0), w.root - w.head
    # As wide as sums by then, or added to them.
    waits = np.where((c.zero < 2) & now.later, 0.0, embedding * c.acc_bytes)
    gone = np.where(c.zero >= 3, c.vpp * w.layer * a, np.where(micros < 2, w.layer * a, 0.0))
    made = late + w.layer * a - np.where(c.zero >= 3, gone, 0.0)
    sent = np.where(now.reduces, w.layer * now.sending - gone, 0.0)
    bottom = np.maximum(now.late_loss + now.lowest + now.kept, late + embedding * a)
    in_layers = rest * late + np.maximum(np.maximum(made, sent) + waits, bottom)
    adding = np.where(c.loss_chunks > 1, 3.0, 1.0) * w.head * a
    in_head = n / c.vpp * late + now.late_loss + adding
    split = now.base + np.maximum(in_layers, in_head)
    return np.where(is_split(c), split, 0.0)


def let_go_bytes(c: Columns, w: Weights, params: Floats) -> Floats:
    """Bytes fewer once sums of these are sent: whole weights go, shards of gradients stay."""
    shards = c.param_bytes / w.shards + w.copies
    return np.where(c.zero < 2, params * (c.act_bytes + c.acc_bytes - shards), 0.0)


def final_lowest(c: Columns, stage: Stage, w: Weights, now: Now) -> Floats:
    """zero0 and zero1 in the lowest layer's last backward: sums of the others are sent, and the
    buffer of the last one is still there."""
    n = stage.layers / c.vpp
    through = np.maximum(n - 1.0, 0.0) * w.layer
    buffer = np.where(n > 1, w.layer * c.acc_bytes, 0.0)
    lowest = now.layer.sizes.between + now.lowest + now.head
    return lowest + buffer - let_go_bytes(c, w, through)


def final(c: Columns, stage: Stage, w: Weights, *, late: Floats) -> list[Floats]:
    """zero0 and zero1 in the last micro batch, sums are sent: of a layer (beside activations), in
    a split backward, of the ends when all layers are through."""
    # The sums themselves are counted as gradients.
    sending = np.maximum(c.acc_bytes, np.maximum(w.back, w.divided))
    top = w.layer * (sending - c.act_bytes)
    split = np.where(is_split(c), late + w.layer * sending, 0.0)
    root = w.root * (sending - c.act_bytes) - let_go_bytes(c, w, stage.layers * w.layer)
    return [np.where(c.zero < 2, moment, 0.0) for moment in (top, split, root)]
