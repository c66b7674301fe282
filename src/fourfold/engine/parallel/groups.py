"""The process groups of a layout as this rank sees them, and collectives over them for autograd."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fourfold.engine import compat
from fourfold.engine.compat import functional
from fourfold.engine.parallel.host_group import handle_of
from fourfold.engine.parallel.shards import ExpertShard, ShardPlace
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Some ranks that communicate; `axis` says what for."""

    axis: str
    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        return self.handle.group_name


@dataclass(eq=False)
class World:
    """Groups of one rank. `dp_cp` holds all ranks that see different tokens (dp x cp), `fsdp` those
    of one replica among them (shard x cp), `replicas` the same shard in every replica."""

    layout: Layout
    device_type: str
    rank: int
    place: dict[str, int]
    tp: Group
    cp: Group
    pp: Group
    dp_cp: Group
    fsdp: Group
    replicas: Group
    embedding: Group | None
    all_ranks: Group
    this_rank: Group

    @classmethod
    def create(cls, layout: Layout, device_type: str) -> World:
        """All groups of this rank. Collective, with the same layout: every rank makes only its own
        groups, in one order of axes, so that making them can't deadlock."""
        assert dist.get_world_size() == layout.world, "the world must be as large as the layout"
        rank = dist.get_rank()
        table = _rank_table(layout)
        place = layout.coordinates(rank)
        pp, dp, cp, tp = (place[axis] for axis in AXES)
        replica, shard = divmod(dp, layout.shard)
        grid = table.view(layout.pp, layout.replicate, layout.shard, layout.cp, layout.tp)
        this_rank = make_group("this_rank", torch.tensor([rank]))
        members = {
            "tp": grid[pp, replica, shard, cp, :],
            "cp": grid[pp, replica, shard, :, tp],
            "pp": grid[:, replica, shard, cp, tp],
            "dp_cp": grid[pp, :, :, :, tp],
            "fsdp": grid[pp, replica, :, :, tp],
            "replicas": grid[pp, :, shard, cp, tp],
        }
        alone = this_rank.handle
        groups = {axis: make_group(axis, ranks, alone) for axis, ranks in members.items()}
        at_end = layout.pp > 1 and pp in (0, layout.pp - 1)
        # torch names a group by its ranks and by how many groups the process has: all ranks must
        # make as many, so stages in the middle make one of their own in its place.
        both = grid[[0, -1], replica, shard, cp, tp] if at_end else torch.tensor([rank])
        staged, pipe = layout.pp > 1, groups["pp"].ranks
        embedding = make_group("embedding", both, cut=pipe) if staged else this_rank
        whole = tuple(range(layout.world))
        assert dist.group.WORLD is not None
        all_ranks = Group(axis="world", ranks=whole, rank=rank, handle=dist.group.WORLD)
        return cls(
            layout=layout,
            device_type=device_type,
            rank=rank,
            place=place,
            embedding=embedding if at_end else None,
            all_ranks=all_ranks,
            this_rank=this_rank,
            **groups,
        )

    @property
    def stage(self) -> int:
        return self.place["pp"]

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        named = (self.tp, self.cp, self.pp, self.dp_cp, self.fsdp, self.replicas, self.embedding)
        return (*(group for group in named if group is not None), self.all_ranks)

    @cached_property
    def _kv(self) -> dict[int, Group]:
        return {}

    def kv_group(self, model: ModelShape) -> Group | None:
        """Tensor-parallel ranks that hold the same KV head; None where heads suffice."""
        if model.kv_heads >= self.layout.tp:
            return None
        sharing = self.layout.tp // model.kv_heads
        if sharing not in self._kv:
            first = self.tp.rank // sharing * sharing
            self._kv[sharing] = make_group("kv", self.tp.ranks[first : first + sharing])
        return self._kv[sharing]

    def shard_place(self, zero: int) -> ShardPlace:
        """How tensor and data parallelism cut this rank's parameters."""
        shards, shard = (self.fsdp.size, self.fsdp.rank) if zero >= 1 else (1, 0)
        edp, _, etp = self.layout.expert_place(self.rank)
        experts = ExpertShard(self.layout.etp, etp, *((self.layout.edp, edp) if zero else (1, 0)))
        return ShardPlace(self.layout.tp, self.tp.rank, shards, shard, experts)

    def mesh(self, zero: int, shards: Group, both: Group) -> DeviceMesh:
        """What FSDP works on; `both` are copies of this rank's shard and other shards together. Two
        dimensions are copies x shards; zero0 has shards of one rank."""
        layout = self.layout
        if zero and layout.replicate == 1:
            return DeviceMesh.from_group(shards.handle, self.device_type, mesh_dim_names=("shard",))
        copies, shards = (self.replicas, shards) if zero else (both, self.this_rank)

        def row(rank: int) -> int:
            return layout.coordinates(rank)["dp"] // layout.shard if zero else 0

        grid = torch.tensor(sorted(both.ranks, key=row), dtype=torch.int)
        return DeviceMesh.from_group(
            [copies.handle, shards.handle],
            self.device_type,
            mesh=grid.view(copies.size, shards.size),
            mesh_dim_names=("replicate", "shard"),
        )

    def warm(self, device: torch.device) -> None:
        """First use of a communicator builds it; do that before anything is timed."""
        for group in self.groups:
            dist.all_reduce(torch.zeros(1, device=device), group=group.handle)


