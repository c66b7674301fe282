"""What does a rank of our own engine hold at its fullest moment? The engine's tensors, one by one.

Around what layers keep (own_layer.py) stand FSDP's copies of weights and gradients, what other
micro batches keep, and the loss. The fullest of the moments that can be the fullest counts. Nothing
here is fitted: a test holds these formulas to the dry run. Engines that are torch's FSDP2 too are
counted alike. Bytes of one rank; broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.count.stages import EMBEDDING_COST, split_layers
from fourfold.cost.memory.own_alone import Moments, Params, alone, is_alone
from fourfold.cost.memory.own_layer import Layer, Sizes, layer, logits_bytes, loss_bytes, sizes
from fourfold.cost.step.pipeline import InFlight, in_flight
from fourfold.result.one_rank import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FIRST_COMMUNICATOR_BYTES,
    WORKSPACE_BYTES,
)
from fourfold.spec.words import SCHEDULES

_GPIPE, _ZERO_BUBBLE = SCHEDULES.index("gpipe"), SCHEDULES.index("zero-bubble")


def unseen_bytes(c: Columns) -> Floats:
    """Context, workspace and communicators of a GPU; the dry run names the same."""
    groups = (c.tp, c.cp, c.pp, c.dp * c.cp, c.shard, c.dp * c.cp / c.shard, c.gpus)
    count = sum((np.where(size > 1, 1.0, 0.0) for size in groups), np.zeros(len(c)))
    count = count + np.where((c.pp > 1) & (c.tied > 0), 1.0, 0.0)
    wires = FIRST_COMMUNICATOR_BYTES + (count - 1.0) * COMMUNICATOR_BYTES
    return CONTEXT_BYTES + WORKSPACE_BYTES + np.where(count > 0, wires, 0.0)


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's layers, how many of them are computed again, and whether its top one is."""

    layers: Floats
    again: Floats
    top_again: Floats


def _shares(c: Columns) -> tuple[_Share, _Share, _Share]:
    """Of the first, of the fullest other and of the last rank, as the engine cuts layers."""
    matmul = c.layer_weights
    head = np.round(c.vocab * c.hidden / (matmul + c.width * c.seq), 6)
    every = np.where(c.full_ckpt > 0, np.round(1.0 / np.maximum(c.full_ckpt, 1e-9)), 0.0)
    asked = np.stack([c.layers, c.pp, c.vpp, head, every])
    different, back = np.unique(asked, axis=1, return_inverse=True)
    counts = np.array([_on_ranks(*column) for column in different.T.tolist()]).reshape(-1, 3, 3)
    first, middle, last = (_Share(*one.T) for one in counts[back.reshape(-1)].swapaxes(0, 1))
    return first, middle, last


def _on_ranks(
    layers: float, pp: float, vpp: float, head: float, every: float
) -> list[tuple[int, int, int]]:
    """With virtual stages a rank's layers are not neighbours: each N-th may be all or none."""
    stages, loops = int(pp), int(vpp)
    cut = split_layers(int(layers), stages * loops, EMBEDDING_COST, head)
    shares = []
    for rank in range(stages):
        own = [i for loop in range(loops) for i in cut[loop * stages + rank]]
        again = [i for i in own if every and i % int(every) == 0]
        shares.append((len(own), len(again), int(bool(own) and own[-1] in again)))
    # Layers that are not computed again hold many times what the others keep.
    middle = max(shares[1:-1], key=lambda one: (one[0] - one[1], one[0]), default=(0, 0, 0))
    return [shares[0], middle, shares[-1]]


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank of one pipeline stage: its layers, its ends, micro batches in flight."""

    layers: Floats
    first: Floats  # 1: holds the embedding
    last: Floats  # 1: holds the head
    flight: Floats
    late: Floats  # of those in flight, how many wait for their weight gradients only
    again: Floats  # of its layers, how many are computed again
    top_again: Floats  # 1: the one whose backward comes first is


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the fullest moment, by kind there."""

    total: Floats
    state: Floats
    weights: Floats
    activations: Floats
    loss: Floats


