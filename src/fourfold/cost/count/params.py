"""Parameters of the whole model and of each rank of a layout: every one once, by the name and
global shape that the engine also uses. A tied output layer is the embedding itself. And the layers
of each pipeline stage: the contiguous cut whose slowest stage is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from typing import Any, Literal

from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape

# How tensor parallelism cuts a tensor: by rows (dim 0), by columns (dim 1), by whole KV heads
# (dim 0, a head is kept on several ranks when there are fewer heads than ranks), or not at all:
# `heads` is one weight for all heads, of which each rank has only some to learn from.
Cut = Literal["rows", "columns", "kv", "whole", "heads"]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: `shape` is global, [out, in] for matrices."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "whole"

    @property
    def count(self) -> int:
        return prod(self.shape)


def layer_tensors(model: ModelShape) -> Iterator[Param]:
    """Parameters of one decoder layer; names are relative to the layer."""
    hidden, ffn = model.hidden, model.ffn
    width, kv_width = model.attention_width, model.kv_width
    qkv, out, mlp = (model.biased(part) for part in ("qkv", "out", "mlp"))
    yield from _norm(model, "attention_norm")
    yield from _linear("attention.q", width, hidden, "rows", bias=qkv)
    yield from _linear("attention.k", kv_width, hidden, "kv", bias=qkv)
    yield from _linear("attention.v", kv_width, hidden, "kv", bias=qkv)
    yield from _qk_norms(model)
    yield from _linear("attention.out", hidden, width, "columns", bias=out)
    if model.norms == "around":
        yield from _norm(model, "attention_post_norm")
    if model.block != "parallel-one-norm":
        yield from _norm(model, "mlp_norm")
    if model.gated:
        yield from _linear("mlp.gate", ffn, hidden, "rows", bias=mlp)
    yield from _linear("mlp.up", ffn, hidden, "rows", bias=mlp)
    yield from _linear("mlp.down", hidden, ffn, "columns", bias=mlp)
    if model.norms == "around":
        yield from _norm(model, "mlp_post_norm")


def embedding_tensors(model: ModelShape, seq_len: int) -> Iterator[Param]:
    """What the first stage holds besides its layers."""
    yield Param("embedding.weight", (model.vocab, model.hidden), "rows")
    if model.positions.kind == "learned":
        yield Param("positions.weight", (model.positions.length or seq_len, model.hidden))
    if model.embedding_norm:
        yield from _norm(model, "embedding_norm")


def head_tensors(model: ModelShape) -> Iterator[Param]:
    """What the last stage holds besides its layers; a tied head has no tensor of its own."""
    yield from _norm(model, "final_norm")
    if not model.tied:
        yield Param("head.weight", (model.vocab, model.hidden), "rows")
    if model.head_bias:
        yield Param("head.bias", (model.vocab,), "rows")


def tensors(model: ModelShape, seq_len: int) -> Iterator[Param]:
    """Every parameter of the model, once, under its global name."""
    return stage_tensors(model, seq_len, (range(model.layers),), 0)


def _norm(model: ModelShape, name: str) -> Iterator[Param]:
    if model.norm != "layernorm-noweight":
        yield Param(f"{name}.weight", (model.hidden,))
    if model.norm == "layernorm":
        yield Param(f"{name}.bias", (model.hidden,))


def _qk_norms(model: ModelShape) -> Iterator[Param]:
    if model.qk_norm == "none":
        return
    sides: tuple[tuple[str, int, Cut], ...] = (
        ("attention.q_norm", model.attention_width, "rows"),
        ("attention.k_norm", model.kv_width, "kv"),
    )
    for name, width, cut in sides:
        if model.qk_norm != "head":
            yield Param(f"{name}.weight", (width,), cut)
            continue
        yield Param(f"{name}.weight", (model.head_size,), "heads")
        if model.norm == "layernorm":
            yield Param(f"{name}.bias", (model.head_size,), "heads")


def _linear(name: str, outs: int, ins: int, cut: Cut, *, bias: bool) -> Iterator[Param]:
    yield Param(f"{name}.weight", (outs, ins), cut)
    if bias:
        # The bias of a column-cut matrix is added once, after the sum over ranks: it stays whole.
        yield Param(f"{name}.bias", (outs,), "whole" if cut == "columns" else cut)


@lru_cache(256)
def layer_params(model: ModelShape) -> int:
    return sum(tensor.count for tensor in layer_tensors(model))


def layer_matmul_params(model: ModelShape) -> int:
    """Weights of one layer that take part in a matrix product."""
    return sum(tensor.count for tensor in layer_tensors(model) if len(tensor.shape) == 2)


def model_params(model: ModelShape, seq_len: int) -> int:
    """All parameters; `seq_len` matters only where learned positions follow the run (MPT)."""
    ends = [*embedding_tensors(model, seq_len), *head_tensors(model)]
    return model.layers * layer_params(model) + sum(tensor.count for tensor in ends)


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """(start, stop) of one part when `size` is cut into equal ceilings, the last ones short.

    The rule of torch.chunk, FSDP2 and DTensor, so that planner and engine agree on odd sizes.
    """
    each = -(-size // parts)
    start = min(size, part * each)
    return start, min(size, start + each)


def tp_shape(model: ModelShape, tensor: Param, tp: int, rank: int) -> tuple[int, ...]:
    """The part of a tensor that tensor-parallel rank `rank` holds."""
    if tensor.cut in ("whole", "heads") or tp == 1:
        return tensor.shape
    if tensor.cut == "kv" and model.kv_heads < tp:
        return (model.head_size, *tensor.shape[1:])
    dim = 1 if tensor.cut == "columns" else 0
    start, stop = chunk(tensor.shape[dim], tp, rank)
    return (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :])


def stage_tensors(
    model: ModelShape, seq_len: int, stages: tuple[range, ...], stage: int
) -> Iterator[Param]:
    """Parameters a stage holds. A tied embedding is also held by the last stage."""
    if stage == 0:
        yield from embedding_tensors(model, seq_len)
    for layer in stages[stage]:
        for tensor in layer_tensors(model):
            yield Param(f"layers.{layer}.{tensor.name}", tensor.shape, tensor.cut)
    if stage == len(stages) - 1:
        yield from head_tensors(model)
        if model.tied and stage > 0:
            yield Param("embedding.weight", (model.vocab, model.hidden), "rows")


@dataclass(frozen=True, slots=True)
class RankParams:
    """`held` sit on the rank during compute, `owned` are its shard of the optimizer's update.

    `owned` adds up to the model's count over the ranks of one replica, but for what tensor
    parallelism keeps whole (norms, some biases, KV heads fewer than ranks). A tied copy is held,
    never owned.
    """

    held: int
    owned: int


def rank_params(
    model: ModelShape,
    layout: Layout,
    *,
    seq_len: int,
    stages: tuple[range, ...],
    rank: int,
    zero: int,
) -> RankParams:
    """Parameters of one rank; the optimizer is sharded over shard x cp (which share weights)."""
    place = layout.coordinates(rank)
    parts = layout.shard * layout.cp if zero >= 1 else 1
    part = (place["dp"] % layout.shard) * layout.cp + place["cp"] if zero >= 1 else 0
    held = owned = 0
    for tensor in stage_tensors(model, seq_len, stages, place["pp"]):
        shape = tp_shape(model, tensor, layout.tp, place["tp"])
        start, stop = chunk(shape[0], parts, part)
        held += prod(shape)
        tied_copy = place["pp"] > 0 and tensor.name == "embedding.weight"
        owned += 0 if tied_copy else (stop - start) * prod(shape[1:])
    return RankParams(held, owned)


# Costs of stages are in units of one layer's forward and backward. Reading and scattering one row
# per token is a few percent of a layer's matrix products.
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
    import heapq  # 'fourfold models' starts without it

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
