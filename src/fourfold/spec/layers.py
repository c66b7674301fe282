"""The layers of a model in order, as runs of equal ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

# How a layer mixes tokens: attention to all tokens before, or to those of a window alone.
Mixer = Literal["full", "window"]
FeedForward = Literal["dense", "experts"]


class LayerKind(NamedTuple):
    """What a decoder layer is made of: a mixer of tokens and a feed-forward part."""

    mixer: Mixer
    feed_forward: FeedForward


class LayerRun(NamedTuple):
    """Neighbouring layers of one kind."""

    kind: LayerKind
    count: int


def runs_of(kinds: Iterable[LayerKind]) -> tuple[LayerRun, ...]:
    return tuple(LayerRun(kind, sum(1 for _ in layers)) for kind, layers in groupby(kinds))


def shortest_cycle(mixers: Sequence[Mixer]) -> tuple[Mixer, ...]:
    """Return the fewest first mixers whose repetition gives all of them, up to a cut last cycle
    (by the failure function of Knuth, Morris and Pratt)."""
    borders = [0] * len(mixers)
    for end in range(1, len(mixers)):
        border = borders[end - 1]
        while border and mixers[border] != mixers[end]:
            border = borders[border - 1]
        borders[end] = border + (mixers[border] == mixers[end])
    return tuple(mixers[: len(mixers) - borders[-1]]) if mixers else ()
