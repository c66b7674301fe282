"""Whole matrices of weights that ranks hold in parts: who holds what of each, and which rank
gathers it for an update that needs all of it.

An owner is chosen among the ranks that hold one copy of the matrix: all that divide a stage's
weights, or under zero0 those that tensor parallelism cuts them over. Owners work in rounds, each
with at least as many matrices as there are ranks, so that few wait and buffers stay small. Matrices
in blocks stay on their tensor ranks, each of which gathers its own block over its shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fourfold.cost.count.params import Param
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.groups import Group, World, make_group
from fourfold.engine.parallel.shards import (
    ExpertShard,
    HeldRows,
    Rect,
    ShardPlace,
    parts_of,
    tensors_of,
)
from fourfold.spec.layout import Layout
from fourfold.spec.muon import Muon, iteration_flops
from fourfold.spec.run import RunSpec


class HeldPart(NamedTuple):
    """A rectangle of a matrix on one rank, by its number in the group: `rows` of its shard of the
    parameter. `is_first`: no rank before holds the same."""

    rank: int
    rows: tuple[int, int]
    rect: Rect
    is_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A published matrix of `shape`, of which `box` comes together on `owner`: all of it, or the
    block of this tensor rank, cut by rows or by columns."""

    param: nn.Parameter
    tensor: Param
    box: Rect
    held: tuple[HeldPart, ...]
    owner: int
    cut: str = ""  # of a block: rows or columns

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, int]:
        outs, ins = self.tensor.shape
        return outs, ins

    def held_by(self, rank: int) -> HeldPart | None:
        return next((held for held in self.held if held.rank == rank), None)


