"""Pages of GPUs, clusters, engines and verdicts on them, and a measured machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fourfold.result.profile import HardwareProfile, hosts_of, link_of
from fourfold.spec import catalog
from fourfold.spec.cluster import PEAK_NAMES, Cluster, Device
from fourfold.text_table import Grid, Part, named, table
from fourfold.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from fourfold.conformance.verdicts import Verdict
    from fourfold.verbs.conformance import Conformance, Engines


# A quiet machine has half of this.
_UNSTEADY = 0.2
_MOST_NAMED = 2  # clusters of an engine, so that the table stays within 100 characters


def clusters_page(clusters: Sequence[Cluster], devices: Sequence[Device]) -> list[Part]:
    listed = table(
        clusters,
        *named("cluster=name", "GPU=device.id", "GPUs=gpus:,", "per host=host_gpus"),
        *named("NVLink domain=links.0.ranks", "NVLink GB/s=links.0.bytes_per_s:GB,.6g"),
        *named("network GB/s/GPU=links.-1.bytes_per_s:GB,.6g"),
    )
    return [listed, "", *gpus_page(devices)]


def gpus_page(devices: Sequence[Device]) -> list[Part]:
    listed = table(
        devices,
        *named("GPU=id"),
        *named(*(f"{n} TFLOP/s=peak_flops_per_s.{n}:T,.7g" for n in ("bf16", "fp8", "fp4"))),
        *named("memory GiB=memory_bytes:GiB.1f", "memory GB/s=memory_bytes_per_s:GB,.0f"),
        ("NVLink GB/s", lambda device: _rate(device.peer_bytes_per_s) if device.links else "-"),
        *named("SMs=sms", "W=power_w:.0f"),
    )
    note = "peaks are dense; links are one way; GB = 1e9 bytes, GiB = 2^30 bytes"
    return [listed, "", note]


def cluster_page(cluster: Cluster) -> list[Part]:
    levels = table(
        cluster.links,
        *named("level=name", "GPUs=ranks:,", "GB/s/GPU one way=bytes_per_s:GB,.6g"),
        *named("latency us=latency_s:us.4g"),
    )
    price = cluster.price_per_gpu_hour
    about = (
        f"{cluster.name}: {cluster.gpus:,} x {cluster.device.id} in "
        f"{counted(cluster.hosts, 'host')} of {cluster.host_gpus}"
    )
    about += f"; {price:g} a GPU-hour" if price is not None else ""
    return [levels, "", about, *([cluster.source] if cluster.source else [])]


_GPU = (
    *named(*(f"{name} TFLOP/s, dense=peak_flops_per_s.{name}:T,.7g" for name in PEAK_NAMES)),
    *named("memory GiB=memory_bytes:GiB.2f", "memory GB/s=memory_bytes_per_s:GB,.0f", "links"),
    ("link GB/s, one way", lambda device: _rate(device.link_bytes_per_s or 0.0)),
    *named("SMs=sms", "W=power_w:g"),
)


def gpu_page(device: Device) -> list[Part]:
    rows = [[heading, cell(device)] for heading, cell in _GPU]
    return [Grid([device.id, "value"], rows), "", f"{device.name}; {device.source}"]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.6g}"


def stacks_page(stacks: Sequence[dict[str, Any]]) -> list[Part]:
    """Names of clusters that --cluster does not take are marked."""
    described = set(catalog.cluster_names())
    marked = {name for one in stacks for name in one["measured"]} - described

    def measured(one: dict[str, Any]) -> str:
        runs = sorted(one["measured"].items(), key=lambda pair: -pair[1])
        named = [f"{name}{'*' * (name in marked)} ({count})" for name, count in runs[:_MOST_NAMED]]
        return ", ".join(named + [f"{len(runs) - _MOST_NAMED} more"] * (len(runs) > _MOST_NAMED))

    grid = table(
        stacks,
        *named("stack"),
        (
            "stands for",
            lambda one: "itself" if one["stands_for"] == one["stack"] else one["stands_for"],
        ),
        *named("limits of=rules"),
        ("with experts", lambda one: str(sum(one["with_experts"].values()) or "-")),
        ("measured on (runs)", lambda one: measured(one) or "-"),
    )
    note = "* not described here: 'fourfold clusters new' makes a file for --cluster"
    return [grid, "", note] if marked else [grid]


def profile_page(profile: HardwareProfile) -> list[Part]:
    about = (
        f"{profile.device_name} ({profile.units} units, {show_bytes(profile.memory_bytes)}), "
        f"host {profile.host}, torch {profile.torch}; measured in {profile.measured_s:.0f} s"
    )
    rows = _compute_rows(profile) + _link_rows(profile)
    return [Grid(["quantity", "value", "measured as"], rows), "", about, *_neighbours(profile)]


def _neighbours(profile: HardwareProfile) -> list[Part]:
    differed = max((point.unsteady for point in profile.shared), default=0.0)
    if differed <= _UNSTEADY:
        return []
    return [
        f"Readings of the same work differed by {100 * differed:.0f}%: something else ran here, "
        "and predictions from this profile are as uncertain. Calibrate again on a quiet machine."
    ]


def _compute_rows(profile: HardwareProfile) -> list[list[str]]:
    rows = []
    for dtype in dict.fromkeys(point.dtype for point in profile.gemms):
        points = [point for point in profile.gemms if point.dtype == dtype]
        best = max(points, key=lambda point: point.flops_per_s)
        how = f"best of {counted(len(points), 'shape')}, {best.m}x{best.n}x{best.k}"
        rows.append([f"gemm {dtype}", _gigaflops(best.flops_per_s), how])
    for kernel in dict.fromkeys(point.kernel for point in profile.attentions):
        timed = [point for point in profile.attentions if point.kernel == kernel]
        fast = max(timed, key=lambda point: point.flops_per_s)
        how = f"both ways, head {fast.head_size}, {fast.seq_len} tokens, {fast.dtype}"
        rows.append([f"attention {kernel}", _gigaflops(fast.flops_per_s), how])
    largest = max(profile.copies, key=lambda point: point.moved_bytes)
    copied = f"copy of {show_bytes(largest.moved_bytes)}, read and write"
    ratio = profile.sustained_flops_per_s / profile.burst_flops_per_s
    return [
        *rows,
        ["memory", f"{largest.bytes_per_s / 1e9:,.1f} GB/s", copied],
        ["launch", show_seconds(profile.launch_s), "one small operator, host time"],
        ["layer launch", show_seconds(profile.layer_launch_s), "one tiny layer, both ways"],
        ["sustained", f"{100 * ratio:.1f} %", f"of burst, after {profile.sustained_over_s:.0f} s"],
    ]


def _gigaflops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e9:,.1f} GFLOP/s"


def _link_rows(profile: HardwareProfile) -> list[list[str]]:
    rows = []
    for point in (point for point in profile.shared if point.ranks > 1):
        rate, latency_s = link_of(profile, point.ranks)
        each = f"all at once, {point.dtype}; memory {point.bytes_per_s / 1e9:,.1f} GB/s"
        link = f"all-reduce, one way; {show_seconds(latency_s)} a hop"
        rows += [
            [f"{point.ranks} ranks: each", _gigaflops(point.flops_per_s), each],
            [f"{point.ranks} ranks: link", f"{rate / 1e9:,.2f} GB/s", link],
        ]
    for hosts in hosts_of(profile):
        rate, latency_s = link_of(profile, hosts, hosts)
        link = f"a rank of each, all ranks at once; {show_seconds(latency_s)} a hop"
        rows.append([f"{hosts} hosts: link", f"{rate / 1e9:,.2f} GB/s", link])
    return rows


def verdicts_page(answer: Conformance) -> list[Part]:
    shown = table(
        list(answer.verdicts),
        ("engine", lambda one: f"{one.engine} {one.version}".strip()),
        *named("layout=cell", "verdict", "gradients=difference:.1e", "norm:.1e", "parameters:.1e"),
        *named("stand-ins=standins"),
    )
    lines: list[Part] = [line for one in answer.verdicts for line in said_of(one)]
    return [shown, "", *lines, _counted(answer)]


def said_of(one: Verdict) -> list[str]:
    """What a verdict says beyond its row."""
    head = f"{one.engine} {one.cell}: "
    lines = [f"{head}{line}" for line in one.signature]
    if one.hidden:
        lines.append(f"{head}losses and parameters hardly show it: Adam and clipping hide it")
    if one.resembles:
        lines.append(f"{head}resembles {one.resembles}")
    if one.convention:
        lines.append(f"{head}equal under its own convention ({one.convention})")
    return lines + ([f"{head}{one.why}"] if one.why else [])


def _counted(answer: Conformance) -> str:
    counts = Counter(one.verdict for one in answer.verdicts)
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    broken = f"; fault {answer.fault} planted" if answer.fault else ""
    return (
        f"{words}; largest differences relative to a plain fp64 decoder in one process, "
        f"3 clipped AdamW steps, {answer.device}{broken}"
    )


def engines_page(answer: Engines) -> list[Part]:
    shown = table(answer.releases, *named("engine", "version", "folder"))
    none = f"no releases in {answer.folder}; 'fourfold engines install NAME==VERSION' adds one"
    return [shown] if answer.releases else [none]
