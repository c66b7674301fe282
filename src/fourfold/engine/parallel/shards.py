"""The part of each published tensor on this rank: always a rectangle, however fused, cut and
sharded; and its initial values, f(seed, name, global index), the same under every layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fourfold.cost.count import params
from fourfold.engine.compat import local
from fourfold.engine.data import rng
from fourfold.spec.model import ModelShape

# Which tensor-parallel ranks hold the same values: none, all, those that share a KV head, or all of
# a weight that each rank uses for its own heads only.
# Experts lie across tensor ranks: who holds the same is a matter of their own place.
SharedBy = Literal["none", "tp", "kv", "heads", "experts"]


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of a published tensor; `columns` of a vector is (0, 1)."""

    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """`rows` are rows of the local shard of `param`, which hold `rect` of the tensor `name`."""

    name: str
    shape: tuple[int, ...]
    param: nn.Parameter
    rows: tuple[int, int]
    rect: Rect
    shared: SharedBy

    @property
    def values(self) -> Tensor:
        return local(self.param.detach())[self.rows[0] : self.rows[1]]

    @property
    def grad(self) -> Tensor | None:
        """A view: writing to it writes to the parameter's gradient."""
        if self.param.grad is None:
            return None
        return local(self.param.grad)[self.rows[0] : self.rows[1]]

    @property
    def count(self) -> int:
        (top, bottom), (left, right) = self.rect.rows, self.rect.columns
        return (bottom - top) * (right - left)


def tp_rect(model: ModelShape, tensor: params.Param, tp: int, rank: int) -> tuple[Rect, SharedBy]:
    """What tensor-parallel rank `rank` holds of a tensor, and who else holds the same."""
    height = tensor.shape[0]
    width = tensor.shape[1] if len(tensor.shape) > 1 else 1
    if tp == 1:
        return Rect((0, height), (0, width)), "none"
    if tensor.cut == "whole":
        return Rect((0, height), (0, width)), "tp"
    if tensor.cut == "heads":
        return Rect((0, height), (0, width)), "heads"
    if tensor.cut == "columns":
        return Rect((0, height), params.chunk(width, tp, rank)), "none"
    if tensor.cut == "kv" and model.kv_heads < tp:
        head = rank * model.kv_heads // tp
        rows = (head * model.head_size, (head + 1) * model.head_size)
        return Rect(rows, (0, width)), "kv"
    return Rect(params.chunk(height, tp, rank), (0, width)), "none"


class ExpertShard(NamedTuple):
    """Where a rank stands among those that hold slices, and then shards, of the same experts."""

    etp: int = 1
    etp_rank: int = 0
    shards: int = 1
    shard: int = 0


_ALL_EXPERTS = ExpertShard()


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a rank stands among those that cut a stage's tensors."""

    tp: int = 1
    tp_rank: int = 0
    shards: int = 1
    shard: int = 0
    experts: ExpertShard = _ALL_EXPERTS


def _rect(model: ModelShape, tensor: params.Param, place: ShardPlace) -> tuple[Rect, SharedBy]:
    if tensor.expert is None:
        return tp_rect(model, tensor, place.tp, place.tp_rank)
    (height, width), experts = tensor.shape, place.experts
    if tensor.cut == "expert-columns":
        return Rect((0, height), params.chunk(width, experts.etp, experts.etp_rank)), "experts"
    return Rect(params.chunk(height, experts.etp, experts.etp_rank), (0, width)), "experts"


def published(module: nn.Module) -> Iterator[tuple[nn.Parameter, list[tuple[str, int]]]]:
    """Each parameter with the published names it holds and their rows, in order."""
    for path, owner in module.named_modules():
        for leaf, param in owner.named_parameters(recurse=False):
            parts = getattr(owner, "parts", None)
            if parts is None:
                yield param, [(f"{path}.{leaf}", param.shape[0])]
            else:
                parent = path.rpartition(".")[0]
                yield param, [(f"{parent}.{part}.{leaf}", rows) for part, rows in parts]


class HeldRows(NamedTuple):
    """Rows of a parameter's local shard, and the rectangle of a published tensor in them."""

    tensor: params.Param
    rows: tuple[int, int]
    rect: Rect
    shared: SharedBy


