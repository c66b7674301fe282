"""What a rank of our engine, and of others on torch's FSDP2, holds at its fullest moment. Around
what layers keep (walk.py) stand copies of weights and gradients, what other micro batches keep, and
the loss. The fullest of the moments that can be the fullest counts. Nothing here is fitted: a test
holds it to the dry run. Bytes of one rank; broadcasts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.memory.held import (
    GPIPE,
    Held,
    LayerBytes,
    backward_bytes,
    held,
    in_later,
    in_single_round,
    is_split,
    logits_bytes,
    loss_bytes,
    sums_bytes,
)
from fourfold.cost.memory.stage import Stage, Weights, stage_weights


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the fullest moment, by kind there."""

    total: Floats
    state: Floats
    weights: Floats
    activations: Floats
    loss: Floats


class _Pass(NamedTuple):
    """A backward pass: the first of a step, or one with gradients of earlier micro batches."""

    c: Columns
    stage: Stage
    w: Weights
    keeps: Held
    micros: Floats
    flight: Floats
    later: bool

    @property
    def layer(self) -> LayerBytes:
        return self.keeps.layer

    @property
    def reduces(self) -> NDArray[np.bool_]:
        """Gradients are reduced with this pass."""
        return (self.c.zero >= 2) | (self.micros < 2)

    @property
    def gathers(self) -> NDArray[np.bool_]:
        """The forward pass before it gathered weights: below zero3, and of GPipe's last layer, the
        first micro batch gathers for all."""
        c, gpipe = self.c, self.c.schedule == GPIPE
        frees = (c.zero >= 3) & ((self.stage.layers > c.vpp) | ~gpipe)
        return (self.w.shards > 1) & (frees | ((self.flight <= 1) & (not self.later)))

    @property
    def first(self) -> Floats:
        """What the top layer keeps, whose backward pass comes first."""
        return np.where(self.stage.top_again > 0, self.layer.between, self.layer.kept)

    @property
    def lowest(self) -> Floats:
        again = self.stage.low_again
        kept = np.where(again > 0, self.layer.between, self.layer.kept)
        return backward_bytes(self.c, self.layer, again) + kept

    @property
    def head(self) -> Floats:
        """The gradient of the head's weights. In the sums' own format it is added to them at once,
        but for a tied weight's, which waits for its other use; a split pass makes it later."""
        c = self.c
        tied = (c.tied > 0) & (self.stage.first > 0) & (self.stage.last > 0)
        added = (c.acc_bytes == c.act_bytes) & self.later & (c.zero < 2) & ~tied
        return np.where(added | is_split(c), 0.0, self.w.head * c.act_bytes)

    @property
    def kept(self) -> Floats:
        """The buffer of the last reduction stays until the next one, in each virtual stage."""
        c, w = self.c, self.w
        parts = np.where(self.micros > c.pp, c.vpp - 1.0, 0.0)
        sent_last = np.where(w.root > 0, w.root, w.layer) + parts * w.layer
        kept = sent_last * c.acc_bytes + w.all * w.reduced
        return np.where((c.zero >= 2) & self.later, kept, 0.0)

    @property
    def sending(self) -> Floats:
        """Bytes of a weight while its gradient is reduced: it is copied into the buffer that is
        sent, then let go, and what comes back is new. A split pass makes it as wide as sums."""
        c, w = self.c, self.w
        made = np.where(is_split(c), c.acc_bytes, c.act_bytes)
        return np.maximum(made, np.maximum(w.back, w.divided)) + c.acc_bytes


def stage_peak(c: Columns, layer: LayerBytes, stage: Stage, micros: Floats) -> Peak:
    """Of the first backward pass, without gradients of earlier micro batches, or of a later one."""
    w = stage_weights(c, stage, micros)

    def in_pass(flight: Floats, later: bool) -> Peak:
        return _peak(
            _Pass(c, stage, w, held(c, layer, stage, flight, micros), micros, flight, later)
        )

    early = in_pass(np.maximum(stage.flight, 1.0), False)
    late = in_pass(in_later(c, stage, micros), True)
    use = (micros > 1) & (late.total > early.total)
    both = ((getattr(late, f.name), getattr(early, f.name)) for f in fields(Peak))
    return Peak(*(np.where(use, *pair) for pair in both))


def _peak(now: _Pass) -> Peak:
    c, stage, w, later = now.c, now.stage, now.w, now.later
    grads = sums_bytes(c, w) if later else np.zeros_like(w.all)
    in_loss, loss = _in_loss(now)
    fullest = np.maximum.reduce(np.broadcast_arrays(*_moments(now, in_loss, grads)))
    weights = w.later if later else w.unsharded
    if np.any(c.is_alone):
        loss_alone, alone = _alone(now, loss)
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


