"""How far does the power limit slow the clock in a long run? A share of the boost clock, 0..1.

An H200 ran one GEMM at 814 TFLOP/s in a cool burst and at 672 sustained at 690 W; the A100 holds
its clock at 400 W. Power of a GEMM = idle + energy per FLOP x rate, and near the top of the range
power grows with the square of the clock, so the sustained clock is the root of the ratio.
"""

from __future__ import annotations

from math import sqrt

from fourfold.spec.device import Device

IDLE_W = 100.0
BURST = 0.85  # share of the data-sheet peak a large GEMM reaches at the boost clock
# Joule per 16-bit FLOP. The first from the H200 figures above (the A100 stays under its limit with
# it); the second from B200 runs near 1.7 PFLOP/s at 1 kW. A part with fp4 units is of the second
# kind.
JOULE_PER_FLOP = 1.09e-12
JOULE_PER_FLOP_FP4_ERA = 0.75e-12


def clock_share(device: Device) -> float:
    """Sustained against boost clock under the device's own power limit."""
    peaks = device.peak_flops_per_s
    rate = peaks.bf16 or peaks.fp16 or peaks.fp32
    if rate is None:
        return 1.0
    joule = JOULE_PER_FLOP if peaks.fp4 is None else JOULE_PER_FLOP_FP4_ERA
    needed_w = IDLE_W + joule * BURST * rate
    return min(1.0, sqrt(device.power_w / needed_w))