Round = tuple[Matrix, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """The matrices of a rank by rounds, which all ranks of `group` make together. `blocks`: the
    tensor ranks that hold the other blocks of a matrix."""

    group: Group
    blocks: Group
    rounds: tuple[Round, ...]

    @property
    def params(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(matrix.param for some in self.rounds for matrix in some))


def matrices_of(chunks: Sequence[Decoder], spec: RunSpec, world: World, muon: Muon) -> Matrices:
    """Return what this rank has to do with. Collective at the first call for a world."""
    group = update_group(spec, world)
    peers = _Peers(spec, group)
    rounds: list[Round] = []
    waiting: list[Matrix] = []
    for chunk in chunks:
        place = peers.places[group.rank]
        for param, tensors in tensors_of(chunk, spec.model, spec.batch.seq_len, place):
            if not (param.requires_grad and muon.updates(tensors[0].name, tensors[0].shape)):
                continue
            in_blocks = muon.placement == "blocks" and spec.layout.tp > 1
            waiting += peers.matrices(param, tensors, in_blocks=in_blocks)
            if len(waiting) >= group.size:
                rounds.append(peers.with_owners(waiting))
                waiting = []
    rounds += [peers.with_owners(waiting)] if waiting else []
    return Matrices(group=group, blocks=world.tp, rounds=tuple(rounds))


class _Peers:
    """The ranks of the group: where each stands, and which hold the same copy as this one."""

    def __init__(self, spec: RunSpec, group: Group) -> None:
        self.spec, self.group = spec, group
        layout, zero = spec.layout, spec.policy.zero
        self.places = _places(layout, zero, group.ranks)
        coordinates = [layout.coordinates(rank) for rank in group.ranks]
        self.tp = [place["tp"] for place in coordinates]
        alike = [(place["dp"], place["cp"]) if zero == 0 else () for place in coordinates]
        self.dense = self._like_me(alike)
        experts = [layout.expert_place(rank)[:2] for rank in group.ranks]
        self.experts = self._like_me([place if zero == 0 else place[1:] for place in experts])

    def _like_me(self, facts: Sequence[tuple[int, ...]]) -> list[int]:
        return [rank for rank, fact in enumerate(facts) if fact == facts[self.group.rank]]

    def matrices(
        self, param: nn.Parameter, tensors: Sequence[Param], *, in_blocks: bool
    ) -> Iterator[Matrix]:
        """Yield those of one parameter, their owners not yet chosen."""
        is_expert = tensors[0].expert is not None
        ranks = self.experts if is_expert else self.dense
        parts = {rank: self._parts(tensors, rank) for rank in ranks}
        for tensor in tensors:
            outs, ins = tensor.shape
            box, cut, holders = Rect((0, outs), (0, ins)), "", ranks
            if in_blocks and (cut := exact_cut(tensor, self.spec.layout.tp)):
                holders = [rank for rank in ranks if self.tp[rank] == self._own_tp]
            some = [
                (rank, parts[rank][tensor.name]) for rank in holders if tensor.name in parts[rank]
            ]
            if cut:
                box = _around([part.rect for _, part in some])
            held: list[HeldPart] = []
            seen: set[Rect] = set()
            for rank, part in some:
                held.append(HeldPart(rank, part.rows, part.rect, part.rect not in seen))
                seen.add(part.rect)
            area = sum(_area(rect) for rect in seen)
            assert area == _area(box), f"{tensor.name}: {area} values held of {_area(box)}"
            yield Matrix(param, tensor, box, tuple(held), owner=-1, cut=cut)

    @property
    def _own_tp(self) -> int:
        return self.tp[self.group.rank]

    def _parts(self, tensors: Sequence[Param], rank: int) -> dict[str, HeldRows]:
        found = parts_of(tensors, self.spec.model, self.places[rank])
        return {part.tensor.name: part for part in found}

    def with_owners(self, some: Sequence[Matrix]) -> Round:
        """The costliest first, to whoever has least to do. All ranks that hold a matrix come to the
        same choice: they know the same matrices, but for other experts, which are alike."""
        loads = dict.fromkeys(self.dense, 0.0)
        of_experts = dict.fromkeys(reversed(self.experts), 0.0)
        tensor_ranks = len(set(self.tp))
        owners: dict[str, int] = {}
        for matrix in sorted(some, key=lambda one: -iteration_flops(*one.shape)):
            flops = iteration_flops(*matrix.shape)
            if matrix.tensor.expert is not None:
                owners[matrix.name] = _least(of_experts)
                of_experts[owners[matrix.name]] += flops
            elif not matrix.cut:
                owners[matrix.name] = _least(loads)
                loads[owners[matrix.name]] += flops
            else:
                # The same place in the order of shards on every tensor rank.
                rows = [[r for r in self.dense if self.tp[r] == tp] for tp in sorted({*self.tp})]
                columns = list(zip(*rows, strict=True))
                fullest = {at: max(loads[r] for r in ranks) for at, ranks in enumerate(columns)}
                chosen = columns[_least(fullest)]
                for rank in chosen:
                    loads[rank] += flops / tensor_ranks
                owners[matrix.name] = next(r for r in chosen if self.tp[r] == self._own_tp)
        return tuple(
            Matrix(one.param, one.tensor, one.box, one.held, owners[one.name], one.cut)
            for one in some
        )


def _least(loads: dict[int, float]) -> int:
    return min(loads, key=loads.__getitem__)


def exact_cut(tensor: Param, tp: int) -> str:
    """Rows or columns, where tensor ranks cut a matrix evenly along its longer side: then the small
    product of the iteration is a sum over their blocks, and the rest needs no other block."""
    outs, ins = tensor.shape
    if tensor.cut == "rows" and outs >= ins and outs % tp == 0:
        return "rows"
    return "columns" if tensor.cut == "columns" and ins >= outs and ins % tp == 0 else ""


def _area(rect: Rect) -> int:
    (top, bottom), (left, right) = rect.rows, rect.columns
    return (bottom - top) * (right - left)


def _around(rects: Sequence[Rect]) -> Rect:
    rows, columns = [rect.rows for rect in rects], [rect.columns for rect in rects]
    tops, bottoms = zip(*rows, strict=True)
    lefts, rights = zip(*columns, strict=True)
    return Rect((min(tops), max(bottoms)), (min(lefts), max(rights)))


def _places(layout: Layout, zero: int, ranks: Sequence[int]) -> list[ShardPlace]:
    """Where ranks of one stage and replica stand among those that cut its weights; as
    `World.shard_place` has it for the rank that asks."""
    coordinates = {rank: layout.coordinates(rank) for rank in ranks}
    shards: dict[int, int] = {}
    counts: dict[int, int] = {}
    for rank in sorted(ranks):
        tp = coordinates[rank]["tp"]
        shards[rank] = counts.get(tp, 0)
        counts[tp] = shards[rank] + 1
    total = layout.shard * layout.cp if zero else 1
    places = []
    for rank in ranks:
        edp, _, etp = layout.expert_place(rank)
        parts = (layout.edp, edp) if zero else (1, 0)
        experts = ExpertShard(layout.etp, etp, *parts)
        shard = shards[rank] if zero else 0
        places.append(ShardPlace(layout.tp, coordinates[rank]["tp"], total, shard, experts))
    return places


_made: weakref.WeakKeyDictionary[World, Group] = weakref.WeakKeyDictionary()


def update_group(spec: RunSpec, world: World) -> Group:
    """The ranks that exchange matrices: all of a stage and replica, or, where they hold whole
    copies apart, those that tensor parallelism cuts one over. Collective at the first call."""
    divides = spec.policy.zero > 0 or (spec.model.moe is not None and spec.layout.etp > 1)
    if world.fsdp.size == 1 or not divides:
        return world.tp
    if world.tp.size == 1:
        return world.fsdp
    if world not in _made:
        own = _stage(spec.layout, world.rank)
        ranks = [rank for rank in range(spec.layout.world) if _stage(spec.layout, rank) == own]
        _made[world] = make_group("update", ranks, world.this_rank.handle)
    return _made[world]


def _stage(layout: Layout, rank: int) -> tuple[int, int]:
    place = layout.coordinates(rank)
    return place["pp"], place["dp"] // layout.shard
