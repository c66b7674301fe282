"""What a machine can do: raw measurements of one device and its links, and the rates that follow. A
CPU is shared by the ranks on it, so its rates are kept for each number of ranks at work.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fourfold.errors import UserError
from fourfold.result.points import (
    NEWER_FLASH,
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    HostPoint,
    SharedPoint,
)
from fourfold.spec import check, codec
from fourfold.spec.cluster import PEAK_NAMES, Cluster, Device, Link, Peaks

_MOST = 1e24  # above every rate, size and time that a machine has
_MAY_BE_ZERO = {"power_w", "measured_s", "wrapped_s", "called_s", "unsteady"}
# What the power limit costs is in the measured sustained rate; a device made from a profile must
# not be slowed for it a second time, so its limit is one that never binds.
_UNBOUND_POWER_W = 1e4
_AGAIN = "run 'fourfold calibrate' again"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """`layer_launch_s`: one small layer forward and backward, all launching and no work."""

    device: str
    device_name: str
    host: str
    torch: str
    made_at: str
    measured_s: float
    cores: int
    units: int
    memory_bytes: int
    power_w: float
    gemms: tuple[GemmPoint, ...]
    attentions: tuple[AttentionPoint, ...]
    copies: tuple[CopyPoint, ...]
    launch_s: float
    layer_launch_s: float
    burst_flops_per_s: float
    sustained_flops_per_s: float
    sustained_over_s: float
    sustained_dtype: str = "fp32"
    shared: tuple[SharedPoint, ...] = ()
    hosts: tuple[HostPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()

    def peak(self, dtype: str) -> float | None:
        """The fastest product seen in this format, cool or hot; None when it was not measured."""
        seen = [point.flops_per_s for point in self.gemms if point.dtype == dtype]
        seen += [p.flops_per_s for p in self.shared if p.ranks == 1 and p.dtype == dtype]
        seen += [self.burst_flops_per_s] if dtype == self.sustained_dtype else []
        return max(seen, default=None)

    @property
    def memory_bytes_per_s(self) -> float:
        """Of the largest copy: small ones stay in a cache."""
        return max(self.copies, key=lambda point: point.moved_bytes).bytes_per_s


def read_profile(text: str) -> HardwareProfile:
    """A profile from a file's text. Everything measured is divided by somewhere: nothing is 0."""
    profile = codec.from_json(HardwareProfile, text)
    known = profile.device in ("cpu", "cuda")
    check.that(known, "device", profile.device, "must be cpu or cuda")
    check.name(device_name=profile.device_name, host=profile.host, torch=profile.torch,
               made_at=profile.made_at)  # fmt: skip
    products = tuple(x for point in profile.hosts for x in (*point.products, point.attention))
    groups = (profile.gemms, profile.attentions, profile.copies, profile.shared, profile.hosts,
              products, profile.collectives)  # fmt: skip
    for point in (profile, *(point for group in groups for point in group)):
        for field in dataclasses.fields(point):
            value = getattr(point, field.name)
            if isinstance(value, int | float):
                good = 0 < value <= _MOST or (value == 0 and field.name in _MAY_BE_ZERO)
                check.that(good, field.name, value, "must be above 0 and finite")
    for point in profile.attentions:
        known, rule = profile.peak(point.dtype), "is a dtype without a measured matrix product"
        check.that(known is not None, "attentions.dtype", point.dtype, rule, _AGAIN)
    return profile


def peak_of(profile: HardwareProfile, dtype: str, ranks: int) -> float | None:
    """Of one of `ranks` ranks that share the host."""
    peak = profile.peak(dtype)
    return None if peak is None else peak * _share(profile, ranks)