def stages(c: Columns, micros: Floats) -> list[Stage]:
    """The ranks that can be the fullest: the first, the fullest between, the last."""
    first, middle, last = _shares(c)
    flight: InFlight = in_flight(c, micros)
    one, alone = np.ones_like(c.pp), (c.pp == 1).astype(float)
    # Under zero-bubble the second has as many as the first, one of which waits for its weights.
    split = c.schedule == _ZERO_BUBBLE
    inner = np.where(c.pp > 2, np.maximum(flight.last, flight.second), 0.0)
    none = np.zeros_like(c.pp)
    waiting = np.where(split, 1.0, 0.0)
    return [
        Stage(first.layers, one, alone, flight.first, none, first.again, first.top_again),
        Stage(middle.layers, none, none, inner, waiting, middle.again, middle.top_again),
        Stage(last.layers, alone, one, flight.last, flight.late, last.again, last.top_again),
    ]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What does not depend on the moment: weights of a layer, of both ends, of all; formats."""

    layer: Floats
    root: Floats
    head: Floats
    all: Floats
    shards: Floats
    state: Floats
    unsharded: Floats  # weights as they compute, whole: all of them, or those at hand
    ahead: Floats  # ... and gathered for the coming layers
    back: Floats  # bytes of a reduced gradient, each of its formats
    divided: Floats  # ... and of what it is divided from, where nothing is divided over ranks
    copies: Floats  # bytes of it that copies of a shard keep until the step ends
    reduced: Floats  # bytes of it that they keep from one micro batch to the next


def _parts(c: Columns, stage: Stage, micros: Floats) -> _Parts:
    one, n = c.layer_weights / c.tp, stage.layers
    embed = np.ceil(c.vocab / c.tp) * c.hidden
    head = stage.last * embed
    own_head = np.where((c.tied > 0) & (stage.first > 0), 0.0, head)
    rows = np.where(c.positions < 0, c.seq, c.positions)
    root = stage.first * (embed + rows * c.hidden) + own_head
    z = np.where(c.zero >= 1, c.shard, 1.0)
    a, g, p = c.act_bytes, c.acc_bytes, c.param_bytes
    whole = n * one + root
    # Without a depth of ours, FSDP2 gathers the next layer of the backward pass by itself.
    depth = np.minimum(np.maximum(c.prefetch, 1.0), np.maximum(np.ceil(n / c.vpp) - 1.0, 0.0))
    ahead = np.where(z > 1, depth * one * a, 0.0)
    third, copied = c.zero >= 3, c.dp * c.cp > z
    return _Parts(
        layer=one,
        root=root,
        head=head,
        all=whole,
        shards=z,
        state=whole / z * (p + c.moment_bytes),
        unsharded=np.where(third, (root + c.vpp * one) * a, whole * a),
        ahead=np.where(third, ahead, 0.0),
        back=(g + np.where(p != g, p, 0.0)) / z,
        divided=np.where(z > 1, 0.0, 2.0 * g),
        copies=np.where(copied & (p != g), g / z, 0.0),
        # In the weights' format the first of them is the gradient itself.
        reduced=np.where(copied & ((p != g) | (micros > 2)), g / z, 0.0),
    )


def stage_peak(c: Columns, stage: Stage, micros: Floats) -> Peak:
    """The fullest moment of a stage: of its first backward, without gradients of earlier micro
    batches, and of a later one."""
    early = _peak(c, stage, np.maximum(stage.flight, 1.0), micros, later=False)
    again = np.clip(micros - 1.0, 1.0, np.maximum(stage.flight, 1.0))
    late = _peak(c, stage, again, micros, later=True)
    use = (micros > 1) & (late.total > early.total)
    names = ("total", "state", "weights", "activations", "loss")
    return Peak(*(np.where(use, getattr(late, name), getattr(early, name)) for name in names))


@dataclass(frozen=True, slots=True)
class _Now:
    """A backward pass, the first (`later` False) or one with gradients of earlier micro batches."""

    later: bool
    reduces: NDArray[np.bool_]  # gradients are reduced with this pass
    gathers: NDArray[np.bool_]  # the forward before it gathered weights
    base: Floats  # what other micro batches keep, and messages between stages
    own: Floats  # what this one keeps when its forward is over
    one: Floats  # ... in the mean layer
    top: Floats  # what computing the top layer again adds
    working: Floats  # most that a layer's backward holds beside what it keeps
    head: Floats  # gradient of the head's weights
    kept: Floats  # buffers of reductions before
    late_loss: Floats
    sending: Floats  # bytes a weight while its gradient is reduced


def _now(c: Columns, stage: Stage, w: _Parts, flight: Floats, micros: Floats, later: bool) -> _Now:
    s, one, a, g = sizes(c), layer(c), c.act_bytes, c.acc_bytes
    each, top = _stored(c, s, one, stage)
    own = each + s.between
    late_loss = stage.last * (s.whole + s.logits * c.loss_chunks * a)
    late, gpipe = np.minimum(stage.late, flight - 1.0), c.schedule == _GPIPE
    # GPipe has the loss of every micro batch before the first goes back; others one at a time.
    losses = np.where(gpipe, flight - 1.0, late)
    lost = np.where(gpipe & (c.loss_chunks > 1), stage.last * s.whole, late_loss)
    base = (flight - 1.0 - late) * own + late * stage.layers * one.late + losses * lost
    # The buffer of the last reduction stays until the next one, in each virtual stage.
    frees = (c.zero >= 3) & ((stage.layers > c.vpp) | ~gpipe)
    parts = np.where(micros > c.pp, c.vpp - 1.0, 0.0)
    sent_last = (np.where(w.root > 0, w.root, w.layer) + parts * w.layer) * g
    return _Now(
        later=later,
        reduces=(c.zero >= 2) | (micros < 2),
        # Below zero3, and of GPipe's last layer, the first micro batch gathers for all.
        gathers=(w.shards > 1) & (frees | ((flight <= 1) & (not later))),
        base=base + np.where((c.pp > 1) & (micros * c.vpp > 1) & ~gpipe, 2.0 * s.between, 0.0),
        own=own,
        one=each / np.maximum(stage.layers, 1.0),
        top=top,
        working=np.where(top > 0, one.again, one.backward),
        # In the sums' own format a gradient is added to them at once; a split pass makes it later.
        head=np.where(((g == a) & later & (c.zero < 2)) | _is_split(c), 0.0, w.head * a),
        kept=np.where((c.zero >= 2) & later, sent_last + w.all * w.reduced, 0.0),
        late_loss=late_loss,
        # Gradients are copied into the buffer that is sent, then let go; what comes back is new.
        sending=np.maximum(a, np.maximum(w.back, w.divided)) + g,
    )


def _peak(c: Columns, stage: Stage, flight: Floats, micros: Floats, *, later: bool) -> Peak:
    """`later`: gradients of an earlier micro batch are there."""
    w = _parts(c, stage, micros)
    now = _now(c, stage, w, flight, micros, later)
    summed = np.where(c.zero < 2, w.all * c.acc_bytes, w.all / w.shards * c.param_bytes)
    grads = summed if later else np.zeros_like(summed)
    in_loss, loss = _in_loss(c, stage, w, now)
    computing = now.top + now.working + w.ahead + now.kept
    in_top = now.base + now.own + computing + now.head
    # In a single round the top virtual stage goes back before others have any gradients.
    single = (micros <= c.pp) & (c.vpp > 1)
    apart = stage.layers * (1.0 - 1.0 / c.vpp) * w.layer
    below = apart + np.where(stage.last > 0, 0.0, w.root)
    missing = np.where(single, grads * below / np.maximum(w.all, 1.0), 0.0)
    moments = [in_loss - missing, in_top - missing]
    moments += [
        _split(c, stage, w, now, micros),
        now.base + w.root * c.act_bytes,
        _gathering(c, w, now),
    ]
    reduces = now.reduces & ~_is_split(c)
    moments += [np.where(reduces, one, 0.0) for one in _reductions(c, stage, w, now, micros)]
    if later:
        rest = np.maximum(stage.layers / c.vpp - 1.0, 0.0) * layer(c).late
        let_go = _let_go(c, w, apart + w.head)
        top, split, root = _final(c, stage, w, late=rest)
        moments += [top + now.own - now.one + now.head - missing, split, root]
        lowest = (now.base + now.own) / c.vpp - let_go
        moments += [
            np.where(single, at, 0.0) for at in (lowest + computing, lowest - now.one + top)
        ]
    fullest = np.maximum.reduce(np.broadcast_arrays(*moments))
    at = now.base + now.own
    places = Moments(
        loss=at + stage.last * sizes(c).whole + loss,
        head=at,
        top=at + now.top + now.working,
        lowest=now.base + sizes(c).between + now.one + now.top + now.working,
        end=now.base,
        split=_split(c, stage, w, now, micros),
    )
    params = Params(w.all, w.root, w.head, np.maximum(stage.layers - 1.0, 0.0) * w.layer)
    held_so = (w.unsharded, grads, fullest)
    weights, grads, fullest = alone(c, params, micros, places, held_so, later=later)
    empty, in_it = stage.layers < 1, fullest <= np.where(is_alone(c), places.loss, in_loss)
    return Peak(
        total=np.where(empty, 0.0, w.state + grads + weights + fullest),
        state=np.where(empty, 0.0, w.state + grads),
        weights=np.where(empty, 0.0, weights),
        activations=np.where(empty, 0.0, fullest - np.where(in_it, loss, 0.0)),
        loss=np.where(empty | ~in_it, 0.0, loss),
    )


def _in_loss(c: Columns, stage: Stage, w: _Parts, now: _Now) -> tuple[Floats, Floats]:
    """(all at the loss, the loss itself); the last gathered weights are there twice in a forward
    that gathers. A later pass of GPipe has its loss behind it."""
    s = sizes(c)
    flat = np.where(now.gathers, w.layer * c.act_bytes, 0.0)
    loss = stage.last * loss_bytes(c, s, w.head)
    # In parts the loss is largest in its backward, when the gathered copy is gone.
    in_parts = (c.loss_chunks > 1) & (c.lean_loss <= 0)
    forward = stage.last * logits_bytes(c, s) + flat
    most = np.where(in_parts, np.maximum(loss, forward), loss + flat)
    total = now.base + now.own + stage.last * s.whole + most + now.kept
    return np.where((c.schedule == _GPIPE) & now.later, 0.0, total), loss


def _gathering(c: Columns, w: _Parts, now: _Now) -> Floats:
    """A forward pass of zero3 as deep as there are layers to gather ahead: FSDP's flat copies of
    this layer and of those, and the shard that is sent."""
    depth = np.minimum(c.prefetch, w.ahead / np.maximum(w.layer * c.act_bytes, 1.0))
    flat = w.layer * c.act_bytes * (1.0 + depth + 1.0 / w.shards)
    total = now.base + now.own - depth * now.one + flat + now.kept
    return np.where((c.zero >= 3) & now.gathers, total, 0.0)


def _is_split(c: Columns) -> NDArray[np.bool_]:
    return (c.schedule == _ZERO_BUBBLE) & (c.pp > 1)


def _reductions(c: Columns, stage: Stage, w: _Parts, now: _Now, micros: Floats) -> list[Floats]:
    """Sending the top layer's gradients; the layer below it, that buffer still there; the last
    layer, gradients of all others made; the ends' own gradients."""
    s, a, g, n = sizes(c), c.act_bytes, c.acc_bytes, stage.layers
    third, only = c.zero >= 3, micros < 2
    beyond = now.base + now.own - now.one + now.head
    # With the step's last backward, weights are let go layer by layer whatever is sharded.
    let_go = np.where(third | only, w.layer * a, 0.0)
    sent = beyond + 2.0 * s.between + w.layer * now.sending - let_go + w.ahead
    done = w.copies + (0.0 if now.later else c.param_bytes / w.shards)
    ahead = np.minimum(w.ahead, np.maximum(np.ceil(n / c.vpp) - 2.0, 0.0) * w.layer * a)
    below = beyond - s.between + now.top + now.working + w.layer * (g + done)
    below = below + ahead - np.where(third, 0.0, let_go)
    through = np.maximum(n - 1.0, 0.0) * w.layer
    last = now.base + s.between + now.one + now.top + now.working + now.head
    last = (
        last
        + np.where(n > c.vpp, w.layer * g, 0.0)
        + through * (done - np.where(only & ~third, a, 0.0))
    )
    ends = now.base + w.root * now.sending + n * w.layer * done
    ends = ends - np.where(third | only, w.unsharded, 0.0)
    return [sent, np.where(n > c.vpp, below, 0.0), last, ends]


