"""Which ranks talk to each other? Groups of a layout with all their members, and the link each
crosses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from fourfold.cost.trace.step import Group
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import Layout


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
