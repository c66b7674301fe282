"""Seconds of a pipeline of unequal stages, layers of each stage, micro batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost import dispatch
from fourfold.cost.columns import BY_COST, Columns, Floats
from fourfold.cost.count.params import EMBEDDING_COST, end_layers, split_layers
from fourfold.cost.kinds import active_weights
from fourfold.spec.words import SCHEDULES

_ZERO_BUBBLE, _GPIPE = SCHEDULES.index("zero-bubble"), SCHEDULES.index("gpipe")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Layers of the first, of the fullest middle and of the last stage."""

    first: Floats
    middle: Floats
    last: Floats


def stage_layers(c: Columns) -> StageLayers:
    """Equal stages with the remainder in the first ones; fewer in the last one by what the head
    costs, counted in layers (balanced engines); or fewer at both ends (even stages); or as our
    engine cuts (balanced 2)."""
    even = np.ceil(c.layers / c.pp)
    short = _last_with_head(c, c.pp)
    rest = np.where(c.pp > 1, (c.layers - short) / np.maximum(1.0, c.pp - 1.0), c.layers)
    uneven = (c.balanced > 0) & (c.pp > 1)
    middle = np.where(uneven, np.ceil(rest), even)
    last = np.where(uneven, short, np.where(c.pp > 1, np.floor(c.layers / c.pp), even))
    left, right = end_layers(c.layers, c.pp, c.mtp)
    ends = (c.even_stages > 0) & (c.pp > 1) & (left >= 0)
    cut = StageLayers(np.where(ends, left, middle), middle, np.where(ends, right, last))
    ours = (c.balanced == BY_COST) & (c.pp > 1)
    if not np.any(ours):
        return cut
    own = map_unique((c.layers, c.pp, c.vpp, head_layers(c)), _of_ranks, (3,))
    pairs = zip(own, (cut.first, cut.middle, cut.last), strict=True)
    return StageLayers(*(np.where(ours, by_cost, other) for by_cost, other in pairs))


def head_layers(c: Columns) -> Floats:
    """What our engine takes the head for, in layers, when it cuts a model into stages."""
    return np.round(c.vocab * c.hidden / (active_weights(c) + c.core_width * c.reach), 6)


def map_unique(
    facts: Sequence[Floats], answer: Callable[..., Any], shape: tuple[int, ...]
) -> Floats:
    """`answer`, numbers of this shape, of each combination of facts, asked once for each that
    occurs. [*shape, runs]"""
    values: list[Floats] = []
    number = np.zeros((), dtype=np.intp)
    for fact in facts:
        different, back = np.unique(fact, return_inverse=True)
        values.append(different)
        number = number * len(different) + back.reshape(np.shape(fact))
    numbers, back = np.unique(number, return_inverse=True)
    places = np.unravel_index(numbers, [len(one) for one in values])
    asked = zip(*(v[at].tolist() for v, at in zip(values, places, strict=True)), strict=True)
    answers = np.array([answer(*one) for one in asked], dtype=np.float64).reshape(-1, *shape)
    axes = range(len(shape))
    return np.moveaxis(answers[back.reshape(number.shape)], [i - len(shape) for i in axes], axes)


def own_chunks(layers: float, chunks: float, head: float) -> tuple[range, ...]:
    """Layers of each chunk as our engine cuts them."""
    return split_layers(int(layers), int(chunks), EMBEDDING_COST, head)


def _of_chunks(layers: float, chunks: float, head: float) -> list[int]:
    return [len(chunk) for chunk in own_chunks(layers, chunks, head)]


def _of_ranks(layers: float, pp: float, vpp: float, head: float) -> tuple[int, int, int]:
    """Layers of the first rank, of the fullest between and of the last."""
    stages = int(pp)
    counts = _of_chunks(layers, pp * vpp, head)
    ranks = [sum(counts[rank::stages]) for rank in range(stages)]
    return ranks[0], max(ranks[1:-1], default=0), ranks[-1]


