"""What a rank of our own engine holds at its fullest moment: the engine's tensors, one by one.

Around what layers keep (own_layer.py) stand FSDP's copies of weights and gradients, what other
micro batches keep, and the loss. The fullest of the moments that can be the fullest counts. Nothing
here is fitted: a test holds these formulas to the dry run. Bytes of one rank; broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.memory.own_held import (
    GPIPE,
    Held,
    backward_bytes,
    held,
    in_later,
    in_single_round,
    is_split,
    sums_bytes,
)
from fourfold.cost.memory.own_layer import LayerBytes, logits_bytes, loss_bytes
from fourfold.cost.memory.own_stage import Stage, Weights, stage_weights


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the fullest moment, by kind there."""

    total: Floats
    state: Floats
    weights: Floats
    activations: Floats
    loss: Floats


def stage_peak(c: Columns, one: LayerBytes, stage: Stage, micros: Floats) -> Peak:
    """The fullest moment of a stage of such layers: of its first backward, without gradients of
    earlier micro batches, and of a later one."""
    early = _peak(c, one, stage, np.maximum(stage.flight, 1.0), micros, later=False)
    late = _peak(c, one, stage, in_later(stage, micros), micros, later=True)
    use = (micros > 1) & (late.total > early.total)
    both = ((getattr(late, f.name), getattr(early, f.name)) for f in fields(Peak))
    return Peak(*(np.where(use, *pair) for pair in both))


@dataclass(frozen=True, slots=True)
class _Now:
    """A backward pass, the first (`later` False) or one with gradients of earlier micro batches."""

    layer: LayerBytes
    later: bool
    reduces: NDArray[np.bool_]  # gradients are reduced with this pass
    gathers: NDArray[np.bool_]  # the forward before it gathered weights
    base: Floats  # what other micro batches keep, and messages between stages
    own: Floats  # what this one keeps when its forward is over
    one: Floats  # ... in the mean layer
    first: Floats  # ... in the top layer, whose backward comes first
    top: Floats  # most that the top layer's backward holds, and what computing it again adds
    second: Floats  # ... the one's below it
    lowest: Floats  # ... the lowest one's, with what it keeps
    head: Floats  # gradient of the head's weights
    kept: Floats  # buffers of reductions before
    late_loss: Floats
    sending: Floats  # bytes a weight while its gradient is reduced


def _now(
    c: Columns, keeps: Held, stage: Stage, w: Weights, flight: Floats, micros: Floats, later: bool
) -> _Now:
    one, a, g, gpipe = keeps.layer, c.act_bytes, c.acc_bytes, c.schedule == GPIPE
    s = one.sizes
    tied = (c.tied > 0) & (stage.first > 0) & (stage.last > 0)
    # The buffer of the last reduction stays until the next one, in each virtual stage.
    frees = (c.zero >= 3) & ((stage.layers > c.vpp) | ~gpipe)
    parts = np.where(micros > c.pp, c.vpp - 1.0, 0.0)
    sent_last = (np.where(w.root > 0, w.root, w.layer) + parts * w.layer) * g
    return _Now(
        layer=one,
        later=later,
        reduces=(c.zero >= 2) | (micros < 2),
        # Below zero3, and of GPipe's last layer, the first micro batch gathers for all.
        gathers=(w.shards > 1) & (frees | ((flight <= 1) & (not later))),
        base=keeps.base,
        own=keeps.own,
        one=keeps.one,
        first=np.where(stage.top_again > 0, s.between, one.kept),
        top=keeps.top,
        second=backward_bytes(c, one, stage.next_again),
        lowest=backward_bytes(c, one, stage.low_again)
        + np.where(stage.low_again > 0, s.between, one.kept),
        # In the sums' own format a gradient is added to them at once, but for a tied weight's,
        # which waits for its other use; a split pass makes it later.
        head=np.where(((g == a) & later & (c.zero < 2) & ~tied) | is_split(c), 0.0, w.head * a),
        kept=np.where((c.zero >= 2) & later, sent_last + w.all * w.reduced, 0.0),
        late_loss=keeps.late_loss,
        # Gradients are copied into the buffer that is sent, then let go; what comes back is new.
        sending=np.maximum(a, np.maximum(w.back, w.divided)) + g,
    )


def _peak(
    c: Columns, one: LayerBytes, stage: Stage, flight: Floats, micros: Floats, *, later: bool
) -> Peak:
    """`later`: gradients of an earlier micro batch are there."""
    w = stage_weights(c, stage, micros)
    now = _now(c, held(c, one, stage, flight, micros), stage, w, flight, micros, later)
    summed = sums_bytes(c, w)
    grads = summed if later else np.zeros_like(summed)
    in_loss, loss = _in_loss(c, stage, w, now)
    moments = _moments(c, stage, w, now, micros, in_loss, grads)
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    weights = w.unsharded
    if np.any(c.is_alone):
        loss_alone, alone = _alone(c, stage, w, now, micros, loss)
        weights, grads, fullest = (
            np.where(c.is_alone, own, other)
            for own, other in zip(alone, (weights, grads, fullest), strict=True)
        )
        in_loss = np.where(c.is_alone, loss_alone, in_loss)
    empty, in_it = stage.layers < 1, fullest <= in_loss
    return Peak(
        total=np.where(empty, 0.0, w.state + grads + weights + fullest),
        state=np.where(empty, 0.0, w.state + grads),
        weights=np.where(empty, 0.0, weights),
        activations=np.where(empty, 0.0, fullest - np.where(in_it, loss, 0.0)),
        loss=np.where(empty | ~in_it, 0.0, loss),
    )