def _moments(now: _Pass, in_loss: Floats, grads: Floats) -> list[Floats]:
    """Bytes beside state, gradients and weights at each moment that can be the fullest."""
    c, stage, w, keeps = now.c, now.stage, now.w, now.keeps
    in_top = keeps.base + keeps.left + keeps.top + w.ahead + now.kept + now.head
    # In a single round of virtual stages the top one goes back before others have gradients.
    below = (1.0 - 1.0 / c.vpp) * stage.layers * w.layer + np.where(stage.last > 0, 0.0, w.root)
    single = in_single_round(c, now.micros)
    missing = np.where(single, grads * below / np.maximum(w.all, 1.0), 0.0)
    moments = [in_loss - missing, in_top - missing, _split(now), _gathering(now)]
    reduces = now.reduces & ~is_split(c)
    moments += [np.where(reduces, moment, 0.0) for moment in _reductions(now)]
    if now.later:
        moments += [np.where(c.zero < 2, moment, 0.0) for moment in _final(now, missing)]
    return moments


def _in_loss(now: _Pass) -> tuple[Floats, Floats]:
    """(all at the loss, the loss itself); the last gathered weights are there twice in a forward
    that gathers. A later pass of GPipe has its loss behind it, but for the backward of parts."""
    c, stage, w, keeps = now.c, now.stage, now.w, now.keeps
    flat = np.where(now.gathers, w.layer * c.act_bytes, 0.0)
    loss = stage.last * loss_bytes(c, w.head)
    # In parts the loss is largest in its backward, when the gathered copy is gone.
    in_parts = (c.loss_chunks > 1) & (c.lean_loss <= 0)
    forward = stage.last * logits_bytes(c) + flat
    most = np.where(in_parts, np.maximum(loss, forward), loss + flat)
    behind = (c.schedule == GPIPE) & now.later
    total = keeps.base + keeps.own + stage.last * now.layer.whole + now.kept
    total = total + np.where(behind, loss, most)
    return np.where(behind & ~(in_parts & (stage.last > 0)), 0.0, total), loss


def _gathering(now: _Pass) -> Floats:
    """A forward pass of zero3 as deep as there are layers to gather ahead: FSDP's flat copies of
    this layer and of those, and the shard that is sent."""
    c, w, keeps = now.c, now.w, now.keeps
    depth = np.minimum(c.prefetch, w.ahead / np.maximum(w.layer * c.act_bytes, 1.0))
    flat = w.layer * c.act_bytes * (1.0 + depth + 1.0 / w.shards)
    total = keeps.base + keeps.own - depth * keeps.one + flat + now.kept
    return np.where((c.zero >= 3) & now.gathers, total, 0.0)


def _reductions(now: _Pass) -> list[Floats]:
    """The layer below the top one, whose gradients are being sent; the last layer, gradients of all
    others made; the ends' own gradients."""
    c, stage, w, keeps = now.c, now.stage, now.w, now.keeps
    a, g, n, later = c.act_bytes, c.acc_bytes, stage.layers, now.later
    third, only = c.zero >= 3, now.micros < 2
    # Copies of an earlier pass are there until their own layer's are made.
    old = np.where(later, w.all * w.reduced, 0.0)
    # With the step's last backward, weights are let go layer by layer whatever is sharded.
    let_go = np.where(only & ~third, a, 0.0)
    made = 0.0 if later else c.param_bytes / w.shards
    copies = np.where(w.reduced > 0, 0.0, w.added) if later else w.copies
    # A virtual stage that is through for good lets its copies go.
    held_on = np.where(only, np.ceil(n / c.vpp), n) * w.layer * copies
    ahead = np.minimum(w.ahead, np.maximum(np.ceil(n / c.vpp) - 2.0, 0.0) * w.layer * a)
    second = backward_bytes(c, now.layer, stage.next_again)
    below = keeps.base + keeps.left - now.first + now.head + old - now.layer.between + second
    below = below + w.layer * (g + made + copies - let_go) + ahead
    through = np.maximum(n - 1.0, 0.0) * w.layer
    last = keeps.base + now.layer.between + now.lowest + now.head + old
    last = last + np.where(n > c.vpp, w.layer * g, 0.0) + through * (made - let_go)
    last = last + np.maximum(held_on - w.layer * copies, 0.0)
    own_old = np.where(later, w.reduced, 0.0)
    ends = keeps.base + w.root * (now.sending - own_old) + n * w.layer * made + held_on + old
    ends = ends - np.where(third | only, w.later if later else w.unsharded, 0.0)
    return [np.where(n > c.vpp, below, 0.0), last, ends]


