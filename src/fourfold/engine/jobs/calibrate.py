"""The calibrate job: a hardware profile of this host. What is measured is fixed, how often is set
by the seconds given; sizes follow the device's speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fourfold.engine.microbench import device as probe
from fourfold.engine.microbench.cpu import cpu_rates
from fourfold.engine.microbench.device import collectives_of, gpu_rates
from fourfold.engine.parallel.groups import Group
from fourfold.engine.parallel.host_group import cpu_group
from fourfold.engine.process.health import Heartbeat
from fourfold.engine.process.task import Task, machine_facts
from fourfold.result import profile

# Shares of the given seconds; collectives and shared work take what is left.
_GEMM, _ATTENTION, _COPY, _LAUNCH, _SUSTAINED, _RANKS = 0.26, 0.16, 0.06, 0.04, 0.12, 0.36
_SQUARES = (256, 512, 1024, 2048, 4096, 8192, 16384)
_SKINNY = ((16, 4096, 4096), (128, 4096, 4096), (4096, 128, 4096), (4096, 4096, 128))
# One side off by little from an aligned neighbour that is measured too.
_UNALIGNED = (
    (1024, 1000, 1024),
    (1024, 1001, 1024),
    (1024, 1024, 1000),
    (4096, 4104, 4096),
    (4096, 4095, 4096),
    (4096, 4096, 4104),
)
_ALWAYS = 512
_HEADS = {"cpu": 2, "cuda": 16}
_LENGTHS = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384)}
# A format that runs at less than this share of the first look is emulated.
_HOPELESS = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What this device gets: formats, and how large one call may be."""

    device: torch.device
    dtypes: tuple[str, ...]
    kernels: tuple[str, ...]
    work_dtype: str
    flops_per_s: float
    call_s: float
    copy_bytes: tuple[int, ...]
    quick: bool

    def allows(self, m: int, n: int, k: int) -> bool:
        return 2 * m * n * k <= self.flops_per_s * self.call_s


def perform(task: Task) -> None:
    device = task.device(task.job.option("device", "auto"))
    seconds = float(task.job.option("seconds", "60"))
    task.join(device)
    sleepers = cpu_group()
    began = time.perf_counter()
    alone: dict[str, Any] = {}
    if task.rank == 0:
        torch.set_num_threads(task.place.cores)
        plan = _plan(device, task.job.option("quick") == "true")
        alone = _alone(plan, seconds, task.heartbeat)
    dist.barrier(group=sleepers)
    shared, collectives = _together(task, device, seconds * _RANKS, sleepers)
    collectives += _between(task, device, seconds * _RANKS, sleepers)
    if task.rank == 0:
        facts = machine_facts(device, task.place.cores) | alone
        measured_s = time.perf_counter() - began
        points = {"shared": shared, "collectives": collectives}
        task.answer(profile.HardwareProfile(measured_s=measured_s, **points, **facts))
    dist.barrier(group=sleepers)
    task.leave()


