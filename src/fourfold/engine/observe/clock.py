"""How long does this take? Seconds of a call, on the device's own clock.

The lower quartile of the readings: neighbours on the machine only ever add to a reading, and the
very lowest one may be the clock's luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

# One reading spans at least this long, so that the clock's own cost and grain do not matter.
_READING_S = 0.002


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Lower quartile of as many readings as the budget allows, after a warm-up call.

    On a CPU a call that alone takes the whole budget is not repeated: its first time is its answer.
    A GPU's first call loads kernels and says nothing.
    """
    first_s = reading(work, device, 1)
    if first_s > budget_s and device.type == "cpu":
        return first_s
    until = time.perf_counter() + budget_s
    once_s = max(1e-9, reading(work, device, 1))
    calls = max(1, round(_READING_S / once_s))
    readings = [once_s] if calls == 1 else []
    while not readings or (time.perf_counter() < until and len(readings) < 1000):
        readings.append(reading(work, device, calls))
    return lower_quartile(readings)


def lower_quartile(readings: Sequence[float]) -> float:
    return sorted(readings)[len(readings) // 4]


def reading(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds per call over `calls` calls."""
    if device.type == "cuda":
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(calls):
            work()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / calls
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls
