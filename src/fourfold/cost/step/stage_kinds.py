"""Kinds of layers by pipeline stage, as shares of the stage's layers: with them the seconds and
bytes of a stage are those of the layers that it holds, and not of as many mean layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import get_args

import numpy as np

from fourfold.cost.columns import BY_COST, Columns, Floats
from fourfold.cost.step.pipeline import head_layers, map_unique, own_chunks, stage_layers
from fourfold.spec.layers import FeedForward, LayerKind, LayerRun, Mixer

Shares = dict[LayerKind, float]


def mixed_kinds(c: Columns) -> tuple[LayerKind, ...]:
    """Return the kinds of layers of these runs, or none where all layers of each run are alike:
    then the columns say what its layers are."""
    if not c.sequences:
        return ()
    used = [kinds_of(c.sequences[int(place)]) for place in np.unique(c.sequence)]
    if all(len(kinds) == 1 for kinds in used):
        return ()
    return tuple(sorted({kind for kinds in used for kind in kinds}))


@lru_cache(64)
def kinds_of(sequence: tuple[LayerRun, ...]) -> tuple[LayerKind, ...]:
    return tuple(sorted({run.kind for run in sequence}))


def layers_in(sequence: tuple[LayerRun, ...]) -> int:
    return sum(run.count for run in sequence)


def of_word(c: Columns, word: Mixer | FeedForward) -> Columns:
    """Return the runs as if all of their layers had this part."""
    if word in get_args(Mixer):
        return replace(c, local=np.full_like(c.local, float(word == "window")))
    return replace(c, routed=np.full_like(c.routed, float(word == "experts")))


def model_shares(c: Columns, kinds: Sequence[LayerKind]) -> Floats:
    """Return the share of each kind among the layers of a run's model. [kinds, runs]"""
    shares = [shares_of(sequence, [range(layers_in(sequence))]) for sequence in c.sequences]
    table = np.array([[of_model.get(kind, 0.0) for of_model in shares] for kind in kinds])
    return table[:, c.sequence.astype(np.intp)]


def stage_shares(c: Columns, kinds: Sequence[LayerKind]) -> Floats:
    """Return the share of each kind among the layers of the first stage, of the fullest between and
    of the last. [kinds, 3, runs]"""
    split = stage_layers(c)
    by_cost = (c.balanced == BY_COST) & (c.pp > 1)
    head = np.where(by_cost, head_layers(c), 0.0) if np.any(by_cost) else np.zeros(())
    place = c.sequence if len(c.sequences) > 1 else np.zeros(())

    def of_ranks(sequence: float, *cut: float) -> list[list[float]]:
        stages = _shares_of_stages(c.sequences[int(sequence)], *cut)
        return [[shares.get(kind, 0.0) for shares in stages] for kind in kinds]

    facts = (place, c.pp, c.vpp, split.first, split.last, head)
    shares = map_unique(facts, of_ranks, (len(kinds), 3))
    return shares + np.zeros_like(c.sequence)


def chunk_shares(c: Columns, kinds: Sequence[LayerKind], counts: Floats) -> Floats:
    """Return the same of neighbouring chunks with so many layers each, [chunks, runs]. [kinds,
    chunks, runs]"""
    stops = np.cumsum(counts, axis=0).astype(np.intp)
    shares = np.zeros((len(kinds), *counts.shape))
    for run, place in enumerate(c.sequence.astype(np.intp)):
        before = layers_before(c.sequences[place])
        for row, kind in zip(shares, kinds, strict=True):
            passed = np.asarray(before.get(kind, [0] * (layers_in(c.sequences[place]) + 1)))
            held = np.diff(passed[stops[:, run]], prepend=0)
            row[:, run] = held / np.maximum(counts[:, run], 1.0)
    return shares


def has_uneven_experts(c: Columns) -> bool:
    """Whether stages of any of these runs can differ in their share of layers with experts."""
    return bool(c.sequences) and bool(np.any((c.routed > 0) & (c.routed < 1) & (c.pp > 1)))


def routed_shares(c: Columns) -> Floats:
    """Return the share of layers with experts in the first, the fullest middle and the last stage.
    [3, runs]"""
    kinds = sorted({kind for sequence in c.sequences for kind in kinds_of(sequence)})
    routed = [kind.feed_forward == "experts" for kind in kinds]
    return stage_shares(c, kinds)[routed].sum(axis=0)


def routed_share(shares: Shares) -> float:
    """Return the share of layers with experts."""
    return sum(share for kind, share in shares.items() if kind.feed_forward == "experts")


@lru_cache(4096)
def _shares_of_stages(
    sequence: tuple[LayerRun, ...],
    pp: float,
    vpp: float,
    first: float,
    last: float,
    head: float,
) -> tuple[Shares, Shares, Shares]:
    """Stages between the ends are as even as they come, and so are the chunks of a stage; or, where
    an engine cuts by cost, as it does with a head that costs as much as so many layers."""
    stages, loops, layers = int(pp), int(vpp), layers_in(sequence)
    if head:
        chunks = own_chunks(layers, pp * vpp, head)
    else:
        inner = _evenly(int(layers - first - last), stages - 2)
        ranks = [int(first), *inner, int(last)] if stages > 1 else [layers]
        parts = [_evenly(layers_of_rank, loops) for layers_of_rank in ranks]
        stops = accumulate((part[loop] for loop in range(loops) for part in parts), initial=0)
        chunks = tuple(range(start, stop) for start, stop in pairwise(stops))
    return end_shares(sequence, [chunks[rank::stages] for rank in range(stages)])


def _evenly(layers: int, parts: int) -> list[int]:
    each, more = divmod(max(0, layers), max(1, parts))
    return [each + (part < more) for part in range(parts)]


def end_shares(
    sequence: tuple[LayerRun, ...], ranks: Sequence[Sequence[range]]
) -> tuple[Shares, Shares, Shares]:
    """Return the shares of the first, of the fullest middle and of the last rank, by the chunks of
    each; of several that are as full, of the one with most experts, then fewest windows. Where
    there is no rank between, those of the model stand for it."""
    shares = [shares_of(sequence, chunks) for chunks in ranks]

    def fullness(rank: int) -> tuple[float, float, float]:
        layers = sum(len(chunk) for chunk in ranks[rank])
        has = shares[rank]
        return layers, routed_share(has), -sum(has[kind] for kind in has if kind.mixer == "window")

    if len(ranks) > 2:
        middle = shares[max(range(1, len(ranks) - 1), key=fullness)]
    else:
        middle = shares_of(sequence, [range(layers_in(sequence))])
    return shares[0], middle, shares[-1]


def shares_of(sequence: tuple[LayerRun, ...], chunks: Sequence[range]) -> Shares:
    """Return the share of each kind among the layers of these chunks."""
    layers = max(1, sum(len(chunk) for chunk in chunks))
    return {
        kind: sum(before[chunk.stop] - before[chunk.start] for chunk in chunks) / layers
        for kind, before in layers_before(sequence).items()
    }


@lru_cache(64)
def layers_before(sequence: tuple[LayerRun, ...]) -> dict[LayerKind, list[int]]:
    """Return, of each kind, how many of its layers come before each layer, and how many in all."""
    every = [run.kind for run in sequence for _ in range(run.count)]
    kinds = kinds_of(sequence)
    return {kind: [0, *accumulate(int(layer == kind) for layer in every)] for kind in kinds}
