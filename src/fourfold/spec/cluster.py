"""What connects the devices? Link levels from inner to outer, as one rank sees them.

A level's `bytes_per_s` is one way and per rank, when all ranks of the level below send at once:
a host of 8 GPUs with 400 Gbit/s of network has 6.25e9 bytes/s per rank at its outer level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.device import Device, Rate
from fourfold.units import seconds_from


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
        if self.latency_s < 0:
            raise UserError("must not be negative", field="latency_s", value=self.latency_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`host_gpus` is the box; the NVLink domain is a link level and may span boxes."""

    name: str
    device: Device
    gpus: int
    host_gpus: int
    links: tuple[Link, ...]
    price_per_gpu_hour: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check.name(name=self.name)
        check.whole(1, 2**24, gpus=self.gpus, host_gpus=self.host_gpus)
        if self.price_per_gpu_hour is not None and self.price_per_gpu_hour < 0:
            raise UserError(
                "must not be negative", field="price_per_gpu_hour", value=self.price_per_gpu_hour
            )
        if not self.links:
            raise UserError("needs at least one level", field="links", hint="add a [[links]] table")
        for inner, outer in zip(self.links, self.links[1:], strict=False):
            if outer.ranks <= inner.ranks or outer.ranks % inner.ranks:
                raise UserError(
                    f"of level '{outer.name}' must be a multiple of the {inner.ranks} ranks of "
                    f"'{inner.name}' inside it",
                    field="links.ranks",
                    value=outer.ranks,
                )
        if self.links[-1].ranks < self.gpus:
            raise UserError(
                f"of the outermost level must cover all {self.gpus} GPUs",
                field="links.ranks",
                value=self.links[-1].ranks,
                hint=f"set ranks = {self.gpus} in the last level",
            )

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_gpus)

    def level(self, ranks: int) -> Link:
        """The innermost level that holds `ranks` neighbouring devices."""
        for link in self.links:
            if link.ranks >= ranks:
                return link
        return self.links[-1]
