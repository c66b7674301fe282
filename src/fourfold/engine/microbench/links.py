"""What do ranks get from each other, and leave to each other? By host, or by a layout's axes."""

from __future__ import annotations

import socket
from collections.abc import Callable
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
    sizes = (2**10, 2**16, 2**20, 2**24) if device.type == "cpu" else (2**10, 2**20, 2**24, 2**28)
    points = []
    for op in _OPS:
        for payload in sizes:
            work = _collective(op, payload, device, ranks, group)
            took = _seconds_together(work, device, group, seconds / len(sizes) / len(_OPS))
            points.append(CollectivePoint(op=op, ranks=ranks, payload_bytes=payload, seconds=took))
    return points


def axis_rates(world: World, device: torch.device, seconds: float) -> tuple[LinkRate, ...]:
    """What this rank's groups get, axis by axis, while all groups of the axis talk at once.

    Collective: every rank goes through the same axes in the same order.
    """
    rates = []
    hosts = _hosts(world)
    groups = [(axis, group) for axis, group in _axes(world) if group.size > 1]
    for axis, group in groups:
        op = "send" if axis == "pp" else "all-reduce"
        payload = 2**22 if device.type == "cpu" else 2**26
        work = _in_group(op, payload, device, group)
        dist.barrier()
        took = _seconds_in(work, device, group, seconds / len(groups))
        level: Level = "host" if len({hosts[rank] for rank in group.ranks}) == 1 else "network"
        rate = LinkRate(
            axis=axis, ranks=group.size, level=level, op=op, payload_bytes=payload, seconds=took
        )
        rates.append(rate)
    return tuple(rates)


def _axes(world: World) -> list[tuple[str, Group]]:
    """Copies of sharded data parallelism talk in a group of their own."""
    axes = [("tp", world.tp), ("cp", world.cp), ("dp", world.fsdp), ("pp", world.pp)]
    return [*axes, ("dp copies", world.replicas)]


def _hosts(world: World) -> list[str]:
    hosts: list[str] = [""] * world.all_ranks.size
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def _in_group(op: str, payload: int, device: torch.device, group: Group) -> Callable[[], object]:
    own = torch.ones(payload // 4, device=device)
    if op == "all-reduce":
        return lambda: dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group.handle)
    received = torch.empty_like(own)
    ahead = group.ranks[(group.rank + 1) % group.size]
    behind = group.ranks[(group.rank - 1) % group.size]

    def around() -> None:
        send = dist.P2POp(dist.isend, own, ahead, group.handle)
        take = dist.P2POp(dist.irecv, received, behind, group.handle)
        for part in dist.batch_isend_irecv([send, take]):
            part.wait()

    return around


def _seconds_in(
    work: Callable[[], object], device: torch.device, group: Group, budget_s: float
) -> float:
    """Seconds of a call. The group's first rank says how many calls its ranks make."""
    work()
    once_s = reading(work, device, 1)
    calls = torch.tensor([max(2.0, min(100.0, budget_s / max(once_s, 1e-6)))], device=device)
    dist.broadcast(calls, group.ranks[0], group=group.handle)
    return lower_quartile([reading(work, device, 1) for _ in range(int(calls.item()))])


def _collective(
    op: str, payload: int, device: torch.device, ranks: int, group: dist.ProcessGroup
) -> Callable[[], object]:
    whole = torch.ones(payload // 4 // ranks * ranks, device=device)
    part = torch.ones(payload // 4 // ranks, device=device)
    if op == "all-reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if op == "all-to-all":
        target = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(target, whole, group=group)
    rank = dist.get_rank()
    received = torch.empty_like(whole)
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks

    def around() -> None:
        send = dist.P2POp(dist.isend, whole, ahead, group)
        take = dist.P2POp(dist.irecv, received, behind, group)
        for work in dist.batch_isend_irecv([send, take]):
            work.wait()

    return around


def _seconds_together(
    work: Callable[[], object], device: torch.device, group: dist.ProcessGroup, budget_s: float
) -> float:
    """Seconds of a call. Rank 0 says how many calls all ranks make: their clocks would differ."""
    work()
    once_s = reading(work, device, 2)
    calls = torch.tensor([max(3.0, min(2000.0, budget_s / max(once_s, 1e-7)))], device=device)
    dist.broadcast(calls, 0, group=group)
    return lower_quartile([reading(work, device, 1) for _ in range(int(calls.item()))])