def _moments(
    c: Columns, stage: Stage, w: Weights, now: _Now, micros: Floats, in_loss: Floats, grads: Floats
) -> list[Floats]:
    """Bytes beside state, gradients and weights at each moment that can be the fullest."""
    computing = now.top + w.ahead + now.kept
    in_top = now.base + now.own + computing + now.head
    in_next = in_top - now.first + now.second - now.top
    single = in_single_round(c, micros)
    apart = stage.layers * (1.0 - 1.0 / c.vpp) * w.layer
    below = apart + np.where(stage.last > 0, 0.0, w.root)
    missing = np.where(single, grads * below / np.maximum(w.all, 1.0), 0.0)
    moments = [
        in_loss - missing,
        in_top - missing,
        np.where(stage.layers > c.vpp, in_next - missing, 0.0),
        _split(c, stage, w, now, micros),
        now.base + w.root * c.act_bytes,
        _gathering(c, w, now),
    ]
    reduces = now.reduces & ~is_split(c)
    moments += [np.where(reduces, one, 0.0) for one in _reductions(c, stage, w, now, micros)]
    if now.later:
        rest = np.maximum(stage.layers / c.vpp - 1.0, 0.0) * now.layer.late
        top, split, root = _final(c, stage, w, late=rest)
        moments += [top + now.own - now.first + now.head - missing, split, root]
        moments.append(np.where((c.zero < 2) & ~is_split(c), _final_lowest(c, stage, w, now), 0.0))
        lowest = (now.base + now.own) / c.vpp - _let_go(c, w, apart + w.head)
        looped = (lowest + computing, lowest - now.first + top)
        moments += [np.where(single, moment, 0.0) for moment in looped]
    return moments


def _alone(
    c: Columns, stage: Stage, w: Weights, now: _Now, micros: Floats, loss: Floats
) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """Of ranks where nobody else sees other tokens: bytes in the loss; weights as they compute,
    gradients so far, the fullest moment.

    Whole weights stay beside those that are updated. Gradients of the first micro batch stay as the
    backward pass made them; the second makes them as wide as sums are, the update as the weights.
    Under autocast weights' copies go as their gradients come, which are as wide as the weights.
    """
    a, g, p, later = c.act_bytes, c.acc_bytes, c.param_bytes, now.later
    copied = np.where(p != a, a, 0.0)
    lent = np.where(c.autocast > 0, copied, 0.0)
    a = np.where(c.autocast > 0, p, a)
    second = later & (micros < 3)
    before = np.where(second, a, g) if later else np.zeros_like(a)
    # What a gradient adds when it comes, and what of it stays.
    coming = np.where(second & (a != g), a + g, a)
    stays = np.where(second, g - a, 0.0) if later else a
    # Compiled, the update reads gradients of a single micro batch as they are.
    single = np.where(c.own_kernels > 0, a, p)
    update = np.where(micros < 2, single, p if later else before + stays) - before - lent
    s, kept = now.layer.sizes, now.base + now.own
    in_loss = kept + stage.last * s.whole + loss
    in_lowest = now.base + s.between + now.lowest
    through = np.maximum(stage.layers - 1.0, 0.0) * w.layer
    stays_less = stays - lent
    moments = (
        in_loss,
        _split(c, stage, w, now, micros),
        kept + w.head * coming,
        kept + now.top + w.head * stays_less,
        in_lowest + (w.head + through) * stays_less,
        now.base + w.root * (coming - lent) + (w.all - w.root) * stays_less,
        w.all * update,
    )
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    return in_loss, (w.all * copied, w.all * before, fullest)


def _in_loss(c: Columns, stage: Stage, w: Weights, now: _Now) -> tuple[Floats, Floats]:
    """(all at the loss, the loss itself); the last gathered weights are there twice in a forward
    that gathers. A later pass of GPipe has its loss behind it."""
    s = now.layer.sizes
    flat = np.where(now.gathers, w.layer * c.act_bytes, 0.0)
    loss = stage.last * loss_bytes(c, s, w.head)
    # In parts the loss is largest in its backward, when the gathered copy is gone.
    in_parts = (c.loss_chunks > 1) & (c.lean_loss <= 0)
    forward = stage.last * logits_bytes(c, s) + flat
    most = np.where(in_parts, np.maximum(loss, forward), loss + flat)
    total = now.base + now.own + stage.last * s.whole + most + now.kept
    return np.where((c.schedule == GPIPE) & now.later, 0.0, total), loss