def _together(
    task: Task, device: torch.device, seconds: float, sleepers: dist.ProcessGroup
) -> tuple[tuple[profile.SharedPoint, ...], tuple[profile.CollectivePoint, ...]]:
    """1, 2, 4, ... ranks at work at once; the others sleep until all are done."""
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= task.place.local_world]
    shared: list[profile.SharedPoint] = []
    collectives: list[profile.CollectivePoint] = []
    for n in sizes:
        ranks = tuple(range(n))
        group = _group_of(ranks, task.rank)
        if group is not None:
            torch.set_num_threads(max(1, task.place.cores // n))
            task.heartbeat.enter("one rank alone" if n == 1 else f"{n} ranks at once")
            slice_s = seconds / len(sizes)
            if device.type == "cpu":
                shared.append(cpu_rates(group, slice_s * 0.6, task.place.cores))
            else:
                shared.append(gpu_rates(device, group, slice_s * 0.2))
            if n > 1:
                collectives += collectives_of(device, group, slice_s * 0.4, task.place.cores)
            task.heartbeat.step_done()
        dist.barrier(group=sleepers)
    return tuple(shared), tuple(collectives)


def _between(
    task: Task, device: torch.device, seconds: float, sleepers: dist.ProcessGroup
) -> tuple[profile.CollectivePoint, ...]:
    """2, 4, ... and all hosts: every rank talks to its counterparts on the others, all at once, so
    that a rank's rate is its share of the network."""
    per_host = task.place.local_world
    hosts = task.place.world // per_host
    counts = sorted({n for n in (2, 4, 8, 16, 32, hosts) if 1 < n <= hosts})
    points: list[profile.CollectivePoint] = []
    for n in counts:
        mine: Group | None = None
        for first, local in itertools.product(range(0, hosts - n + 1, n), range(per_host)):
            ranks = tuple((first + i) * per_host + local for i in range(n))
            mine = _group_of(ranks, task.rank) or mine
        dist.barrier(group=sleepers)
        task.heartbeat.enter(f"{n} hosts")
        if mine is not None:
            points += collectives_of(device, mine, seconds / len(counts), task.place.cores, n)
        task.heartbeat.step_done()
        dist.barrier(group=sleepers)
    return tuple(points)


def _group_of(ranks: tuple[int, ...], rank: int) -> Group | None:
    """All ranks make all groups; None for those outside."""
    handle = dist.new_group(ranks=list(ranks))
    if rank not in ranks:
        return None
    assert isinstance(handle, dist.ProcessGroup)  # torch's type for ranks outside is another
    return Group(axis="", ranks=ranks, rank=ranks.index(rank), handle=handle)


def _plan(device: torch.device, quick: bool) -> Plan:
    """Formats by device, and the size of a call by a first look at its speed."""
    look = probe.gemm("fp32", (512, 512, 512), device, 0.2)
    assert look is not None, "every device multiplies in fp32"
    call_s = (0.01 if quick else 0.04) if device.type == "cuda" else (0.1 if quick else 0.4)
    dtypes: tuple[str, ...] = ("fp32", "bf16") if quick else ("fp32", "bf16", "fp64", "fp16")
    kernels: tuple[str, ...] = ("flash", "unfused")
    copy_bytes = (2**20, 2**27) if quick else (2**20, 2**24, 2**28)
    if device.type == "cuda":
        look = probe.gemm("bf16", (4096, 4096, 4096), device, 0.05) or look
        dtypes = ("bf16", "fp8") if quick else ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64")
        kernels = ("flash", "cudnn") if quick else ("flash", "cudnn", "efficient", "unfused")
        copy_bytes = (2**24, 2**30)
    return Plan(
        device=device,
        dtypes=dtypes,
        kernels=kernels,
        work_dtype="bf16" if device.type == "cuda" else "fp32",
        flops_per_s=look.flops_per_s,
        call_s=call_s,
        copy_bytes=copy_bytes,
        quick=quick,
    )


def _shapes(plan: Plan) -> Iterator[tuple[int, int, int]]:
    squares = [(n, n, n) for n in _SQUARES]
    for m, n, k in (*squares, *_SKINNY, *_UNALIGNED):
        small_on_gpu = plan.device.type == "cuda" and m * n * k < 2**28
        always = m == n == k and m <= _ALWAYS  # also when neighbours spoilt the first look
        if (plan.allows(m, n, k) or always) and not small_on_gpu:
            yield m, n, k


def _alone(plan: Plan, seconds: float, heartbeat: Heartbeat) -> dict[str, Any]:
    """Everything one rank can measure alone, as fields of HardwareProfile."""
    heartbeat.enter("sustained")  # first: a burst can only be seen while the device is cool
    side = max(side for side in _SQUARES if side == _SQUARES[0] or plan.allows(side, side, side))
    burst, sustained = probe.burst_and_sustained(
        plan.work_dtype, (side, side, side), plan.device, seconds * _SUSTAINED
    )
    heartbeat.step_done()
    gemms = _gemms(plan, seconds * _GEMM, heartbeat)
    attentions = _attentions(plan, seconds * _ATTENTION, heartbeat)
    copies = []
    for count_bytes in plan.copy_bytes:
        heartbeat.enter("copy")
        copies.append(probe.copy(count_bytes, plan.device, seconds * _COPY / len(plan.copy_bytes)))
        heartbeat.step_done()
    heartbeat.enter("launch")
    return {
        "gemms": tuple(gemms),
        "attentions": tuple(attentions),
        "copies": tuple(copies),
        "launch_s": probe.launch_s(plan.device, seconds * _LAUNCH / 2),
        "layer_launch_s": probe.layer_launch_s(plan.device, seconds * _LAUNCH / 2),
        "burst_flops_per_s": burst,
        "sustained_flops_per_s": sustained,
        "sustained_over_s": seconds * _SUSTAINED,
        "sustained_dtype": plan.work_dtype,
    }


def _gemms(plan: Plan, seconds: float, heartbeat: Heartbeat) -> list[profile.GemmPoint]:
    shapes = list(_shapes(plan))
    points = []
    for dtype in plan.dtypes:
        for m, n, k in shapes:
            heartbeat.enter(f"gemm {dtype} {m}x{n}x{k}")
            slice_s = seconds / len(shapes) / len(plan.dtypes)
            point = probe.gemm(dtype, (m, n, k), plan.device, slice_s)
            if point is not None:
                points.append(point)
            heartbeat.step_done()
            # A GPU refuses formats it lacks; a CPU emulates them, a hundred times slower.
            floor = plan.flops_per_s * _HOPELESS if plan.device.type == "cpu" else 0.0
            if point is None or point.flops_per_s < floor:
                break  # no unit for this format here: not worth the grid
    return points


def _attentions(plan: Plan, seconds: float, heartbeat: Heartbeat) -> list[profile.AttentionPoint]:
    lengths = _LENGTHS[plan.device.type]
    lengths = lengths[1:3] if plan.quick else lengths
    heads = (64, 128) if plan.quick else (64, 96, 128)
    count = _HEADS[plan.device.type]
    wanted = []
    for kernel in plan.kernels:
        for head in heads:
            for length in lengths:
                flops = 14.0 * count * length * length * head
                if flops <= 2.0 * plan.flops_per_s * plan.call_s or length == lengths[0]:
                    wanted.append((kernel, (1, count, length, head)))
    points = []
    for kernel, sizes in wanted:
        heartbeat.enter(f"attention {kernel} {sizes[3]}x{sizes[2]}")
        point = probe.attention(kernel, sizes, plan.work_dtype, plan.device, seconds / len(wanted))
        if point is not None:
            points.append(point)
        heartbeat.step_done()
    return points
