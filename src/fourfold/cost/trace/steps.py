"""What is a step of a trace? Tensors written, FLOPs, messages, releases: symbols, no numbers yet.

FLOPs count 2 per multiply-add of matrix products. Liveness is read off the list by one rule,
that of a script: a tensor is held as long as its name. A step that writes a name already in use
holds both until the new one is complete; `frees` and `moves` end names by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fourfold.result.trace import How, Op
from fourfold.spec import catalog, words
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import Layout
from fourfold.spec.words import Dtype

Kind = words.CpKind | Literal["mlp", "mlp2d", "layer"]
CP_KINDS: tuple[Kind, ...] = words.CP_KINDS[::-1]
KINDS: tuple[Kind, ...] = (*CP_KINDS, "mlp", "mlp2d", "layer")

# Scratch of the matrix library, held from the first product on; 42 MB in the published trace of
# 60,000 tokens on 16 GPUs whose peaks this reproduces.
WORKSPACE_BYTES = 42_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dims` are symbolic sizes; a view has a shape but no memory of its own."""

    name: str
    dims: tuple[str, ...]
    how: How = "new"
    dtype: Dtype | None = None  # None: the trace's own


@dataclass(frozen=True, slots=True)
class Send:
    """`dims` is the whole buffer of a collective: what is gathered, exchanged or summed."""

    op: Op
    group: str
    dims: tuple[str, ...]
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`flops` are terms of one rank, added up; `times` repeats the step and leaves memory alone."""

    name: str
    formula: str
    tensors: tuple[Tensor, ...] = ()
    flops: tuple[str, ...] = ()
    sends: tuple[Send, ...] = ()
    frees: tuple[str, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange something; `members` lists every such group of the world."""

    name: str
    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.members[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """The group that `rank` is in."""
        return next(ranks for ranks in self.members if rank in ranks)

    @property
    def span(self) -> int:
        """Neighbouring ranks from the group's first to its last."""
        return self.members[0][-1] - self.members[0][0] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole list of steps with the sizes its symbols stand for; `notes` say what is assumed."""

    kind: Kind
    ranks: int
    sizes: dict[str, int]
    dtype: Dtype
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    per_rank: dict[str, int]
    rank: int = 0
    notes: tuple[str, ...] = field(default=())


def world_group(name: str, ranks: int) -> Group:
    return Group(name, (tuple(range(ranks)),))


def axis_groups(layout: Layout, axes: Sequence[str], name: str = "") -> Group:
    """Groups that differ only on `axes`: ('dp', 'cp') shard the same weights."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        key = tuple(size for axis, size in place.items() if axis not in axes)
        found.setdefault(key, []).append(rank)
    return Group(name or "x".join(axes), tuple(tuple(ranks) for ranks in found.values()))


# What a trace without a cluster runs on: hosts of 8 with NVLink, a network port for every GPU.
GENERIC_CLUSTER = "nvidia-h100"


def generic_cluster(ranks: int) -> Cluster:
    return stretched(catalog.cluster(GENERIC_CLUSTER), ranks)


def stretched(cluster: Cluster, ranks: int) -> Cluster:
    """The same machines, as many as `ranks` need: for a question that names no cluster."""
    if ranks <= cluster.gpus:
        return cluster
    inner = cluster.links[-2].ranks if len(cluster.links) > 1 else 1
    outer = replace(cluster.links[-1], ranks=-(-ranks // inner) * inner)
    return replace(cluster, gpus=ranks, links=(*cluster.links[:-1], outer))


def spans(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 8] -> '0-2 8'; an even stride over more than two -> '0-56 by 8'."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
