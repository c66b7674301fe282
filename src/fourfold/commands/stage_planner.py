"""What does the planner say of one stage of one run?

On the cluster that is asked about, else on this GPU with its usual links, else as a rough guess.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fourfold.commands.foresight import read_profile
from fourfold.launch.devices import gpu_count
from fourfold.result.machine import gpu_name
from fourfold.result.one_rank import OneRankResult
from fourfold.result.report import RunReport
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.device import device_id
from fourfold.spec.run import RunSpec

if TYPE_CHECKING:
    from fourfold.cost.columns import Columns
    from fourfold.cost.one_rank import Joined, Predicted, Stage


class Planner:
    """What the planner says of one run, on the cluster that is asked about."""

    def __init__(self, args: argparse.Namespace, spec: RunSpec) -> None:
        from fourfold.cost.fit import calibration
        from fourfold.cost.run import columns_of
        from fourfold.result.profile import coefficients_of
        from fourfold.search.query import entry_for

        self.spec = spec
        profile = read_profile(args.profile) if args.profile else None
        self.cluster, self.basis = _cluster(args, spec)
        self.entry, _ = entry_for(calibration.shipped(), "fourfold", self.cluster)
        known = coefficients_of(profile) if profile is not None else {}
        on_cpu = {"base_gib": 0.0} if self.cluster.device.id.startswith("cpu") else {}
        self.entry = replace(
            self.entry, coefficients={**self.entry.coefficients, **known, **on_cpu}
        )
        self.columns: Columns = columns_of([spec], cluster=self.cluster, stack="fourfold")

    def step_s(self) -> tuple[float, float, float]:
        """The planner's own step: (seconds, low, high)."""
        from fourfold.cost.fit.interval import bounds
        from fourfold.cost.step.estimate import estimate

        step = estimate(self.columns, self.entry.coefficients).step_s
        low, high = bounds(self.columns, self.entry, step)
        return float(step[0]), float(low[0]), float(high[0])

    def fullest_stage(self) -> int:
        from fourfold.cost.memory.peak import memory

        said = memory(self.columns, self.entry.coefficients)
        at_first = float(said.first_bytes[0]) >= float(said.last_bytes[0])
        return 0 if at_first else self.spec.layout.pp - 1

    def stage(self, found: OneRankResult) -> Stage:
        from fourfold.cost.one_rank import Stage

        last = found.stage == self.spec.layout.pp - 1
        return Stage(stage=found.stage, layers=found.layers, first=found.stage == 0, last=last)

    def predicted(self, found: OneRankResult) -> Predicted:
        from fourfold.cost.one_rank import predicted

        return predicted(self.columns, self.entry.coefficients, self.stage(found))

    def joined(self, found: OneRankResult) -> Joined:
        from fourfold.cost.one_rank import joined
        from fourfold.show.one_rank import layer_s, micro_s

        return joined(
            self.columns,
            self.entry.coefficients,
            self.stage(found),
            compute_s=found.compute_s,
            layer_s=layer_s(found),
            micro_s=micro_s(found),
        )

    def post_mortem(self, report: RunReport) -> dict[str, Any]:
        """An out-of-memory in the words of bench: held, predicted, and what would fit."""
        from fourfold.cost.memory.peak import USABLE
        from fourfold.search.fixes import remedies
        from fourfold.search.predict import predict
        from fourfold.show import oom as post_mortem

        limit = float(report.spec.memory_limit or USABLE * self.cluster.device.memory_bytes)
        own = predict([report.spec], cluster=self.cluster)[0]
        fixes = remedies(
            report.spec, lambda specs: predict(specs, cluster=self.cluster), limit_bytes=limit
        )
        said = replace(own, limit_bytes=limit, basis=self.basis)
        return post_mortem.facts(replace(report, predicted=said, remedies=fixes))


def _cluster(args: argparse.Namespace, spec: RunSpec) -> tuple[Cluster, str]:
    """Whose links and kernels the planner prices, and where they are from."""
    from fourfold.result.profile import cluster_of
    from fourfold.search.predict import rough_cpu
    from fourfold.search.query import usual_cluster

    if args.cluster:
        return catalog.cluster(args.cluster), args.cluster
    if args.profile:
        profile = read_profile(args.profile)
        return cluster_of(profile, spec.gpus), f"profile of {profile.host}"
    if spec.device != "cpu" and gpu_count() >= 1:
        known = device_id(gpu_name(), catalog.device_names())
        if known:
            return usual_cluster(catalog.device(known), spec.gpus), f"{known}, its usual links"
    return rough_cpu(spec.gpus, spec.gpus), "a rough guess of one core a rank"