def device_of(profile: HardwareProfile, ranks: int = 1) -> Device:
    """One rank's device when `ranks` of them share the host; every peak is a measured one."""
    known = ((name, peak_of(profile, name, ranks)) for name in PEAK_NAMES)
    peaks = {name: peak for name, peak in known if peak is not None}
    shared, share = _shared(profile, ranks), _share(profile, ranks)
    bandwidth = shared.bytes_per_s if shared else profile.memory_bytes_per_s * share
    on_cpu = profile.device == "cpu"
    return Device(
        id=f"{profile.device}-this",
        name=profile.device_name,
        peak_flops_per_s=Peaks(**peaks),
        memory_bytes=profile.memory_bytes // (ranks if on_cpu else 1),
        memory_bytes_per_s=bandwidth,
        sms=max(1, profile.units // (ranks if on_cpu else 1)),
        power_w=_UNBOUND_POWER_W,
        source=f"fourfold calibrate on {profile.host}, {profile.made_at}, torch {profile.torch}, "
        f"as one of {ranks} ranks; the power limit is in the sustained rate",
    )


def cluster_of(profile: HardwareProfile, ranks: int = 1) -> Cluster:
    """`ranks` ranks of this host, or of several like it, with the links they were measured to
    have: inside a host and, between hosts, by how many of them were measured."""
    hosts = hosts_of(profile)
    inside = min(ranks, max((point.ranks for point in profile.shared), default=1))
    levels = [("host", inside if hosts else ranks, 1)]
    for count in hosts[-1:] if len(hosts) < 2 else (hosts[0], hosts[-1]):
        is_last = count == hosts[-1]
        whole = max(ranks, count * inside) if is_last else count * inside
        inner = levels[-1][1]
        if whole > inner:
            name = "network" if is_last else f"{count} hosts"
            levels.append((name, -(-whole // inner) * inner, count))
    links = []
    for name, size, count in levels:
        rate, latency_s = link_of(profile, size if count == 1 else count, count)
        links.append(Link(name=name, ranks=size, bytes_per_s=rate, latency_s=latency_s))
    device = device_of(profile, levels[0][1])
    return Cluster(
        name=f"{profile.host}-{profile.device}",
        device=device,
        gpus=ranks,
        host_gpus=levels[0][1],
        links=tuple(links),
        source=device.source,
    )


def hosts_of(profile: HardwareProfile) -> list[int]:
    """By how many hosts links between them were measured, fewest first."""
    return sorted({point.hosts for point in profile.collectives} - {1})


def link_of(profile: HardwareProfile, ranks: int, hosts: int = 1) -> tuple[float, float]:
    """Bytes/s and latency of a link, from all-reduces: a ring moves 2 (n-1)/n of the payload.

    One rank has no link; it gets the memory's rate and the launch time, which it never uses.
    """
    points = _all_reduces(profile, ranks, hosts)
    if not points:
        return profile.memory_bytes_per_s, profile.launch_s
    n = points[0].ranks
    large, start_s = points[-1], min(point.seconds for point in points)
    moving_s = large.seconds - start_s if large.seconds > 2.0 * start_s else large.seconds
    return 2.0 * (n - 1) / n * large.payload_bytes / moving_s, start_s / (2.0 * (n - 1))


def coefficients_of(profile: HardwareProfile) -> dict[str, float]:
    """Where a calibration of this machine starts, by the planner's names: shares of measured peaks.

    Only what was measured is named; a fit on runs moves them from here.
    """
    peak = profile.peak(profile.sustained_dtype)
    assert peak is not None, "the burst itself is one"
    coef = {
        "gemm": min(0.98, profile.sustained_flops_per_s / peak),  # of the fastest product seen
        "align": _alignment_loss(profile),
        "host_s": profile.layer_launch_s,
    }
    long = [point for point in profile.attentions if point.head_size >= 64]
    if long:
        best = max(long, key=lambda point: point.seq_len * point.flops_per_s)
        own_peak = profile.peak(best.dtype)
        assert own_peak is not None, "read_profile refuses attention without products"
        shape = NEWER_FLASH.share(best, profile.units)
        coef["flash"] = best.flops_per_s / own_peak / shape
    points = _all_reduces(profile, 0)
    if points:
        coef |= {"nvlink": 0.98, "latency_s": link_of(profile, points[0].ranks)[1]}
    return coef


def _alignment_loss(profile: HardwareProfile) -> float:
    """Speed lost per power of two that the width misses 64, from products of nearly equal size."""
    losses = []
    for odd in profile.gemms:
        for even in profile.gemms:
            near = all(
                abs(a - b) <= 0.03 * b
                for a, b in ((odd.m, even.m), (odd.n, even.n), (odd.k, even.k))
            )
            missed = _missed_powers(odd)
            if odd.dtype == even.dtype and near and missed and not _missed_powers(even):
                losses.append((1.0 - odd.flops_per_s / even.flops_per_s) / missed)
    return max(0.0, sorted(losses)[len(losses) // 2]) if losses else 0.0


def _missed_powers(point: GemmPoint) -> int:
    return sum(max(0, 7 - (size & -size).bit_length()) for size in (point.n, point.k))


def _all_reduces(profile: HardwareProfile, ranks: int, hosts: int = 1) -> list[CollectivePoint]:
    """All-reduces over the measured number of ranks nearest to the asked one, small ones first."""
    of_hosts = [point for point in profile.collectives if point.hosts == hosts]
    points = [point for point in of_hosts if point.op == "all-reduce"]
    if not points or ranks == 1:
        return []
    nearest = min({point.ranks for point in points}, key=lambda n: (abs(n - ranks), n))
    of_them = [point for point in points if point.ranks == nearest]
    return sorted(of_them, key=lambda point: point.payload_bytes)


def _shared(profile: HardwareProfile, ranks: int) -> SharedPoint | None:
    return next((point for point in profile.shared if point.ranks == ranks), None)


def _share(profile: HardwareProfile, ranks: int) -> float:
    """What part of the lone rank's speed is left to each of `ranks` ranks; GPUs are not shared."""
    if profile.device != "cpu" or ranks == 1:
        return 1.0
    alone, shared = _shared(profile, 1), _shared(profile, ranks)
    if alone is None:
        rule = "needs a profile measured with several ranks"
        raise UserError(rule, field="ranks", value=ranks, hint=_AGAIN)
    if shared is not None:
        return min(1.0, shared.flops_per_s / alone.flops_per_s)
    return min(1.0, 1.0 / ranks)  # more ranks than measured: the cores are full already