def parts_of(
    tensors: Sequence[params.Param],
    model: ModelShape,
    place: ShardPlace,
    *,
    is_learned: bool = True,
) -> Iterator[HeldRows]:
    """Yield what a rank at `place` holds of a parameter of these tensors, one below the other."""
    parts, part = place.shards, place.shard
    if tensors[0].expert is not None:
        parts, part = place.experts.shards, place.experts.shard
    if not is_learned:  # a router's state, which FSDP leaves alone
        parts, part = 1, 0
    rects = [_rect(model, tensor, place) for tensor in tensors]
    first, last = params.chunk(sum(rect.rows[1] - rect.rows[0] for rect, _ in rects), parts, part)
    start = 0
    for tensor, (rect, shared) in zip(tensors, rects, strict=True):
        stop = start + rect.rows[1] - rect.rows[0]
        top, bottom = max(start, first), min(stop, last)
        if top < bottom:
            in_tensor = (rect.rows[0] + top - start, rect.rows[0] + bottom - start)
            yield HeldRows(
                tensor, (top - first, bottom - first), Rect(in_tensor, rect.columns), shared
            )
        start = stop


def tensors_of(
    module: nn.Module, model: ModelShape, seq_len: int, place: ShardPlace
) -> Iterator[tuple[nn.Parameter, list[params.Param]]]:
    """Yield each parameter of a stage with the published tensors it is made of."""
    known = {tensor.name: tensor for tensor in params.tensors(model, seq_len)}
    for param, names in published(module):
        for name, rows in names:
            top, bottom = _rect(model, known[name], place)[0].rows
            assert bottom - top == rows, f"{name}: cut and module disagree"
        yield param, [known[name] for name, _ in names]


def shards_of(module: nn.Module, model: ModelShape, seq_len: int, place: ShardPlace) -> list[Shard]:
    """Every piece of a stage on this rank, in the order of its parameters, but for empty ones."""
    return [
        Shard(part.tensor.name, part.tensor.shape, param, part.rows, part.rect, part.shared)
        for param, tensors in tensors_of(module, model, seq_len, place)
        for part in parts_of(tensors, model, place, is_learned=param.requires_grad)
    ]


# Elements made at once: bounds the int64 scratch to 32 MiB a tensor.
_CHUNK = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Standard deviations. `vector_std` spreads norm weights around 1 and biases around 0. Training
    wants 0 there; a proof of equality does not, since a fault in adding zeros is unseen. `idle`:
    no token chooses the last expert of a router with a bias."""

    std: float = 0.02
    vector_std: float = 0.0
    router_std: float = 0.02
    idle: bool = False


def std_of(name: str, layers: int, rule: InitRule) -> float:
    """GPT-2's rule: what writes to the residual stream is scaled by 1 / sqrt(2 x layers)."""
    if name.endswith("router.weight"):
        return rule.router_std
    if name.endswith(("attention.out.weight", ".down.weight")):
        return rule.std / (2.0 * layers) ** 0.5
    return rule.std


@torch.no_grad()
def initialize(shards: Iterable[Shard], *, seed: int, layers: int, rule: InitRule) -> None:
    for shard in shards:
        if len(shard.shape) == 1:
            base = 1.0 if shard.name.endswith("norm.weight") else 0.0
            if shard.name.endswith(f"router.{params.LOAD}"):
                base = 1.0 / shard.shape[0]
            _spread(shard, seed, rule.vector_std, base)
            if rule.idle and shard.name.endswith("router.choice_bias"):
                shard.values[-1] = -2.0  # scores are from 0 to 1
        else:
            _spread(shard, seed, std_of(shard.name, layers, rule), 0.0)


def _spread(shard: Shard, seed: int, std: float, base: float) -> None:
    values = shard.values
    if std == 0.0:
        values.fill_(base)
        return
    stream = rng.key(seed, "init", shard.name)
    (top, bottom), (left, right) = shard.rect.rows, shard.rect.columns
    rows_at_once = max(1, _CHUNK // max(1, right - left))
    for first in range(top, bottom, rows_at_once):
        last = min(bottom, first + rows_at_once)
        index = _indices(shard, first, last, values.device)
        made = rng.normal(stream, index, std) + base
        values[first - top : last - top].copy_(made.view_as(values[first - top : last - top]))


def _indices(shard: Shard, first: int, last: int, device: torch.device) -> Tensor:
    """Global flat indices of rows first..last of the piece's columns."""
    left, right = shard.rect.columns
    width = shard.shape[1] if len(shard.shape) > 1 else 1
    rows = torch.arange(first, last, dtype=torch.int64, device=device)
    columns = torch.arange(left, right, dtype=torch.int64, device=device)
    return rows[:, None] * width + columns
