"""Parameters of the whole model and of each rank of a layout, every one once. And the layers of
each pipeline stage: the contiguous cut whose slowest stage is fastest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate
from math import prod
from typing import Any

from fourfold.cost.count.tensors import Param, embedding_tensors, head_tensors, layer_tensors
from fourfold.spec.layers import LayerKind
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape

# What a router keeps between steps besides its parameters.
LOAD = "load"


def tensors(model: ModelShape, seq_len: int) -> Iterator[Param]:
    """Every parameter of the model, once, under its global name; and what else training keeps of
    its layers: each expert's share of the last batch."""
    yield from stage_tensors(model, seq_len, (range(model.layers),), 0)
    for layer, kind in enumerate(model.layer_kinds()):
        if kind.feed_forward == "experts":
            yield Param(f"layers.{layer}.mlp.router.{LOAD}", (model.experts,))


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Parameters of one decoder layer: all, those that one token meets, and of these the weights of
    matrix products, routers left out as all published conventions do."""

    all: int
    active: int
    matmul: int


@lru_cache(256)
def layer_params(model: ModelShape, kind: LayerKind | None = None) -> LayerParams:
    """Count the parameters of one layer of this kind (None: of the last layer's)."""
    every = active = matmul = 0
    for tensor in layer_tensors(model, kind or model.layer_runs[-1].kind, experts=1):
        # Experts are alike, and a token meets `top_k` of them.
        is_routed = tensor.expert is not None
        met = tensor.count * (model.top_k if is_routed else 1)
        every += tensor.count * (model.experts if is_routed else 1)
        active += met
        is_router = tensor.name.startswith("mlp.router")
        matmul += met if len(tensor.shape) == 2 and not is_router else 0
    return LayerParams(every, active, matmul)


def matmul_params(model: ModelShape) -> int:
    """Count the weights of matrix products that a token meets in all layers, routers left out."""
    return sum(count * layer_params(model, kind).matmul for kind, count in model.layer_runs)


def attended_tokens(model: ModelShape, seq_len: int) -> float:
    """Tokens that each token attends to, summed over layers, the causal mask not counted."""
    return sum(count * model.reach(kind.mixer, seq_len) for kind, count in model.layer_runs)


def model_params(model: ModelShape, seq_len: int) -> int:
    """All parameters; `seq_len` matters only where learned positions follow the run (MPT)."""
    ends = sum(t.count for t in (*embedding_tensors(model, seq_len), *head_tensors(model)))
    return ends + sum(count * layer_params(model, kind).all for kind, count in model.layer_runs)


@dataclass(frozen=True, slots=True)
class ActiveParams:
    """Parameters that one token meets: all, those but the input embedding's, and those but both
    embeddings'. All three are printed as "active"."""

    all: int
    without_embedding: int
    without_both: int


def active_params(model: ModelShape, seq_len: int) -> ActiveParams:
    layers = ((layer_params(model, kind), count) for kind, count in model.layer_runs)
    idle = sum(count * (params.all - params.active) for params, count in layers)
    every = model_params(model, seq_len) - idle
    table = model.vocab * model.hidden
    # A tied table is also the output layer, which a token meets.
    one = every if model.tied else every - table
    return ActiveParams(every, one, every - table * (2 - model.tied))


def mtp_params(model: ModelShape) -> int:
    """Own weights of layers that predict further tokens: a layer like the last one, a matrix that
    joins embedding and hidden state, and three norms."""
    each = layer_params(model).all + 2 * model.hidden**2 + 3 * model.hidden
    return (model.mtp or 0) * each


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """(start, stop) of one part when `size` is cut into equal ceilings, the last ones short.

    The rule of torch.chunk, FSDP2 and DTensor, so that planner and engine agree on odd sizes.
    """
    each = -(-size // parts)
    start = min(size, part * each)
    return start, min(size, start + each)


def tp_shape(model: ModelShape, tensor: Param, tp: int, rank: int) -> tuple[int, ...]:
    """The part of a dense tensor that tensor-parallel rank `rank` holds."""
    if tensor.cut in ("whole", "heads") or tp == 1:
        return tensor.shape
    if tensor.cut == "kv" and model.kv_heads < tp:
        return (model.head_size, *tensor.shape[1:])
    dim = 1 if tensor.cut == "columns" else 0
    start, stop = chunk(tensor.shape[dim], tp, rank)
    return (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :])


def etp_shape(tensor: Param, etp: int, rank: int) -> tuple[int, ...]:
    """The part of an expert's tensor that rank `rank` of those that share the expert holds."""
    if etp == 1 or (len(tensor.shape) == 1 and tensor.cut == "whole"):
        return tensor.shape
    dim = 1 if tensor.cut == "expert-columns" else 0
    start, stop = chunk(tensor.shape[dim], etp, rank)
    return (*tensor.shape[:dim], stop - start, *tensor.shape[dim + 1 :])


def stage_tensors(
    model: ModelShape, seq_len: int, stages: tuple[range, ...], stage: int
) -> Iterator[Param]:
    """Parameters a stage holds. A tied embedding is also held by the last stage."""
    if stage == 0:
        yield from embedding_tensors(model, seq_len)
    kinds = model.layer_kinds()
    for layer in stages[stage]:
        for tensor in layer_tensors(model, kinds[layer]):
            yield replace(tensor, name=f"layers.{layer}.{tensor.name}")
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
    """Parameters of one rank; the optimizer is sharded over shard x cp (which share weights), that
    of experts over edp."""
    place, (edp, ep, etp) = layout.coordinates(rank), layout.expert_place(rank)
    dense = (layout.shard * layout.cp, place["dp"] % layout.shard * layout.cp + place["cp"])
    first, last = chunk(model.experts, layout.ep, ep)
    held = owned = 0
    for tensor in stage_tensors(model, seq_len, stages, place["pp"]):
        if tensor.expert is None:
            shape = tp_shape(model, tensor, layout.tp, place["tp"])
            parts, part = dense
        elif first <= tensor.expert < last:
            shape = etp_shape(tensor, layout.etp, etp)
            parts, part = layout.edp, edp
        else:
            continue
        start, stop = chunk(shape[0], parts, part) if zero >= 1 else (0, shape[0])
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
    """Logits in units of the mean layer, by FLOPs: V d against weights and attention (s d)."""
    layers = matmul_params(model) + model.attention_width * attended_tokens(model, seq_len)
    return model.vocab * model.hidden * model.layers / layers


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


def end_layers(layers: Whole, stages: Whole, further: Whole = 0) -> tuple[Whole, Whole]:
    """(layers of the first, of the last stage) where all stages between hold the same, rounded up:
    what Megatron gets by counting embedding and loss as layers, or by uneven ends. `further` of the
    layers predict further tokens, on the last stage. Works on plain numbers and on columns; where
    the first is below 0 there is no such cut."""
    rest = layers - -(-layers // stages) * (stages - 2)
    last = rest // 2
    last = last + (further - last) * (last < further)
    return rest - last, last
