"""A rank of our own engine by its pipeline stage: layers, micro batches in flight, weights, and
the bytes that no tensor shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats, Sequences
from fourfold.cost.kinds import KINDS
from fourfold.cost.memory.unseen import unseen_bytes
from fourfold.cost.ops.muon import adams_weights
from fourfold.cost.step.pipeline import head_layers, in_flight, map_unique, own_chunks
from fourfold.cost.step.stage_kinds import end_shares, has_uneven_experts, routed_share
from fourfold.spec.words import SCHEDULES

_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")


def around_bytes(c: Columns, coef: Coefficients) -> tuple[Floats, Floats]:
    """(what no tensor shows, bytes reserved for each byte of a tensor)."""
    # Nothing of a GPU's is there on a CPU, whose calibrations have no base.
    base = np.where(np.asarray(coef["base_gib"]) > 0, unseen_bytes(c), 0.0)
    # Blocks that FSDP's own streams use are cached apart; without it there are none.
    return base, np.where(c.dp * c.cp > 1, c.reserved, 1.0)


def _shares(c: Columns) -> Floats:
    """Of the first, of the fullest other and of the last rank, as the engine cuts layers: how many,
    how many of them are computed again, and whether its top one is, the one below it, and its
    lowest one; and the share of its layers that have experts. [3, 6, runs]"""
    every = np.where(c.full_ckpt > 0, np.round(1.0 / np.maximum(c.full_ckpt, 1e-9)), 0.0)
    every = np.where(c.block_ckpt > 0, 0.0, every)
    facts = (c.layers, c.pp, c.vpp, head_layers(c), every, c.block_ckpt, c.sequence)
    return map_unique(facts, partial(_on_ranks, c.sequences), (3, 6))


def _on_ranks(
    sequences: Sequences,
    layers: float,
    pp: float,
    vpp: float,
    head: float,
    every: float,
    block: float,
    sequence: float,
) -> list[tuple[float, ...]]:
    """With virtual stages a rank's layers are not neighbours: each N-th may be all or none."""
    stages, loops = int(pp), int(vpp)
    cut = own_chunks(layers, pp * vpp, head)
    ranks = [[cut[loop * stages + rank] for loop in range(loops)] for rank in range(stages)]
    shares: list[tuple[int, ...]] = []
    for chunks in ranks:
        own = [i for chunk in chunks for i in chunk]
        first = {i for chunk in chunks for i in chunk[: int(block)]}
        again = [(bool(every) and i % int(every) == 0) or i in first for i in own] or [False]
        shares.append((len(own), sum(again), again[-1], again[-2:][0], again[0]))
    # Layers that are not computed again hold many times what the others keep.
    middle = max(shares[1:-1], key=lambda one: (one[0] - one[1], one[0]), default=(0, 0, 0, 0, 0))
    ends = end_shares(sequences[int(sequence)], ranks) if sequences else ({}, {}, {})
    three = (shares[0], middle, shares[-1])
    return [(*share, routed_share(kinds)) for share, kinds in zip(three, ends, strict=True)]


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
    next_again: Floats  # 1: ... and the one after that
    low_again: Floats  # 1: ... and the last one
    routed: Floats  # share of its layers that have experts


def stages(c: Columns, micros: Floats) -> list[Stage]:
    """The ranks that can be the fullest: the first, the fullest between, the last."""
    flight = in_flight(c, micros)
    one, none, alone = np.ones_like(c.pp), np.zeros_like(c.pp), (c.pp == 1).astype(float)
    # Under zero-bubble the second has as many as the first, one of which waits for its weights.
    waiting = np.where(c.schedule == _ZERO_BUBBLE, 1.0, 0.0)
    inner = np.where(c.pp > 2, np.maximum(flight.last, flight.second), 0.0)
    places = (
        (one, alone, flight.first, none),
        (none, none, inner, waiting),
        (alone, one, flight.last, flight.late),
    )
    shares = _shares(c)
    at = at_stages(c, shares[:, 5]) if has_uneven_experts(c) else c
    routed = of_stages(c, at, at.routed)
    return [
        Stage(layers, *place, *again, routed=share)
        for (layers, *again, _), place, share in zip(shares, places, routed, strict=True)
    ]


