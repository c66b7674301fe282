"""What is planned on? The cluster of plan's flags, how many of its GPUs to try, and their price."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from fourfold.commands.foresight import read_profile
from fourfold.errors import UserError
from fourfold.result.profile import cluster_of
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.layout import AXES, MODEL_AXES, Layout
from fourfold.spec.run import fill_dp


def machines(args: argparse.Namespace, table: dict[str, Any]) -> tuple[Cluster, list[int]]:
    """The cluster, and the numbers of GPUs to try, largest first."""
    gpus = table.get("gpus")
    if args.max_nodes is not None and args.max_nodes < 1:
        raise UserError("must be 1 or more", field="--max-nodes", value=args.max_nodes)
    if gpus is not None and not (isinstance(gpus, int) and 1 <= gpus <= 2**20):
        raise UserError("must be from 1 to 1048576", field="gpus", value=gpus)
    cluster = _priced(args, _cluster(args, gpus))
    if args.max_nodes is None:
        most = gpus or cluster.gpus
        counts = [most]
    else:
        nodes = min(args.max_nodes, cluster.hosts)
        most = min(gpus or cluster.gpus, nodes * cluster.host_gpus)
        counts = [n * cluster.host_gpus for n in range(most // cluster.host_gpus, 0, -1)] or [most]
    if most > cluster.gpus:
        raise UserError(
            f"{cluster.name} has {cluster.gpus}",
            field="gpus",
            value=most,
            hint=f"at most {cluster.gpus}, or describe a larger cluster in a file",
        )
    return cluster, _divided(table, counts)


def _cluster(args: argparse.Namespace, gpus: int | None) -> Cluster:
    from fourfold.search.question import usual_cluster

    if args.gpu and (args.cluster or args.profile):
        other = "cluster" if args.cluster else "profile"
        raise UserError(
            f"--{other} says which GPU it is",
            field="gpu",
            value=args.gpu,
            hint=f"leave --gpu or --{other} out",
        )
    if args.cluster:
        return catalog.cluster(args.cluster)
    if args.profile:
        return cluster_of(read_profile(args.profile), gpus or 1)
    if args.gpu:
        device = catalog.device(args.gpu)
        most = gpus or 8 * (args.max_nodes or 0)
        if not most:
            raise UserError("is missing", field="gpus", hint="add --gpus N or --max-nodes N")
        return usual_cluster(device, most)
    raise UserError(
        "is missing",
        field="cluster",
        hint="add --cluster NAME, --gpu ID with "
        "--gpus N, or --profile FILE ('fourfold calibrate --out FILE')",
    )


def _priced(args: argparse.Namespace, cluster: Cluster) -> Cluster:
    price = getattr(args, "price", None)
    if price is None:
        return cluster
    if not 0 <= price < 1e9:
        raise UserError("must be 0 or more", field="price", value=price, hint="--price 2.5")
    return replace(cluster, price_per_gpu_hour=price)


def _divided(table: dict[str, Any], counts: list[int]) -> list[int]:
    """The numbers of GPUs that the axes given can make up; none is a mistake in the flags."""
    layout = table.get("layout", {})
    asked, named = Layout.from_plain(layout, "layout"), named_axes(layout)
    if not named & {"dp", "shard", "replicate"}:
        used = asked.pp * asked.cp * asked.tp
        possible = [n for n in counts if n % used == 0]
        if not possible:
            fill_dp(asked, counts[0])  # says why not
        return possible
    whole = named >= {*MODEL_AXES}
    possible = [n for n in counts if n == asked.world or (not whole and n % asked.world == 0)]
    if not possible:
        raise UserError(
            f"pp x dp x cp x tp = {asked.world} must {'equal' if whole else 'divide'} it",
            field="gpus",
            value=counts[0],
            hint=f"--gpus {asked.world}, or leave --dp out: it is what tp, cp and pp leave",
        )
    return possible


def named_axes(layout: Any) -> set[str]:
    """The axes that a layout names, as text or as a table; the others are left open."""
    if isinstance(layout, dict):
        return set(layout)
    return {axis for axis in AXES if axis in str(layout).lower()}