@contextlib.contextmanager
def fake_world(layout: Layout, rank: int) -> Iterator[World]:
    """Rank `rank` of a layout of which no other rank exists: collectives answer at once."""
    store = compat.fake_store()
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=store)
    try:
        yield World.create(layout, "cpu")
    finally:
        dist.destroy_process_group()
        gc.collect()


def _rank_table(layout: Layout) -> torch.Tensor:
    """Global ranks as [pp, dp, cp, tp], whatever the placement order."""
    placed = torch.arange(layout.world).view([layout.size(axis) for axis in layout.order])
    axes = [layout.order.index(axis) for axis in AXES]
    return placed.permute(axes).contiguous()


def make_group(
    axis: str,
    ranks: torch.Tensor | Sequence[int],
    this_rank: dist.ProcessGroup | None = None,
    cut: tuple[int, ...] | None = None,
) -> Group:
    """torch orders the ranks of a group by number, so we do; groups of one share a handle. `cut`:
    see handle_of; None where the groups of an axis are of equal size."""
    # Numbers, not a tensor, where it may be one without values.
    numbers = ranks.flatten().tolist() if isinstance(ranks, Tensor) else ranks
    members = tuple(sorted(numbers))
    alone = len(members) == 1 and this_rank is not None
    handle = this_rank if alone else handle_of(axis, members, cut or members)
    assert handle is not None
    return Group(axis=axis, ranks=members, rank=members.index(dist.get_rank()), handle=handle)


def wait(tensor: Tensor) -> Tensor:
    """Functional collectives return before the transfer ends; this is where the result is used."""
    return functional.wait_tensor(tensor)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    return wait(functional.all_reduce(x.contiguous(), op, group.name))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Parts of all ranks, joined along `dim`."""
    joined = wait(functional.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    if dim == 0 or x.shape[:dim].numel() == 1:
        return joined.view(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(group.size), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which this rank keeps its part along `dim`."""
    each = x.shape[dim] // group.size
    shape = (*x.shape[:dim], each, *x.shape[dim + 1 :])
    if dim > 0 and x.shape[:dim].numel() > 1:
        x = torch.cat(x.chunk(group.size, dim=dim))
    flat = x.reshape(group.size * each, -1) if dim else x
    out = wait(functional.reduce_scatter_tensor(flat.contiguous(), "sum", group.size, group.name))
    return out.view(shape)


def start_exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows: `sent[r]` rows go to rank r. The result must be waited for."""
    return functional.all_to_all_single(x.contiguous(), received, sent, group.name)


class TwoWay(torch.autograd.Function):
    """`there` forwards; what comes `back` is made of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def shared(x: Tensor, group: Group) -> Tensor:
    """The same input on all ranks: gradients of their different uses add up (Megatron's f)."""
    return TwoWay.apply(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad, group))


def summed(x: Tensor, group: Group) -> Tensor:
    """Partial results add up; every rank's part sees the whole gradient (Megatron's g)."""
    return TwoWay.apply(x, lambda x: all_reduce(x, group), lambda grad: grad)


def summed_and_shared(x: Tensor, group: Group) -> Tensor:
    """Partial results add up, and every rank uses the sum for something else."""
    return TwoWay.apply(x, lambda x: all_reduce(x, group), lambda grad: all_reduce(grad, group))


def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Parts along `dim` -> the whole on all ranks; gradients of its uses add up, then part."""
    return TwoWay.apply(
        x, lambda x: all_gather(x, group, dim), lambda grad: reduce_scatter(grad, group, dim)
    )


def scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    """Partial results add up and part along `dim`."""
    return TwoWay.apply(
        x, lambda x: reduce_scatter(x, group, dim), lambda grad: all_gather(grad, group, dim)
    )
