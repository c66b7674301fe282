"""What a machine can do: raw measurements of one device and its links, and the rates that follow. A
CPU is shared by the ranks on it, so its rates are kept for each number of ranks at work.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

from fourfold.spec import Batch, Policy, RunSpec, catalog, check, codec
from fourfold.spec.cluster import PEAK_NAMES, Cluster, Device, Link, Peaks
from fourfold.spec.layout import Layout

_MOST = 1e24  # above every rate, size and time that a machine has
_MAY_BE_ZERO = {"power_w", "measured_s", "layer_s", "start_s", "unsteady"}
# What the power limit costs is in the measured sustained rate; a device made from a profile must
# not be slowed for it a second time, so its limit is one that never binds.
_UNBOUND_POWER_W = 1e4
_AGAIN = "run 'fourfold calibrate' again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPoint:
    """One matrix product [m, k] x [k, n]."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint:
    """Causal attention of `heads` heads over `seq_len` tokens, forward and backward apart."""

    kernel: str
    dtype: str
    batch: int
    heads: int
    head_size: int
    seq_len: int
    forward_s: float
    backward_s: float

    @property
    def flops_per_s(self) -> float:
        """Both ways, counting the causal half: 2 + 5 products of s x s/2 x head size."""
        pairs = self.batch * self.heads * self.seq_len**2 / 2
        return 2.0 * 7.0 * pairs * self.head_size / (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPoint:
    """`moved_bytes` were read and as many written."""

    moved_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return 2.0 * self.moved_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """`payload_bytes`: the whole tensor (gathered output, scattered input); p2p: the message.
    `hosts`: several have one rank each of the group, while their other ranks do the same."""

    op: str
    ranks: int
    payload_bytes: int
    seconds: float
    hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPoint:
    """What one rank gets while `ranks` of them work on this host at once. Of a CPU also seconds of
    both passes of a layer of our engine (`measured_layer`) and of one that is all overhead, and by
    what share readings of the same differed."""

    ranks: int
    dtype: str
    flops_per_s: float
    bytes_per_s: float
    layer_s: float = 0.0
    start_s: float = 0.0
    unsteady: float = 0.0


def measured_layer() -> RunSpec:
    """A micro batch through one layer, forward and backward."""
    tiny = catalog.model("llama-tiny")
    return RunSpec(
        model=replace(tiny, layers=1, hidden=512, ffn=1408, heads=8, kv_heads=4),
        gpus=1,
        layout=Layout(),
        batch=Batch(seq_len=256, micro_batch=1, global_batch=1),
        policy=Policy(precision="fp32"),
        device="cpu",
    )


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
    check.name(
        device_name=profile.device_name,
        host=profile.host,
        torch=profile.torch,
        made_at=profile.made_at,
    )
    groups = (
        profile.gemms,
        profile.attentions,
        profile.copies,
        profile.shared,
        profile.collectives,
    )
    for point in (profile, *(point for group in groups for point in group)):
        for field in dataclasses.fields(point):
            value = getattr(point, field.name)
            if isinstance(value, int | float):
                good = 0 < value <= _MOST or (value == 0 and field.name in _MAY_BE_ZERO)
                check.that(good, field.name, value, "must be above 0 and finite")
    rule = "says nothing of ranks at work at once, or of layers on a CPU"
    told = profile.device == "cuda" or all(p.layer_s and p.start_s for p in profile.shared)
    check.that(bool(profile.shared) and told, "shared", None, rule, _AGAIN)
    for point in profile.attentions:
        known, rule = profile.peak(point.dtype), "is a dtype without a measured matrix product"
        check.that(known is not None, "attentions.dtype", point.dtype, rule, _AGAIN)
    return profile


def shared_by(profile: HardwareProfile, ranks: int) -> SharedPoint:
    """What each of `ranks` gets: as with the nearest measured number of them. On a CPU as much
    less as they are more: its cores were full already."""
    near = min(profile.shared, key=lambda point: (abs(point.ranks - ranks), point.ranks))
    slower = max(1.0, ranks / near.ranks) if profile.device == "cpu" else 1.0
    return replace(
        near,
        flops_per_s=near.flops_per_s / slower,
        bytes_per_s=near.bytes_per_s / slower,
        layer_s=near.layer_s * slower,
        start_s=near.start_s * slower,
    )


def device_of(profile: HardwareProfile, ranks: int = 1) -> Device:
    """One rank's device when `ranks` of them share the host; every peak is a measured one. GPUs are
    not shared."""
    own, on_cpu = shared_by(profile, ranks), profile.device == "cpu"
    share = min(1.0, own.flops_per_s / shared_by(profile, 1).flops_per_s) if on_cpu else 1.0
    peaks = {name: peak * share for name in PEAK_NAMES if (peak := profile.peak(name)) is not None}
    return Device(
        id=f"{profile.device}-this",
        name=profile.device_name,
        peak_flops_per_s=Peaks(**peaks),
        memory_bytes=profile.memory_bytes // (ranks if on_cpu else 1),
        memory_bytes_per_s=own.bytes_per_s,
        sms=max(1, profile.units // (ranks if on_cpu else 1)),
        power_w=_UNBOUND_POWER_W,
        kernels="measured",
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
    points = all_reduces(profile, ranks, hosts)
    if not points:
        return profile.memory_bytes_per_s, profile.launch_s
    n = points[0].ranks
    large, start_s = points[-1], min(point.seconds for point in points)
    moving_s = large.seconds - start_s if large.seconds > 2.0 * start_s else large.seconds
    return 2.0 * (n - 1) / n * large.payload_bytes / moving_s, start_s / (2.0 * (n - 1))


def all_reduces(profile: HardwareProfile, ranks: int, hosts: int = 1) -> list[CollectivePoint]:
    """All-reduces over the measured number of ranks nearest to the asked one, small ones first."""
    of_hosts = [point for point in profile.collectives if point.hosts == hosts]
    points = [point for point in of_hosts if point.op == "all-reduce"]
    if not points or ranks == 1:
        return []
    nearest = min({point.ranks for point in points}, key=lambda n: (abs(n - ranks), n))
    of_them = [point for point in points if point.ranks == nearest]
    return sorted(of_them, key=lambda point: point.payload_bytes)
