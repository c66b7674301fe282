"""Small loads with a known amount of work: matrix products, attention, copies, launches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fourfold.engine import compat
from fourfold.engine.microbench.rounds import Work, in_rounds
from fourfold.engine.model.layers import KERNELS
from fourfold.engine.observe.clock import lower_quartile, reading, seconds_of, synchronize
from fourfold.engine.parallel.groups import Group, World
from fourfold.result import profile
from fourfold.result.report import LinkRate

DTYPES = compat.DTYPES | {"tf32": torch.float32, "fp8": torch.float8_e4m3fn}


def product(dtype: str, shape: tuple[int, int, int], device: torch.device) -> Callable[[], Tensor]:
    """A ready matrix product. Random values: zeros draw less power and run faster on GPUs."""
    m, n, k = shape
    left = torch.randn(m, k, device=device).to(DTYPES[dtype])
    right = torch.randn(n, k, device=device).to(DTYPES[dtype]).t()
    if dtype == "fp8":
        scale = torch.ones((), device=device)
        return lambda: compat.scaled_mm(left, right, scale)
    return lambda: left @ right


def gemm(
    dtype: str, shape: tuple[int, int, int], device: torch.device, budget_s: float
) -> profile.GemmPoint | None:
    """None when the device has no such product (fp8 on older parts, half formats on some CPUs)."""
    m, n, k = shape
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        seconds = seconds_of(product(dtype, shape, device), device, budget_s)
    except (RuntimeError, NotImplementedError):
        return None
    return profile.GemmPoint(dtype=dtype, m=m, n=n, k=k, seconds=seconds)


def attention(
    kernel: str, sizes: tuple[int, int, int, int], dtype: str, device: torch.device, budget_s: float
) -> profile.AttentionPoint | None:
    """Sizes: batch, heads, tokens, head size. None when this kernel does not take them here."""
    batch, heads, tokens, head = sizes
    try:
        with sdpa_kernel(KERNELS[kernel]):
            forward, backward = attention_passes(sizes, device, DTYPES[dtype])
            forward_s = seconds_of(forward, device, budget_s / 3)
            backward_s = seconds_of(backward, device, budget_s * 2 / 3)
    except RuntimeError:
        return None
    return profile.AttentionPoint(
        kernel=kernel,
        dtype=dtype,
        batch=batch,
        heads=heads,
        head_size=head,
        seq_len=tokens,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def attention_passes(
    sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Work, Work]:
    made = {"device": device, "dtype": dtype, "requires_grad": True}
    q, k, v = (torch.randn(sizes, **made) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    return forward, lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def copying(count_bytes: int, device: torch.device) -> Work:
    source = torch.ones(count_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy(count_bytes: int, device: torch.device, budget_s: float) -> profile.CopyPoint:
    seconds = seconds_of(copying(count_bytes, device), device, budget_s)
    return profile.CopyPoint(moved_bytes=count_bytes, seconds=seconds)


def launch_s(device: torch.device, budget_s: float) -> float:
    """Host seconds of one small operator, the device never behind."""
    counter = torch.ones(1, device=device)
    return _host_seconds(lambda: counter.add_(1.0), device, budget_s)


def layer_launch_s(device: torch.device, budget_s: float) -> float:
    """Host seconds of one decoder layer too small to keep the device busy, both ways."""
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 32, dropout=0.0, batch_first=True, norm_first=True, device=device
    )
    tokens = torch.randn(1, 4, 16, device=device, requires_grad=True)
    return _host_seconds(lambda: layer(tokens).sum().backward(), device, budget_s)


def _host_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    work()
    synchronize(device)
    calls, spent = 0, 0.0
    while spent < budget_s and calls < 100_000:
        began = time.perf_counter()
        for _ in range(100):
            work()
        spent += time.perf_counter() - began
        calls += 100
        synchronize(device)
    return spent / calls


def burst_and_sustained(
    dtype: str, shape: tuple[int, int, int], device: torch.device, seconds: float
) -> tuple[float, float]:
    """FLOP/s of a long run of one product: at its best, and over its last third."""
    work = product(dtype, shape, device)
    work()
    synchronize(device)
    flops = 2.0 * shape[0] * shape[1] * shape[2]
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until or len(rates) < 6:
        calls = max(1, round(0.05 * rates[-1] / flops)) if rates else 1
        for _ in range(calls):
            work()
        synchronize(device)
        rates.append(calls * flops / (time.perf_counter() - now))
    last = rates[-(len(rates) // 3) :]
    return sorted(rates)[len(rates) * 9 // 10], sum(last) / len(last)


_OPS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p")


def gpu_rates(device: torch.device, group: Group, seconds: float) -> profile.SharedPoint:
    dtype, flops, moved = rates(device, 4096, 2**26, seconds, group.handle)
    return profile.SharedPoint(ranks=group.size, dtype=dtype, flops_per_s=flops, bytes_per_s=moved)


def rates(
    device: torch.device, side: int, count_bytes: int, seconds: float, group: Any = None
) -> tuple[str, float, float]:
    """Format and FLOP/s of a product, bytes/s of a copy, while all ranks of the group do both."""
    dtype = "bf16" if device.type == "cuda" else "fp32"
    dist.barrier(group=group)
    point = gemm(dtype, (side, side, side), device, seconds / 2)
    assert point is not None, "every device multiplies in this format"
    dist.barrier(group=group)
    return dtype, point.flops_per_s, copy(count_bytes, device, seconds / 2).bytes_per_s


def collectives_of(
    device: torch.device, group: Group, seconds: float, cores: int, hosts: int = 1
) -> list[profile.CollectivePoint]:
    sizes = (2**10, 2**16, 2**20, 2**24) if device.type == "cpu" else (2**10, 2**20, 2**24, 2**28)
    wanted = list(itertools.product(_OPS, sizes))
    works = (_collective(op, size, device, group) for op, size in wanted)
    if device.type == "cpu":
        took = in_rounds(list(works), group, seconds, cores).seconds
    else:
        budget_s = seconds / len(wanted)
        took = [_seconds_together(work, device, group, budget_s, 2000) for work in works]
    return [
        profile.CollectivePoint(
            op=op, ranks=group.size, payload_bytes=size, seconds=each, hosts=hosts
        )
        for (op, size), each in zip(wanted, took, strict=True)
    ]


def axis_rates(
    world: World, device: torch.device, seconds: float, host: str
) -> tuple[LinkRate, ...]:
    """What this rank's groups get, axis by axis, while all groups of the axis talk at once.
    Collective: every rank goes through the same axes in the same order."""
    hosts: list[str] = [""] * world.all_ranks.size
    dist.all_gather_object(hosts, host)
    # Copies of sharded data parallelism talk in a group of their own.
    axes = [("tp", world.tp), ("cp", world.cp), ("dp", world.fsdp), ("pp", world.pp)]
    axes.append(("dp copies", world.replicas))
    groups = [(axis, group) for axis, group in axes if group.size > 1]
    size, links = 2**22 if device.type == "cpu" else 2**26, []
    for axis, group in groups:
        op = "send" if axis == "pp" else "all-reduce"
        work = _collective(op, size, device, group)
        dist.barrier()
        took = _seconds_together(work, device, group, seconds / len(groups), most_calls=100)
        links.append(
            LinkRate(
                axis=axis,
                ranks=group.size,
                level="host" if len({hosts[rank] for rank in group.ranks}) == 1 else "network",
                op=op,
                payload_bytes=size,
                seconds=took,
            )
        )
    return tuple(links)


def _collective(op: str, size: int, device: torch.device, among: Group) -> Callable[[], object]:
    """A ready one of `size` bytes; `p2p` and `send` pass all of them around the ring."""
    group, ranks = among.handle, among.size
    whole = torch.ones(size // 4 // ranks * ranks, device=device)
    part = torch.ones(size // 4 // ranks, device=device)
    if op == "all-reduce":  # a sum, as in training: switches add some formats, and only add
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if op == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    received = torch.empty_like(whole)
    if op == "all-to-all":
        return lambda: dist.all_to_all_single(received, whole, group=group)
    ahead, behind = (among.ranks[(among.rank + step) % ranks] for step in (1, -1))

    def around() -> None:
        send = dist.P2POp(dist.isend, whole, ahead, group)
        take = dist.P2POp(dist.irecv, received, behind, group)
        for message in dist.batch_isend_irecv([send, take]):
            message.wait()

    return around


def _seconds_together(
    work: Callable[[], object], device: torch.device, group: Group, budget_s: float, most_calls: int
) -> float:
    """Seconds of a call. The group's first rank says how many calls all make: clocks differ."""
    work()
    once_s = reading(work, device, 2)
    wanted = max(3.0, min(float(most_calls), budget_s / max(once_s, 1e-7)))
    calls = torch.tensor([wanted], device=device)
    dist.broadcast(calls, group.ranks[0], group=group.handle)
    return lower_quartile([reading(work, device, 1) for _ in range(int(calls.item()))])
