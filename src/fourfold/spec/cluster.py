"""Devices and the links that join them, from inner to outer, as one rank sees them.

A link level's `bytes_per_s` is one way and per rank, when all ranks of the level below send at
once: a host of 8 GPUs with 400 Gbit/s of network has 6.25e9 bytes/s per rank at its outer level.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import Annotated

from fourfold.errors import UserError
from fourfold.spec import check, words
from fourfold.units import bytes_from, bytes_per_s_from, seconds_from

Size = Annotated[int, bytes_from]
Rate = Annotated[float, bytes_per_s_from]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Dense matrix FLOP/s by precision; None: the device has no such unit."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def __post_init__(self) -> None:
        check.positive(**{name: getattr(self, name) for name in PEAK_NAMES})


PEAK_NAMES = tuple(field.name for field in dataclasses.fields(Peaks))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """What kernels sustain on a kind of GPU (`kernels` in data/devices.toml).

    `product` of a large 16-bit one and `attention` of long rows at head size 128: shares of the
    peak at the sustained clock. `fp8`, `fp4`: shares of their own peaks against `product`;
    `grouped`: rate of experts' products against one large one. `small_head`: the power by which
    attention loses on heads under 128; `large_head`, `large_head_backward`: its rate grows with
    that power of head size over 128. A block of rows costs so many keys beside its own; backwards
    it has `backward_rate` of the forward rate. Spreads are of logarithms.
    """

    product: float = 0.8
    fp8: float = 0.85
    fp4: float = 0.85
    grouped: float = 1.1
    attention: float = 0.6
    small_head: float = 1.3
    large_head: float = 0.0
    large_head_backward: float = 0.0
    forward_keys: float = 400.0
    backward_keys: float = 900.0
    backward_rate: float = 0.88
    product_spread: float = 0.05
    attention_spread: float = 0.2
    guessed: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        shares = ("product", "fp8", "fp4", "grouped", "attention", "backward_rate")
        check.positive(**{name: getattr(self, name) for name in shares})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """`sms` = streaming multiprocessors (compute units on AMD, cores on a CPU).

    `links` x `link_bytes_per_s`, one way, is what joins it to its peers (NVLink); 0: PCIe only.
    `domain`: how many reach each other so. `network_bytes_per_s`: its usual share of a host's
    network. `generation`: devices whose calibrations stand in for each other. `kernels`: the table
    of rates that kernels reach on it (`kernels` in data/devices.toml); '': that of its generation.
    """

    id: str
    name: str
    peak_flops_per_s: Peaks
    memory_bytes: Size
    memory_bytes_per_s: Rate
    sms: int
    power_w: float
    links: int = 0
    link_bytes_per_s: Rate | None = None
    source: str = ""
    generation: str = ""
    kernels: str = ""
    network_bytes_per_s: Rate = 12.5e9  # one card of 100 Gbit/s
    domain: int = 8

    def __post_init__(self) -> None:
        check.name(id=self.id, name=self.name)
        check.whole(1, 2**60, memory_bytes=self.memory_bytes)
        check.whole(1, 2**20, sms=self.sms)
        check.positive(memory_bytes_per_s=self.memory_bytes_per_s, power_w=self.power_w)
        check.whole(0, 1024, links=self.links)
        check.whole(1, 2**20, domain=self.domain)
        rate, hint = self.link_bytes_per_s, "add the rate of one link, per direction"
        check.positive(network_bytes_per_s=self.network_bytes_per_s, link_bytes_per_s=rate)
        check.that(rate or not self.links, "link_bytes_per_s", None, "is missing", hint)

    @property
    def peer_bytes_per_s(self) -> float:
        """One way, over all links to its peers; 0 where it has none."""
        return self.links * (self.link_bytes_per_s or 0.0)

    @property
    def usual_link_bytes_per_s(self) -> float:
        """To its peers on a host; PCIe 5 x16 where it has no links of its own."""
        return self.peer_bytes_per_s or 64e9

    @property
    def usual_host_gpus(self) -> int:
        """As many as reach each other, 16 at most; of a rack (NVL72) the 4 of a board."""
        return 4 if self.domain > 16 else self.domain

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of a policy's precision ('bf16-mixed' counts against bf16)."""
        unit = precision.split("-")[0]
        value = getattr(self.peak_flops_per_s, unit, None) if unit in PEAK_NAMES else None
        if value is None:
            known = [name for name in PEAK_NAMES if getattr(self.peak_flops_per_s, name)]
            rule, hint = f"has no known peak on {self.id}", f"known peaks: {', '.join(known)}"
            raise UserError(rule, field="precision", value=precision, hint=hint)
        return value


