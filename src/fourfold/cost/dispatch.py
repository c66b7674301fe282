"""Kinds of dispatchers: data/dispatchers.toml; the copies of a token that each sends; and kinds of
overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fourfold.spec import catalog

Floats = NDArray[np.float64]
# What is sent of a token: nothing; one copy for each chosen expert; one for each rank that has any
# of them; one for each node, and from there to ranks; one to everybody.
Copies = Literal["none", "choice", "rank", "node", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherKind:
    """`title`: as texts have it; `passes` over the copies in memory, both ways together; `sms` that
    its kernels take from others while they run; `calls` for each way; `host`: time to launch it
    against the usual;
    `rate` of its messages likewise; `waits`: the host reads how many rows come before it launches
    what follows, so that graphs around it save nothing."""

    title: str
    copies: Copies
    passes: float
    sms: float = 0.0
    calls: float = 0.0
    host: float = 1.0
    rate: float = 1.0
    waits: bool = False


KINDS = catalog.kinds(DispatcherKind, "dispatchers.toml")
DISPATCHERS: tuple[str, ...] = tuple(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapKind:
    """How an exchange hides: data/overlaps.toml. `paid` 0: as fitted; `shared`: under the layer's
    shared experts."""

    chunks: float
    paid: float = 0.0
    shared: bool = False
    fill: float = 1.0
    stages: float = 1.0

    @property
    def is_schedule(self) -> bool:
        """Whether the pipeline runs in an order of its own."""
        return self.fill < 1.0


OVERLAPS = catalog.kinds(OverlapKind, "overlaps.toml")


# NCCL brings these along; the others are libraries that somebody has to build.
ALWAYS_THERE = ("local", "alltoall", "allgather")


def dispatcher_of(dispatcher: str, usual: str, has: Sequence[str], built: Sequence[str]) -> str:
    """Return the dispatcher that a run has: of its policy, or where that says auto, the `usual` one
    of its engine. Where a cluster says which libraries are `built` on it, the engine takes one of
    these that it `has`, else all-to-all."""
    if dispatcher != "auto":
        return dispatcher
    if not built or usual in (*built, *ALWAYS_THERE):
        return usual
    libraries = [name for name in reversed(DISPATCHERS) if name in built and name in has]
    return libraries[0] if libraries else "alltoall"


def fact(index: Floats, name: str, kinds: Mapping[str, Any] = KINDS) -> Floats:
    """A number of each run's kind."""
    each = np.array([getattr(kind, name) for kind in kinds.values()], dtype=np.float64)
    return each[np.asarray(index, dtype=np.intp)]


def is_kind(index: Floats, copies: Copies) -> NDArray[np.bool_]:
    each = np.array([kind.copies == copies for kind in KINDS.values()])
    return each[np.asarray(index, dtype=np.intp)]


def parts_met(parts: Any, experts: Any, top_k: Any) -> Floats:
    """Of so many equal parts of the experts, how many hold a token's choice, in the mean:
    n (1 - C(E - E/n, k) / C(E, k))."""
    parts, experts, top_k = np.broadcast_arrays(*map(np.asarray, (parts, experts, top_k)))
    missed = np.ones(parts.shape)
    rest = experts - experts / np.maximum(parts, 1.0)
    for i in range(int(top_k.max(initial=0))):
        left = np.maximum(0.0, rest - i) / np.maximum(1.0, experts - i)
        missed = missed * np.where(i < top_k, left, 1.0)
    return parts * (1.0 - missed)