def chunk_layers(c: Columns, chunks: int) -> Floats:
    """[chunks, runs] layers of each chunk, by the same rules, of runs with as many chunks."""
    fair, place = c.layers / chunks, np.arange(chunks)[:, None]
    counts = np.floor(fair) + (place < c.layers - np.floor(fair) * chunks)
    short, others = _last_with_head(c, float(chunks)), max(1, chunks - 1)
    lean = np.floor((c.layers - short) / others) + (place < (c.layers - short) % others)
    lean[-1] = short
    counts = np.where(c.balanced > 0, lean, counts)
    if np.any(c.balanced == BY_COST):
        facts = (c.layers, np.array(float(chunks)), head_layers(c))
        own = map_unique(facts, _of_chunks, (chunks,))
        counts = np.where(c.balanced == BY_COST, own, counts)
    even = np.ceil(fair) + np.zeros((chunks, 1))
    even[0], even[-1] = end_layers(c.layers, float(chunks), c.mtp)
    return np.where((c.even_stages > 0) & (even.min(axis=0) >= 0), even, counts)


def _last_with_head(c: Columns, stages: Floats | float) -> Floats:
    """Layers that a balanced last stage keeps beside the head, which counts as some."""
    head = c.vocab * c.hidden / active_weights(c)
    return np.maximum(0.0, np.round((c.layers + head) / stages - head))


@dataclass(frozen=True, slots=True)
class InFlight:
    """Micro batches whose activations a rank holds at once, over all of its layers: on the first,
    the second and the last rank; `late` of the last wait for their weight gradients only."""

    first: Floats
    second: Floats
    last: Floats
    late: Floats


def in_flight(c: Columns, micros: Floats) -> InFlight:
    """The lists of cost/schedule.py in closed form: exact for whole rounds, where the last
    round is cut short a little more than is held."""
    two_way = has_own_schedule(c)
    split, looped = c.schedule == _ZERO_BUBBLE, (c.vpp > 1) & ~two_way
    # Under whose backward the next one's exchange hides: a forward of one part more.
    chunks = dispatch.fact(c.overlap, "chunks", dispatch.OVERLAPS)
    ahead = np.where(c.pp > 1, c.hides_exchange * chunks / np.where(looped, c.vpp, 1.0), 0.0)
    first = np.where(looped, ((c.vpp + 1.0) * c.pp - 1.0) / c.vpp, c.pp)
    # A rank begins two forwards of one of its parts later than the rank before it.
    second = np.where(split, first, np.where(looped, first - 2.0 / c.vpp, c.pp - 1.0))
    started = np.where(looped, ((c.vpp - 1.0) * c.pp + 1.0) / c.vpp, 1.0)
    last = np.where(split | two_way, c.pp, started)
    every = (c.schedule == _GPIPE) & (c.pp > 1)
    first, second, last = (
        np.where(every, micros, np.minimum(micros, some + ahead)) for some in (first, second, last)
    )
    return InFlight(first, second, last, np.where(split, np.maximum(0.0, last - started), 0.0))


def fill_share(c: Columns) -> Floats:
    """What a schedule leaves of the pipeline's filling: interleaved, it shrinks by the virtual
    stages; of zero-bubble H1 a third remains (Qi et al., arXiv 2401.10241)."""
    share = np.where(c.schedule == _ZERO_BUBBLE, 1.0 / 3.0, 1.0 / np.maximum(1.0, c.vpp))
    of_overlap = dispatch.fact(c.overlap, "fill", dispatch.OVERLAPS)
    return np.where(has_own_schedule(c), of_overlap, share)


def has_own_schedule(c: Columns) -> NDArray[np.bool_]:
    """Whether the kind of overlap brings an order of the pipeline that no list here has."""
    is_schedule = dispatch.fact(c.overlap, "is_schedule", dispatch.OVERLAPS) > 0
    return is_schedule & (c.hides_exchange > 0)


class StageTimes(NamedTuple):
    """Seconds of one micro batch in the first, the fullest middle and the last stage; in all."""

    first: Floats
    middle: Floats
    last: Floats
    total: Floats

    def slowest(self, c: Columns) -> Floats:
        inner = np.where(c.pp > 2, self.middle, 0.0)
        return np.where(c.pp > 1, np.maximum(np.maximum(self.first, self.last), inner), self.total)


def pipeline_s(c: Columns, stages: StageTimes, slots: Floats) -> Floats:
    """Seconds of `slots` micro batches, of which a smaller last one is a share: as many times the
    slowest stage, and one pass through the others (Narayanan et al., arXiv 2104.04473)."""
    slowest = stages.slowest(c)
    fill = np.maximum(0.0, stages.total - slowest)
    return np.where(c.pp > 1, slots * slowest + fill * fill_share(c), slots * stages.total)
