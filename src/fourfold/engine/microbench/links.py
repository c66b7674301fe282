"""What do ranks get from each other, and leave to each other? By host, or by a layout's axes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from fourfold.engine.microbench import device as probe
from fourfold.engine.observe.clock import lower_quartile, reading
from fourfold.engine.parallel.groups import Group, World
from fourfold.result.profile import CollectivePoint, SharedPoint
from fourfold.result.report import LinkRate

Level = Literal["host", "network"]

_OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p")


def shared_rates(
    device: torch.device, ranks: int, group: dist.ProcessGroup, seconds: float
) -> SharedPoint:
    """Product and copy while all ranks of the group do the same."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    side = 4096 if device.type == "cuda" else 512
    dist.barrier(group=group)
    point = probe.gemm(dtype, (side, side, side), device, seconds / 2)
    assert point is not None
    dist.barrier(group=group)
    copied = probe.copy(2**26, device, seconds / 2)
    return SharedPoint(
        ranks=ranks, dtype=dtype, flops_per_s=point.flops_per_s, bytes_per_s=copied.bytes_per_s
    )


def collectives_of(
    device: torch.device, ranks: int, group: dist.ProcessGroup, seconds: float
) -> list[CollectivePoint]:
    """Of the world's first `ranks`."""
    sizes = (2**10, 2**16, 2**20, 2**24) if device.type == "cpu" else (2**10, 2**20, 2**24, 2**28)
    budget_s = seconds / len(sizes) / len(_OPS)
    members, points = tuple(range(ranks)), []
    for op in _OPS:
        for payload in sizes:
            work = _collective(op, payload, device, members, group)
            took = _seconds_together(work, device, 0, group, budget_s, most_calls=2000)
            points.append(CollectivePoint(op=op, ranks=ranks, payload_bytes=payload, seconds=took))
    return points


def axis_rates(world: World, device: torch.device, seconds: float) -> tuple[LinkRate, ...]:
    """What this rank's groups get, axis by axis, while all groups of the axis talk at once.

    Collective: every rank goes through the same axes in the same order.
    """
    hosts: list[str] = [""] * world.all_ranks.size
    dist.all_gather_object(hosts, socket.gethostname())
    groups = [(axis, group) for axis, group in _axes(world) if group.size > 1]
    payload, rates = 2**22 if device.type == "cpu" else 2**26, []
    for axis, group in groups:
        op = "send" if axis == "pp" else "all-reduce"
        work = _collective(op, payload, device, group.ranks, group.handle)
        dist.barrier()
        took = _seconds_together(
            work, device, group.ranks[0], group.handle, seconds / len(groups), most_calls=100
        )
        level: Level = "host" if len({hosts[rank] for rank in group.ranks}) == 1 else "network"
        rates.append(
            LinkRate(
                axis=axis, ranks=group.size, level=level, op=op, payload_bytes=payload, seconds=took
            )
        )
    return tuple(rates)


def _axes(world: World) -> list[tuple[str, Group]]:
    """Copies of sharded data parallelism talk in a group of their own."""
    axes = [("tp", world.tp), ("cp", world.cp), ("dp", world.fsdp), ("pp", world.pp)]
    return [*axes, ("dp copies", world.replicas)]


def _collective(
    op: str,
    payload: int,
    device: torch.device,
    members: Sequence[int],
    group: dist.ProcessGroup,
) -> Callable[[], object]:
    """A ready one of these ranks; `p2p` and `send` pass the whole payload around the ring."""
    ranks = len(members)
    whole = torch.ones(payload // 4 // ranks * ranks, device=device)
    part = torch.ones(payload // 4 // ranks, device=device)
    if op == "all-reduce":  # a sum, as in training: switches add some formats, and only add
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    received = torch.empty_like(whole)
    if op == "all-to-all":
        return lambda: dist.all_to_all_single(received, whole, group=group)
    place = members.index(dist.get_rank())
    ahead, behind = members[(place + 1) % ranks], members[(place - 1) % ranks]

    def around() -> None:
        send = dist.P2POp(dist.isend, whole, ahead, group)
        take = dist.P2POp(dist.irecv, received, behind, group)
        for message in dist.batch_isend_irecv([send, take]):
            message.wait()

    return around


def _seconds_together(
    work: Callable[[], object],
    device: torch.device,
    first: int,
    group: dist.ProcessGroup,
    budget_s: float,
    *,
    most_calls: int,
) -> float:
    """Seconds of a call. The group's first rank says how many calls all make: clocks differ."""
    work()
    once_s = reading(work, device, 2)
    wanted = max(3.0, min(float(most_calls), budget_s / max(once_s, 1e-7)))
    calls = torch.tensor([wanted], device=device)
    dist.broadcast(calls, first, group=group)
    return lower_quartile([reading(work, device, 1) for _ in range(int(calls.item()))])
