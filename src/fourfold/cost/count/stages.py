"""Layers of each pipeline stage: the contiguous cut whose slowest stage is fastest. Cost unit: one
layer's forward and backward."""

from __future__ import annotations

import heapq
from functools import cache
from itertools import accumulate
from typing import Any

from fourfold.cost.count.params import layer_matmul_params
from fourfold.spec.model import ModelShape

# Reading and scattering one row per token against a layer's matrix products: a few percent.
EMBEDDING_COST = 0.05
# A whole number, or a column of them.
Whole = Any


def head_cost(model: ModelShape, seq_len: int) -> float:
    """Logits in units of one layer, by FLOPs: V d against a layer's weights and attention (s d)."""
    layer = layer_matmul_params(model) + model.attention_width * model.reach(seq_len)
    return model.vocab * model.hidden / layer


@cache
def split_layers(layers: int, stages: int, first: float, last: float) -> tuple[range, ...]:
    """Layers of each stage, in order, minimising the costliest stage; no layer is ever dropped.

    `first` and `last` are what embedding and head add to the end stages.
    """
    counts = _counts(layers, stages, first, last)
    assert sum(counts) == layers
    stops = list(accumulate(counts))
    return tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def _counts(layers: int, stages: int, first: float, last: float) -> list[int]:
    """Water filling: give each layer to the emptiest stage.

    With equal layers this is optimal: the maximum only rises when every stage would exceed it.
    Every stage keeps at least one layer where there are enough, so that no rank is idle.
    """
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    counts = [1] * stages if layers >= stages else [0] * stages
    # Ties go to inner stages, then to earlier ones: the ends hold embedding and logits already.
    heap = [(counts[s] + extra[s], s in (0, stages - 1), s) for s in range(stages)]
    heapq.heapify(heap)
    for _ in range(layers - sum(counts)):
        cost, is_end, stage = heap[0]
        counts[stage] += 1
        heapq.heapreplace(heap, (cost + 1, is_end, stage))
    return counts


def stage_layers(model: ModelShape, stages: int, seq_len: int) -> tuple[range, ...]:
    """The cut of a model into stages by cost, embedding and logits counted."""
    return split_layers(model.layers, stages, EMBEDDING_COST, round(head_cost(model, seq_len), 6))


def passing_unit(hidden: Whole, ffn: Whole) -> Whole:
    """Rows of the vocabulary that cost as much as a layer, as if no heads shared keys."""
    return 4 * hidden + 3 * ffn


def end_layers(layers: Whole, stages: Whole) -> tuple[Whole, Whole]:
    """(layers of the first, of the last stage) where all stages between hold the same, rounded up:
    what Megatron gets by counting embedding and loss as layers, or by uneven ends. Works on plain
    numbers and on columns; below 0 there is no such cut."""
    rest = layers - -(-layers // stages) * (stages - 2)
    return rest - rest // 2, rest // 2