def _split(c: Columns, stage: Stage, w: _Parts, now: _Now, micros: Floats) -> Floats:
    """A split backward keeps inputs and gradients of all products until their weights' turn, and
    the embedding's gradient, which is no product. Weights' gradients need no weights."""
    late, n, a = layer(c).late, stage.layers, c.act_bytes
    rest, embedding = np.maximum(n / c.vpp - 1.0, 0.0), (w.root - w.head) * a
    gone = np.where(c.zero >= 3, c.vpp * w.layer * a, np.where(micros < 2, w.layer * a, 0.0))
    made = late + w.layer * a - np.where(c.zero >= 3, gone, 0.0)
    sent = np.where(now.reduces, w.layer * now.sending - gone, 0.0)
    bottom = now.one + now.top + now.working + now.kept
    in_layers = rest * late + np.maximum(np.maximum(made, sent) + embedding, bottom)
    adding = np.where(c.loss_chunks > 1, 3.0, 1.0) * w.head * a
    in_head = n / c.vpp * late + now.late_loss + adding
    split = now.base + np.maximum(in_layers, in_head)
    return np.where(_is_split(c), split, 0.0)


def _let_go(c: Columns, w: _Parts, params: Floats) -> Floats:
    """Bytes fewer once sums of these are sent: whole weights go, shards of gradients stay."""
    shards = c.param_bytes / w.shards + w.copies
    return np.where(c.zero < 2, params * (c.act_bytes + c.acc_bytes - shards), 0.0)


def _final(c: Columns, stage: Stage, w: _Parts, *, late: Floats) -> list[Floats]:
    """zero0 and zero1 in the last micro batch, sums are sent: of a layer (beside activations), in
    a split backward, of the ends when all layers are through."""
    # The sums themselves are counted as gradients.
    sending = np.maximum(c.acc_bytes, np.maximum(w.back, w.divided))
    top = w.layer * (sending - c.act_bytes)
    split = np.where(_is_split(c), late + w.layer * sending, 0.0)
    root = w.root * (sending - c.act_bytes) - _let_go(c, w, stage.layers * w.layer)
    return [np.where(c.zero < 2, moment, 0.0) for moment in (top, split, root)]


def _stored(c: Columns, s: Sizes, one: Layer, stage: Stage) -> tuple[Floats, Floats]:
    """(bytes a micro batch keeps in the layers of a stage, what recomputing the top layer adds)."""
    each = stage.again * s.between + (stage.layers - stage.again) * one.kept
    return each, np.where(stage.top_again > 0, one.kept - s.between, 0.0)
