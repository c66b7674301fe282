"""Power of a GPU at work, and the clock that its limit leaves."""

from __future__ import annotations

from math import sqrt

from fourfold.spec.cluster import Device

IDLE_W = 100.0
BURST = 0.85  # share of the data-sheet peak a large GEMM reaches at the boost clock
# Joule per 16-bit FLOP. The first from an H200, which ran one GEMM at 814 TFLOP/s in a cool burst
# and at 672 sustained at 690 W (an A100 stays under its limit with it); the second from B200 runs
# near 1.7 PFLOP/s at 1 kW. A part with fp4 units is of the second kind.
JOULE_PER_FLOP = 1.09e-12
JOULE_PER_FLOP_FP4_ERA = 0.75e-12


def _joule_per_flop(device: Device) -> float:
    return JOULE_PER_FLOP if device.peak_flops_per_s.fp4 is None else JOULE_PER_FLOP_FP4_ERA


def clock_share(device: Device) -> float:
    """Sustained against boost clock under the device's own power limit. Power of a GEMM = idle +
    energy per FLOP x rate; near the top it grows with the square of the clock."""
    peaks = device.peak_flops_per_s
    rate = peaks.bf16 or peaks.fp16 or peaks.fp32
    if rate is None:
        return 1.0
    needed_w = IDLE_W + _joule_per_flop(device) * BURST * rate
    return min(1.0, sqrt(device.power_w / needed_w))


def mean_power_w(device: Device, flops_per_s: float) -> float:
    """Of a GPU with so many 16-bit FLOP/s on average, never above its limit; the GPU alone."""
    return min(device.power_w, IDLE_W + _joule_per_flop(device) * flops_per_s)
