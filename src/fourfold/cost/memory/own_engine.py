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
    in_rounds,
    in_single_round,
    is_split,
    sums_bytes,
)
from fourfold.cost.memory.own_layer import LayerBytes, logits_bytes, loss_bytes
from fourfold.cost.memory.own_sent import (
    Now,
    final,
    final_lowest,
    let_go_bytes,
    reductions,
    split_bytes,
)
from fourfold.cost.memory.own_stage import Stage, Weights, stage_weights

_NONE: Floats = np.zeros(())


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
    earlier micro batches, of a later one, and of one in which some virtual stages have them."""
    early = _peak(c, one, stage, np.maximum(stage.flight, 1.0), micros, later=False)
    late = _peak(c, one, stage, in_later(c, stage, micros), micros, later=True)
    peak = _fuller(micros > 1, late, early)
    flight, without = in_rounds(c, stage, micros)
    some = (without > 0) & (micros > c.pp)
    if np.any(some):
        between = _peak(c, one, stage, flight, micros, later=True, without=without)
        peak = _fuller(some, between, peak)
    return peak


def _fuller(may: NDArray[np.bool_], one: Peak, other: Peak) -> Peak:
    use = may & (one.total > other.total)
    both = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(Peak))
    return Peak(*(np.where(use, *pair) for pair in both))


def _now(
    c: Columns,
    keeps: Held,
    stage: Stage,
    w: Weights,
    flight: Floats,
    micros: Floats,
    later: bool,
    without: Floats,
) -> Now:
    one, a, g, gpipe = keeps.layer, c.act_bytes, c.acc_bytes, c.schedule == GPIPE
    s = one.sizes
    tied = (c.tied > 0) & (stage.first > 0) & (stage.last > 0)
    frees = (c.zero >= 3) & ((stage.layers > c.vpp) | ~gpipe)
    return Now(
        layer=one,
        later=later,
        reduces=(c.zero >= 2) | (micros < 2),
        # Below zero3, and of GPipe's last layer, the first micro batch gathers for all.
        gathers=(w.shards > 1) & (frees | ((flight <= 1) & (not later))),
        base=keeps.base,
        own=keeps.own,
        left=keeps.left,
        one=keeps.one,
        first=np.where(stage.top_again > 0, s.between, one.kept),
        top=keeps.top,
        second=backward_bytes(c, one, stage.next_again),
        lowest=backward_bytes(c, one, stage.low_again)
        + np.where(stage.low_again > 0, s.between, one.kept),
        # In the sums' own format a gradient is added to them at once, but for a tied weight's,
        # which waits for its other use; a split pass makes it later.
        head=np.where(((g == a) & later & (c.zero < 2) & ~tied) | is_split(c), 0.0, w.head * a),
        kept=np.where((c.zero >= 2) & later, _kept(c, w, micros, without), 0.0),
        late_loss=keeps.late_loss,
        # Gradients are copied into the buffer that is sent, then let go; what comes back is new.
        # Those of a split pass are made as wide as sums before.
        sending=np.maximum(np.where(is_split(c), g, a), np.maximum(w.back, w.divided)) + g,
    )


def _kept(c: Columns, w: Weights, micros: Floats, without: Floats) -> Floats:
    """The buffer of the last reduction stays until the next one, in each virtual stage."""
    parts = np.where(micros > c.pp, c.vpp * (1.0 - without) - 1.0, 0.0)
    sent_last = np.where(w.root > 0, w.root, w.layer) + parts * w.layer
    return sent_last * c.acc_bytes + w.all * w.reduced * (1.0 - without)


def _peak(
    c: Columns,
    one: LayerBytes,
    stage: Stage,
    flight: Floats,
    micros: Floats,
    *,
    later: bool,
    without: Floats = _NONE,
) -> Peak:
    """`later`: gradients of an earlier micro batch are there, but for the share `without` of the
    layers, those of the lowest virtual stages."""
    w = stage_weights(c, stage, micros)
    now = _now(c, held(c, one, stage, flight, micros), stage, w, flight, micros, later, without)
    summed = sums_bytes(c, w)
    grads = summed - _missing(stage, w, summed, without) if later else np.zeros_like(summed)
    in_loss, loss = _in_loss(c, stage, w, now)
    moments = _moments(c, stage, w, now, micros, in_loss, grads)
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    weights = np.where(without > 0, w.unsharded, w.later) if later else w.unsharded
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


def _missing(stage: Stage, w: Weights, grads: Floats, without: Floats) -> Floats:
    """Gradients that the lowest virtual stages, this share of the layers, do not have yet."""
    below = without * stage.layers * w.layer + np.where(stage.last > 0, 0.0, w.root)
    return np.where(without > 0, grads * below / np.maximum(w.all, 1.0), 0.0)


def _moments(
    c: Columns, stage: Stage, w: Weights, now: Now, micros: Floats, in_loss: Floats, grads: Floats
) -> list[Floats]:
    """Bytes beside state, gradients and weights at each moment that can be the fullest."""
    computing = now.top + w.ahead + now.kept
    in_top = now.base + now.left + computing + now.head
    in_next = in_top - now.first + now.second - now.top
    single = in_single_round(c, micros)
    apart = stage.layers * (1.0 - 1.0 / c.vpp) * w.layer
    missing = _missing(stage, w, grads, np.where(single, 1.0 - 1.0 / c.vpp, 0.0))
    moments = [
        in_loss - missing,
        in_top - missing,
        np.where(stage.layers > c.vpp, in_next - missing, 0.0),
        split_bytes(c, stage, w, now, micros),
        now.base + w.root * c.act_bytes,
        _gathering(c, w, now),
    ]
    reduces = now.reduces & ~is_split(c)
    moments += [np.where(reduces, one, 0.0) for one in reductions(c, stage, w, now, micros)]
    if now.later:
        rest = np.maximum(stage.layers / c.vpp - 1.0, 0.0) * now.layer.late
        top, split, root = final(c, stage, w, late=rest)
        moments += [top + now.left - now.first + now.head - missing, split, root]
        moments.append(np.where((c.zero < 2) & ~is_split(c), final_lowest(c, stage, w, now), 0.0))
        lowest = (now.base + now.own) / c.vpp - let_go_bytes(c, w, apart + w.head)
        looped = (lowest + computing, lowest - now.first + top)
        moments += [np.where(single, moment, 0.0) for moment in looped]
    return moments


def _alone(
    c: Columns, stage: Stage, w: Weights, now: Now, micros: Floats, loss: Floats
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
        split_bytes(c, stage, w, now, micros),
        kept + w.head * coming,
        now.base + now.left + now.top + w.head * stays_less,
        in_lowest + (w.head + through) * stays_less,
        now.base + w.root * (coming - lent) + (w.all - w.root) * stays_less,
        w.all * update,
    )
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    return in_loss, (w.all * copied, w.all * before, fullest)


def _in_loss(c: Columns, stage: Stage, w: Weights, now: Now) -> tuple[Floats, Floats]:
    """(all at the loss, the loss itself); the last gathered weights are there twice in a forward
    that gathers. A later pass of GPipe has its loss behind it, but for the backward of parts."""
    s = now.layer.sizes
    flat = np.where(now.gathers, w.layer * c.act_bytes, 0.0)
    loss = stage.last * loss_bytes(c, s, w.head)
    # In parts the loss is largest in its backward, when the gathered copy is gone.
    in_parts = (c.loss_chunks > 1) & (c.lean_loss <= 0)
    forward = stage.last * logits_bytes(c, s) + flat
    most = np.where(in_parts, np.maximum(loss, forward), loss + flat)
    behind = (c.schedule == GPIPE) & now.later
    total = now.base + now.own + stage.last * s.whole + np.where(behind, loss, most) + now.kept
    return np.where(behind & ~(in_parts & (stage.last > 0)), 0.0, total), loss


def _gathering(c: Columns, w: Weights, now: Now) -> Floats:
    """A forward pass of zero3 as deep as there are layers to gather ahead: FSDP's flat copies of
    this layer and of those, and the shard that is sent."""
    depth = np.minimum(c.prefetch, w.ahead / np.maximum(w.layer * c.act_bytes, 1.0))
    flat = w.layer * c.act_bytes * (1.0 + depth + 1.0 / w.shards)
    total = now.base + now.own - depth * now.one + flat + now.kept
    return np.where((c.zero >= 3) & now.gathers, total, 0.0)