def at_stages(c: Columns, routed: Floats, axes: int = 1) -> Columns:
    """The runs as if all layers were as the mean of a stage's, on an axis of its own for the first,
    the fullest middle and the last stage, by the shares of these that have experts. [3, runs].
    `axes`: of the coefficients that these runs meet, before which the stages' axis comes."""
    some = (c.routed > 0) & (c.routed < 1) & (c.pp > 1)
    shares = np.where(some, routed, c.routed)
    inner = (1,) * (axes + 1 - shares.ndim)
    return replace(c, routed=shares.reshape(3, *inner, *shares.shape[1:]))


def of_stages(c: Columns, at: Columns, value: Floats) -> tuple[Floats, Floats, Floats]:
    """What the first, the fullest middle and the last stage have of a number that follows from
    `at_stages`, or from the runs themselves where no stage differs."""
    if at is c or np.ndim(value) < np.ndim(at.routed):
        return value, value, value
    return value[0], value[1], value[2]


@dataclass(frozen=True, slots=True)
class Weights:
    """What does not depend on the moment: weights of a layer, of both ends, of all; formats."""

    layer: Floats
    root: Floats
    head: Floats
    all: Floats
    shards: Floats
    state: Floats
    unsharded: Floats  # weights as they compute, whole: all of them, or those at hand
    later: Floats  # ... the same when every layer has gone back before
    ahead: Floats  # ... and gathered for the coming layers
    back: Floats  # bytes of a reduced gradient, each of its formats
    divided: Floats  # ... and of what it is divided from, where nothing is divided over ranks
    copies: Floats  # bytes of it that copies of a shard keep until the step ends
    added: Floats  # ... when there is a gradient to which it is added
    reduced: Floats  # bytes of it that they keep from one micro batch to the next


def embed_weights(c: Columns) -> Floats:
    return np.ceil(c.vocab / c.tp) * c.hidden


def stage_weights(c: Columns, stage: Stage, micros: Floats) -> Weights:
    own = c if stage.routed is c.routed else replace(c, routed=stage.routed)
    each, n = [kind.on_rank(own) for kind in KINDS.values()], stage.layers
    one = sum(each, np.zeros(()))
    embed = embed_weights(c)
    head = stage.last * embed
    own_head = np.where((c.tied > 0) & (stage.first > 0), 0.0, head)
    rows = np.where(c.positions < 0, c.seq, c.positions)
    root = stage.first * (embed + rows * c.hidden) + own_head
    z, a, g, p = c.shards, c.act_bytes, c.acc_bytes, c.param_bytes
    whole = n * one + root
    # Each kind is divided over ranks of its own.
    apart = sum(
        held * (1.0 / np.where(c.zero >= 1, kind.shards(c), 1.0) - 1.0 / z)
        for held, kind in zip(each, KINDS.values(), strict=True)
    )
    # Without a depth of ours, FSDP2 gathers the next layer of the backward pass by itself.
    depth = np.minimum(np.maximum(c.prefetch, 1.0), np.maximum(np.ceil(n / c.vpp) - 1.0, 0.0))
    ahead = np.where(z > 1, depth * one * a, 0.0)
    third, copied = c.zero >= 3, c.dp * c.cp > z
    # The top layer of each chunk stays whole from its forward to its backward, and from the lowest
    # one's backward FSDP gathers it again. The last stage goes back through a chunk of one layer
    # right after its forward.
    chunks = np.where((stage.last > 0) & (micros > c.pp) & (n <= c.vpp), 1.0, c.vpp)
    return Weights(
        layer=one,
        root=root,
        head=head,
        all=whole,
        shards=z,
        state=(whole / z + n * apart) * (p + c.moment_bytes)
        + (root + n * adams_weights(own)) / z * c.end_moment_bytes,
        unsharded=np.where(third, (root + c.vpp * one) * a, whole * a),
        later=np.where(third, (root + chunks * one) * a, whole * a),
        ahead=np.where(third, ahead, 0.0),
        back=(g + np.where(p != g, p, 0.0)) / z,
        divided=np.where(z > 1, 0.0, 2.0 * g),
        copies=np.where(copied & (p != g), g / z, 0.0),
        added=np.where(copied, g / z, 0.0),
        # In the weights' format the first of them is the gradient itself.
        reduced=np.where(copied & ((p != g) | (micros > 2)), g / z, 0.0),
    )
