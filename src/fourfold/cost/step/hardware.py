"""What does the cost model take from a device and a cluster? Facts by the names of Columns.

Bytes/s are one way. The clock is what the power limit leaves in a long run: an H200 ran one GEMM at
814 TFLOP/s in a cool burst and at 672 sustained at 690 W; the A100 holds its clock at 400 W. Power
of a GEMM = idle + energy per FLOP x rate, and near the top of the range power grows with the square
of the clock, so the sustained clock is the root of the ratio.
"""

from __future__ import annotations

from math import sqrt

from fourfold.spec.cluster import Cluster, Device

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


def device_facts(device: Device, precision: str) -> dict[str, float]:
    """Peaks, clock, memory. A precision the device lacks runs at its 16-bit rate."""
    peaks = device.peak_flops_per_s
    half = peaks.bf16 or peaks.fp16 or peaks.fp32 or peaks.fp64 or 1.0
    asked = getattr(peaks, precision.split("-")[0], None)
    if precision == "fp4" and asked is None:
        asked = peaks.fp8
    peak = half
    if precision in ("fp32", "fp64"):
        peak = (peaks.tf32 if precision == "fp32" else asked) or peaks.fp32 or half
    return {
        "peak": peak,
        "peak_low": asked or peak,
        "clock": clock_share(device),
        "hbm": device.memory_bytes_per_s,
        "sms": float(device.sms),
        "capacity": float(device.memory_bytes),
    }


def fabric_facts(device: Device, cluster: Cluster | None, node: float) -> dict[str, float]:
    """Links of a node of `node` GPUs: of the cluster when known, else the usual ones."""
    if cluster is not None and len(cluster.links) > 1:
        inner, outer = cluster.links[0], cluster.links[-1]
        # A cluster file gives the rate per rank when all ranks of a host send.
        domain = float(inner.ranks) if inner.ranks > cluster.host_gpus else node
        return {
            "link": inner.bytes_per_s,
            "domain": domain,
            "node": node,
            "net": outer.bytes_per_s * cluster.host_gpus,
        }
    if cluster is not None:
        rate = cluster.links[0].bytes_per_s
        return {"link": rate, "domain": float(cluster.gpus), "node": node, "net": rate * node}
    domain = float(device.domain) if device.domain > 8 else node
    return {
        "link": device.usual_link_bytes_per_s,
        "domain": domain,
        "node": node,
        "net": device.network_bytes_per_s * node,
    }
