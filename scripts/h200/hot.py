"""Timing of kernels on a GPU that is as hot and as limited in power as in training.

Calls follow each other without a pause; CUDA events around groups of them give seconds a call.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pynvml
import torch

Call = Callable[[], object]

WARM_S, WINDOW_S = 0.08, 0.16
GROUP_S = 2e-3  # of calls between two events, so that an event's own time doesn't count
LEAST_GROUPS = 3
L2_BYTES = 256 * 2**20  # more than the L2 of any GPU: inputs of all copies together


class Timing(NamedTuple):
    """Seconds of a call: median, and the tenths below and above; clock and power meanwhile."""

    seconds: float
    low_s: float
    high_s: float
    calls: int
    sm_mhz: int
    watts: float


class Gauge:
    """Clock and power of the first GPU, as its driver reports them."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def clock_mhz(self) -> int:
        return pynvml.nvmlDeviceGetClockInfo(self._gpu, pynvml.NVML_CLOCK_SM)

    def watts(self) -> float:
        return pynvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3

    def used_bytes(self, process: int) -> int:
        """Return what a process holds, 0 where the driver does not tell."""
        held = pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)
        return next((one.usedGpuMemory or 0 for one in held if one.pid == process), 0)


def heat(seconds: float) -> None:
    """Multiply matrices until the GPU has its clock of long runs."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def copies(bytes_of_one: int) -> int:
    """Return how many sets of inputs to take in turn, so that none is still in the L2."""
    return max(1, min(16, -(-L2_BYTES // max(1, bytes_of_one))))


def time_calls(calls: Iterable[Call], gauge: Gauge) -> Timing:
    """Time calls that are taken in turn, one after another for WINDOW_S."""
    turn = itertools.cycle(tuple(calls))
    one = _group_s(turn, 1)  # with what is made at the first call
    one = _group_s(turn, 1)
    size = max(1, min(2000, round(GROUP_S / max(one, 1e-7))))
    end = time.perf_counter() + WARM_S - one
    while time.perf_counter() < end:
        _group_s(turn, size)
    groups: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    end = time.perf_counter() + WINDOW_S
    clocks, powers = [], []
    while len(groups) < LEAST_GROUPS or time.perf_counter() < end:
        groups.append(_group(turn, size))
        if len(groups) % 8 == 4:
            groups[-4][1].synchronize()  # a few groups ahead of the GPU and no more
            clocks.append(gauge.clock_mhz())
            powers.append(gauge.watts())
    torch.cuda.synchronize()
    samples = sorted(start.elapsed_time(stop) * 1e-3 / size for start, stop in groups)
    last = len(samples) - 1
    return Timing(
        seconds=statistics.median(samples),
        low_s=samples[round(0.1 * last)],
        high_s=samples[round(0.9 * last)],
        calls=size * len(samples),
        sm_mhz=int(statistics.median(clocks or [gauge.clock_mhz()])),
        watts=statistics.median(powers or [gauge.watts()]),
    )


def _group(turn: Iterator[Call], size: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(size):
        next(turn)()
    stop.record()
    return start, stop


def _group_s(turn: Iterator[Call], size: int) -> float:
    start, stop = _group(turn, size)
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3 / size


def kernels_of(call: Call) -> list[str]:
    """Names of the CUDA kernels of one call, longest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.device_time)
    return list(dict.fromkeys(e.name for e in kernels))
