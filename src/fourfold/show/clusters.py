"""How do GPUs and clusters read? Tables of all, or one in full."""

from __future__ import annotations

from fourfold.show.table import Grid, Part
from fourfold.spec import catalog
from fourfold.spec.cluster import PEAK_NAMES, Cluster, Device


def all_page() -> list[Part]:
    clusters = [catalog.cluster(name) for name in catalog.cluster_names()]
    rows = [
        [
            cluster.name,
            cluster.device.id,
            f"{cluster.gpus:,}",
            str(cluster.host_gpus),
            str(cluster.links[0].ranks),
            _rate(cluster.links[0].bytes_per_s),
            _rate(cluster.links[-1].bytes_per_s),
        ]
        for cluster in clusters
    ]
    headings = [
        "cluster", "GPU", "GPUs", "per host", "NVLink domain", "NVLink GB/s", "network GB/s/GPU",
    ]  # fmt: skip
    return [Grid(headings, rows), "", *gpus_page()]


def gpus_page() -> list[Part]:
    devices = [catalog.device(name) for name in catalog.device_names()]
    peaks = ("bf16", "fp8", "fp4")
    rows = [
        [
            device.id,
            *(_teraflops(device, name) for name in peaks),
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.memory_bytes_per_s / 1e9:,.0f}",
            _rate(device.peer_bytes_per_s) if device.links else "-",
            str(device.sms),
            f"{device.power_w:.0f}",
        ]
        for device in devices
    ]
    headings = [
        "GPU", *(f"{name} TFLOP/s" for name in peaks), "memory GiB", "memory GB/s", "NVLink GB/s",
        "SMs", "W",
    ]  # fmt: skip
    note = "peaks are dense; links are one way; GB = 1e9 bytes, GiB = 2^30 bytes"
    return [Grid(headings, rows), "", note]


def cluster_page(cluster: Cluster) -> list[Part]:
    rows = [
        [link.name, f"{link.ranks:,}", _rate(link.bytes_per_s), f"{link.latency_s * 1e6:.4g}"]
        for link in cluster.links
    ]
    table = Grid(["level", "GPUs", "GB/s/GPU one way", "latency us"], rows)
    price = cluster.price_per_gpu_hour
    conditions = [
        f"{cluster.name}: {cluster.gpus:,} x {cluster.device.id} in {cluster.hosts:,} "
        f"{'host' if cluster.hosts == 1 else 'hosts'} of {cluster.host_gpus}",
        *([f"{price:g} a GPU-hour"] if price is not None else []),
    ]
    return [table, "", "; ".join(conditions), *([cluster.source] if cluster.source else [])]


def gpu_page(device: Device) -> list[Part]:
    rows = [[f"{name} TFLOP/s, dense", _teraflops(device, name)] for name in PEAK_NAMES]
    rows += [
        ["memory GiB", f"{device.memory_bytes / 2**30:.2f}"],
        ["memory GB/s", f"{device.memory_bytes_per_s / 1e9:,.0f}"],
        ["links", str(device.links)],
        ["link GB/s, one way", _rate(device.link_bytes_per_s or 0.0)],
        ["SMs", str(device.sms)],
        ["W", f"{device.power_w:g}"],
    ]
    return [Grid([device.id, "value"], rows), "", f"{device.name}; {device.source}"]


def _teraflops(device: Device, name: str) -> str:
    value = getattr(device.peak_flops_per_s, name)
    return "-" if value is None else f"{value / 1e12:,.7g}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.6g}"