def _split(now: _Pass) -> Floats:
    """A split backward keeps inputs and gradients of all products until their weights' turn, and
    the embedding's gradient, which is no product. Weights' gradients need no weights."""
    c, stage, w, keeps = now.c, now.stage, now.w, now.keeps
    if not np.any(is_split(c)):
        return np.zeros(())
    late, n, a, third = now.layer.late, stage.layers / c.vpp, c.act_bytes, c.zero >= 3
    rest, embedding = np.maximum(n - 1.0, 0.0), w.root - w.head
    # As wide as sums by then, or added to them.
    waits = np.where((c.zero < 2) & now.later, 0.0, embedding * c.acc_bytes)
    gone = np.where(third, c.vpp * w.layer * a, np.where(now.micros < 2, w.layer * a, 0.0))
    made = late + w.layer * a - np.where(third, gone, 0.0)
    sent = np.where(now.reduces, w.layer * now.sending - gone, 0.0)
    bottom = np.maximum(keeps.late_loss + now.lowest + now.kept, late + embedding * a)
    in_layers = rest * late + np.maximum(np.maximum(made, sent) + waits, bottom)
    adding = np.where(c.loss_chunks > 1, 3.0, 1.0) * w.head * a
    in_head = n * late + keeps.late_loss + adding
    return np.where(is_split(c), keeps.base + np.maximum(in_layers, in_head), 0.0)


def _final(now: _Pass, missing: Floats) -> list[Floats]:
    """zero0 and zero1 in the last micro batch, when sums are sent: of the top layer beside its
    activations, of the ends when all layers are through, and in the lowest layer, the buffer of the
    one before still there."""
    c, stage, w, keeps = now.c, now.stage, now.w, now.keeps
    # The sums themselves are counted as gradients; once they are sent, whole weights go.
    sent = np.maximum(c.acc_bytes, np.maximum(w.back, w.divided)) - c.act_bytes
    freed = c.act_bytes + c.acc_bytes - c.param_bytes / w.shards - w.copies
    top = w.layer * sent + keeps.left - now.first + now.head - missing
    root = w.root * sent - stage.layers * w.layer * freed
    n = stage.layers / c.vpp
    lowest = now.layer.between + now.lowest + now.head + np.where(n > 1, w.layer * c.acc_bytes, 0.0)
    lowest = lowest - np.maximum(n - 1.0, 0.0) * w.layer * freed
    return [top, root, np.where(is_split(c), 0.0, lowest)]


def _alone(now: _Pass, loss: Floats) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """Of ranks where nobody else sees other tokens: bytes in the loss; weights as they compute,
    gradients so far, the fullest moment.

    Whole weights stay beside those that are updated. Gradients of the first micro batch stay as the
    backward pass made them; the second makes them as wide as sums are, the update as the weights.
    Under autocast weights' copies go as their gradients come, which are as wide as the weights.
    """
    c, stage, w, keeps, later = now.c, now.stage, now.w, now.keeps, now.later
    a, g, p = c.act_bytes, c.acc_bytes, c.param_bytes
    copied = np.where(p != a, a, 0.0)
    lent = np.where(c.autocast > 0, copied, 0.0)
    a = np.where(c.autocast > 0, p, a)
    second = later & (now.micros < 3)
    before = np.where(second, a, g) if later else np.zeros_like(a)
    # What a gradient adds when it comes, and what of it stays.
    coming = np.where(second & (a != g), a + g, a)
    stays = np.where(second, g - a, 0.0) if later else a
    # Compiled, the update reads gradients of a single micro batch as they are.
    single = np.where(c.our_kernels > 0, a, p)
    update = np.where(now.micros < 2, single, p if later else before + stays) - before - lent
    kept, stays_less = keeps.base + keeps.own, stays - lent
    in_loss = kept + stage.last * now.layer.whole + loss
    through = w.head + np.maximum(stage.layers - 1.0, 0.0) * w.layer
    moments = (
        in_loss,
        _split(now),
        kept + w.head * coming,
        keeps.base + keeps.left + keeps.top + w.head * stays_less,
        keeps.base + now.layer.between + now.lowest + through * stays_less,
        keeps.base + w.root * (coming - lent) + (w.all - w.root) * stays_less,
        w.all * update,
    )
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    return in_loss, (w.all * copied, w.all * before, fullest)