def _gathering(c: Columns, w: Weights, now: _Now) -> Floats:
    """A forward pass of zero3 as deep as there are layers to gather ahead: FSDP's flat copies of
    this layer and of those, and the shard that is sent."""
    depth = np.minimum(c.prefetch, w.ahead / np.maximum(w.layer * c.act_bytes, 1.0))
    flat = w.layer * c.act_bytes * (1.0 + depth + 1.0 / w.shards)
    total = now.base + now.own - depth * now.one + flat + now.kept
    return np.where((c.zero >= 3) & now.gathers, total, 0.0)


def _reductions(c: Columns, stage: Stage, w: Weights, now: _Now, micros: Floats) -> list[Floats]:
    """Sending the top layer's gradients; the layer below it, that buffer still there; the last
    layer, gradients of all others made; the ends' own gradients."""
    s, a, g, n = now.layer.sizes, c.act_bytes, c.acc_bytes, stage.layers
    third, only = c.zero >= 3, micros < 2
    beyond = now.base + now.own - now.first + now.head
    # With the step's last backward, weights are let go layer by layer whatever is sharded.
    let_go = np.where(third | only, w.layer * a, 0.0)
    sent = beyond + 2.0 * s.between + w.layer * now.sending - let_go + w.ahead
    done = w.copies + (0.0 if now.later else c.param_bytes / w.shards)
    ahead = np.minimum(w.ahead, np.maximum(np.ceil(n / c.vpp) - 2.0, 0.0) * w.layer * a)
    below = beyond - s.between + now.second + w.layer * (g + done)
    below = below + ahead - np.where(third, 0.0, let_go)
    through = np.maximum(n - 1.0, 0.0) * w.layer
    last = now.base + s.between + now.lowest + now.head
    last = (
        last
        + np.where(n > c.vpp, w.layer * g, 0.0)
        + through * (done - np.where(only & ~third, a, 0.0))
    )
    ends = now.base + w.root * now.sending + n * w.layer * done
    ends = ends - np.where(third | only, w.unsharded, 0.0)
    return [sent, np.where(n > c.vpp, below, 0.0), last, ends]


def _split(c: Columns, stage: Stage, w: Weights, now: _Now, micros: Floats) -> Floats:
    """A split backward keeps inputs and gradients of all products until their weights' turn, and
    the embedding's gradient, which is no product. Weights' gradients need no weights."""
    if not np.any(is_split(c)):
        return np.zeros(())
    late, n, a = now.layer.late, stage.layers, c.act_bytes
    rest, embedding = np.maximum(n / c.vpp - 1.0, 0.0), (w.root - w.head) * a
    gone = np.where(c.zero >= 3, c.vpp * w.layer * a, np.where(micros < 2, w.layer * a, 0.0))
    made = late + w.layer * a - np.where(c.zero >= 3, gone, 0.0)
    sent = np.where(now.reduces, w.layer * now.sending - gone, 0.0)
    bottom = now.late_loss + now.lowest + now.kept
    in_layers = rest * late + np.maximum(np.maximum(made, sent) + embedding, bottom)
    adding = np.where(c.loss_chunks > 1, 3.0, 1.0) * w.head * a
    in_head = n / c.vpp * late + now.late_loss + adding
    split = now.base + np.maximum(in_layers, in_head)
    return np.where(is_split(c), split, 0.0)


def _let_go(c: Columns, w: Weights, params: Floats) -> Floats:
    """Bytes fewer once sums of these are sent: whole weights go, shards of gradients stay."""
    shards = c.param_bytes / w.shards + w.copies
    return np.where(c.zero < 2, params * (c.act_bytes + c.acc_bytes - shards), 0.0)


def _final_lowest(c: Columns, stage: Stage, w: Weights, now: _Now) -> Floats:
    """zero0 and zero1 in the lowest layer's last backward: sums of the others are sent, and the
    buffer of the last one is still there."""
    n = stage.layers / c.vpp
    through = np.maximum(n - 1.0, 0.0) * w.layer
    buffer = np.where(n > 1, w.layer * c.acc_bytes, 0.0)
    lowest = now.layer.sizes.between + now.lowest + now.head
    return lowest + buffer - _let_go(c, w, through)


def _final(c: Columns, stage: Stage, w: Weights, *, late: Floats) -> list[Floats]:
    """zero0 and zero1 in the last micro batch, sums are sent: of a layer (beside activations), in
    a split backward, of the ends when all layers are through."""
    # The sums themselves are counted as gradients.
    sending = np.maximum(c.acc_bytes, np.maximum(w.back, w.divided))
    top = w.layer * (sending - c.act_bytes)
    split = np.where(is_split(c), late + w.layer * sending, 0.0)
    root = w.root * (sending - c.act_bytes) - _let_go(c, w, stage.layers * w.layer)
    return [np.where(c.zero < 2, moment, 0.0) for moment in (top, split, root)]
