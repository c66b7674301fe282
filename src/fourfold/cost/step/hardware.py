"""What does the cost model take from a device and a cluster? Facts by the names of Columns.

A known cluster says how its nodes are linked; for an unknown one the usual fabric of the device's
generation is assumed. Bytes/s are one way.
"""

from __future__ import annotations

from fourfold.cost.step.power import clock_share
from fourfold.spec.cluster import Cluster
from fourfold.spec.device import Device


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