def device_id(name: str, known: tuple[str, ...]) -> str | None:
    """'NVIDIA H100 80GB HBM3' -> 'h100-80gb', if exactly one id has all its words in the name."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if words & {"pcie", "nvl"}:
        return None
    matching = [known_id for known_id in known if set(known_id.split("-")) <= words]
    return matching[0] if len(matching) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level: `ranks` is how many devices share it (a host, an NVLink domain, the cluster)."""

    name: str
    ranks: int
    bytes_per_s: Rate
    latency_s: Annotated[float, seconds_from]

    def __post_init__(self) -> None:
        check.whole(ranks=self.ranks)
        check.positive(bytes_per_s=self.bytes_per_s)
        check.that(self.latency_s >= 0, "latency_s", self.latency_s, "must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`host_gpus` is the box; the NVLink domain is a link level and may span boxes. `like`: the
    measured cluster that it is priced as; '': one with the same GPUs and links, 'none': no other.
    `dispatchers`: libraries for experts that are built on it (deepep, hybridep, ncclep), or
    'alltoall' alone; (): whichever an engine uses as a rule.
    """

    name: str
    device: Device
    gpus: int
    host_gpus: int
    links: tuple[Link, ...]
    price_per_gpu_hour: float | None = None
    source: str = ""
    like: str = ""
    dispatchers: tuple[words.Dispatcher, ...] = ()

    def __post_init__(self) -> None:
        check.name(name=self.name)
        check.whole(1, 2**24, gpus=self.gpus, host_gpus=self.host_gpus)
        auto = "auto" in self.dispatchers
        hint = "name libraries that are built there: deepep, hybridep, ncclep; or alltoall alone"
        check.that(not auto, "dispatchers", "auto", "is not a dispatcher of a cluster", hint)
        price = self.price_per_gpu_hour
        check.that((price or 0) >= 0, "price_per_gpu_hour", price, "must not be negative")
        check.that(self.links, "links", None, "needs at least one level", "add a [[links]] table")
        for inner, outer in zip(self.links, self.links[1:], strict=False):
            rule = (
                f"of level '{outer.name}' must be a multiple of the {inner.ranks} ranks of "
                f"'{inner.name}' inside it"
            )
            multiple = outer.ranks > inner.ranks and outer.ranks % inner.ranks == 0
            check.that(multiple, "links.ranks", outer.ranks, rule)
        rule = f"of the outermost level must cover all {self.gpus} GPUs"
        hint, outermost = f"set ranks = {self.gpus} in the last level", self.links[-1].ranks
        check.that(outermost >= self.gpus, "links.ranks", outermost, rule, hint)

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_gpus)

    def level(self, ranks: int) -> Link:
        """The innermost level that holds `ranks` neighbouring devices."""
        return next((link for link in self.links if link.ranks >= ranks), self.links[-1])


# Source of a cluster whose links nobody stated.
TYPICAL = "typical interconnect of this GPU, not measured"


def stretched(cluster: Cluster, gpus: int) -> Cluster:
    """The same machines, as many as `gpus` need: whole hosts, racks and NVLink domains."""
    if gpus <= cluster.gpus:
        return cluster
    inner = cluster.links[-2].ranks if len(cluster.links) > 1 else 1
    outer = replace(cluster.links[-1], ranks=-(-gpus // inner) * inner)
    return replace(cluster, gpus=gpus, links=(*cluster.links[:-1], outer))
