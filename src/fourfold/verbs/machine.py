"""Which machine and calibration apply: a named cluster, else a hardware profile, a GPU in typical
hosts, the GPU of this host if the catalogue knows it, a rough guess from the cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TypedDict

from fourfold import files
from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.machine import calibration_of
from fourfold.cost.memory.peak import USABLE
from fourfold.errors import UserError, inside
from fourfold.launch.permit import core_count, gpu_count, kind_of
from fourfold.result.machine import gpu_name, host_memory_bytes
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.result.profile import read_profile as profile_of
from fourfold.result.report import Prediction, Remedy, RunReport
from fourfold.search.fixes import remedies
from fourfold.search.legal import Target
from fourfold.search.predict import predict, rough_cpu, state_bytes
from fourfold.search.query import usual_cluster
from fourfold.spec import RunSpec, catalog, check
from fourfold.spec.cluster import Cluster, device_id
from fourfold.spec.engine import engine_of
from fourfold.spec.words import OURS
from fourfold.units import bytes_per_s_from, counted, show_bytes

GUESS = "a rough guess from the cores"
# Of a host's memory, shared by its ranks: the rest is the system's and Python's.
_HOST_SHARE = 0.8


def read_profile(name: str) -> HardwareProfile:
    """A file, or a GPU whose profile comes with the package ('h200')."""
    text = catalog.profile_text(name) or files.read_text(name, field="profile")
    with inside(name):
        return profile_of(text)


def known_cluster(cluster: str | Cluster, gpus: int = 0) -> Cluster:
    """By name, with as many machines as `gpus` need; one that is described is as large as that."""
    if not isinstance(cluster, str):
        return cluster
    measured = calibrations.shipped().clusters
    if cluster.lower() in measured - {*catalog.cluster_names()}:
        rule = "has measured runs, but its machines are not described"
        hint = "use --gpu ID with --gpus N, or describe it with 'fourfold clusters new'"
        raise UserError(rule, field="cluster", value=cluster, hint=hint)
    return catalog.cluster(cluster, gpus)


def beyond_source(name: str | Cluster | None, cluster: Cluster) -> str:
    """What to say of a cluster that has more machines than its source; '' where it has not."""
    known = catalog.cluster(name).gpus if isinstance(name, str) else cluster.gpus
    if cluster.gpus <= known:
        return ""
    had = f"{cluster.name} had {counted(known, 'GPU')} at its source"
    return f"{had}; {cluster.gpus:,} are more of the same"


def read_calibration(path: str | None) -> Calibration:
    return calibrations.load(path) if path else calibrations.shipped()


def named_cluster(gpu: str, ranks: int) -> Cluster | None:
    """A GPU by the name it gives itself, with its usual links; None where the catalogue does not
    know it."""
    known = device_id(gpu, catalog.device_names())
    return usual_cluster(catalog.device(known), ranks) if known else None


@cache
def local_cluster(ranks: int) -> Cluster | None:
    return named_cluster(gpu_name(), ranks)


def local_guess(ranks: int) -> Cluster:
    return rough_cpu(ranks, core_count())


def planned_cluster(
    *,
    cluster: str | Cluster | None,
    gpu: str | None,
    profile: str | None,
    gpus: int,
    price: float | None = None,
    network: float | None = None,
) -> Cluster:
    """The machines to plan on; `gpus` 0: as many as the cluster has; `network`: bytes/s of a host,
    whatever its cluster's name suggests."""
    if gpu and (cluster or profile):
        other = "cluster" if cluster else "profile"
        rule = f"cannot be combined with {other}, which implies the GPU"
        raise UserError(rule, field="gpu", value=gpu, hint=f"omit gpu or {other}")
    if cluster:
        found = known_cluster(cluster, gpus)
    elif profile:
        found = cluster_of(read_profile(profile), gpus or 1)
    elif gpu:
        device = catalog.device(gpu)
        found = usual_cluster(device, check.given(gpus, "gpus", "or pass --max-nodes N"))
    else:
        raise UserError(
            "no machine is given",
            hint="pass --cluster NAME, --gpu ID with --gpus N, or --profile FILE (from 'fourfold "
            "calibrate')",
        )
    if network is not None:
        found = on_network(found, network)
    if price is None:
        return found
    check.that(0 <= price < 1e9, "price", price, "must be 0 or more")
    return replace(found, price_per_gpu_hour=price)


def on_network(cluster: Cluster, host_bytes_per_s: float) -> Cluster:
    """The same machines on a network of this rate."""
    check.positive(network=host_bytes_per_s)
    hint = "omit it: a network is needed between hosts only"
    check.that(len(cluster.links) >= 2, "network", None, "does not apply to one host", hint)
    outer = replace(cluster.links[-1], bytes_per_s=host_bytes_per_s / cluster.host_gpus)
    return replace(cluster, links=(*cluster.links[:-1], outer), source="network as stated")


def planned_calibration(
    path: str | None, profile: str | None, cluster: Cluster | None
) -> Calibration:
    """A calibration file, what a profile of this machine says, or the shipped one."""
    if not path and profile and cluster is not None:
        return calibration_of(read_profile(profile), cluster)
    return read_calibration(path)


@dataclass(slots=True)
class Predictor:
    """Predicts runs on one machine. `planned` are the planner's own predictions, by run id; they
    come first."""

    cluster: Cluster | None = None
    profile: HardwareProfile | None = None
    calibration: Calibration | None = None
    named: str = ""
    # Whose engine runs them: its habits, and the rules of the release that settings are for.
    stack: str = OURS
    release: str = ""
    # Runs are not on this host.
    remote: bool = False
    planned: dict[str, Prediction] = field(default_factory=dict)

    @property
    def is_guess(self) -> bool:
        """Nothing better than the number of cores is known (a GPU may still be)."""
        return not self.named

    def cluster_of(self, spec: RunSpec) -> Cluster | None:
        """The named cluster; on a GPU that the catalogue knows, this host with its usual links."""
        if self.cluster is not None or self.profile is not None:
            return self.cluster
        is_here = not self.remote and kind_of(spec) == "cuda"
        return local_cluster(spec.gpus) if is_here else None

    def target(self, spec: RunSpec) -> Target:
        """Whose rules say whether it can run."""
        engine = engine_of(self.stack)
        return Target(engine=engine, release=self.release, gpus=spec.gpus, runs=engine.is_ours)

    def basis(self, spec: RunSpec) -> str:
        if self.named:
            return self.named
        host = self.cluster_of(spec)
        return f"this host as {host.name}" if host else GUESS

    def limit_bytes(self, spec: RunSpec) -> float:
        """What a rank may use: the run's own limit, the device's memory, a share of the host's."""
        if spec.memory_limit is not None:
            return float(spec.memory_limit)
        host = self.cluster_of(spec)
        if host is not None and not host.device.id.startswith("cpu"):
            return USABLE * host.device.memory_bytes
        return _HOST_SHARE * host_memory_bytes() / spec.gpus

    def forecasts(self, specs: list[RunSpec]) -> list[Prediction]:
        """One for each, in order. A host's usual links depend on the number of ranks."""
        return predict(
            specs,
            cluster=self.cluster_of,
            profile=self.profile,
            calibration=self.calibration,
            stack=self.stack,
            cores=core_count(),
        )

    def predictions(self, specs: list[RunSpec]) -> list[Prediction]:
        return [
            self.planned.get(spec.run_id)
            or replace(answer, limit_bytes=self.limit_bytes(spec), basis=self.basis(spec))
            for spec, answer in zip(specs, self.forecasts(specs), strict=True)
        ]

    def _is_elsewhere(self, spec: RunSpec) -> bool:
        """Ranks of another engine, or of another machine that nobody has named."""
        named = self.profile is not None or self.cluster_of(spec) is not None
        return (not engine_of(self.stack).is_ours or self.remote) and not named

    def predicted(self, spec: RunSpec) -> Prediction | None:
        """None where this machine's description lacks what the run needs (a format's peak)."""
        if self._is_elsewhere(spec):
            return self.planned.get(spec.run_id)
        try:
            return self.planned.get(spec.run_id) or self.predictions([spec])[0]
        except UserError:
            return None

    def too_large(self, spec: RunSpec) -> str:
        """Why a run surely does not fit the hardware, whatever its limit: weights, gradients and
        moments alone are more than there is. '' where it may fit, or nobody knows."""
        if self._is_elsewhere(spec):
            return ""
        state, host = state_bytes(spec), self.cluster_of(spec)
        if host is not None and not host.device.id.startswith("cpu"):
            room, ranks, whose = host.device.memory_bytes, 1, ("a rank", host.device.id)
        else:
            room, ranks, whose = host_memory_bytes(), spec.gpus, ("all ranks", "this host")
        if not room or state * ranks <= room:
            return ""
        return (
            f"weights, gradients and moments of {whose[0]} take {show_bytes(state * ranks)}, "
            f"and {whose[1]} has {show_bytes(room)}"
        )

    def remedies(self, report: RunReport) -> tuple[Remedy, ...]:
        spec, short = report.spec, report.shortage
        limit = (short.limit_bytes if short else 0) or self.limit_bytes(spec)
        used = float(short.live_bytes) if short else 0.0
        try:
            return remedies(spec, self.forecasts, limit_bytes=limit, used_bytes=used)
        except UserError:
            return ()


class Machine(TypedDict, total=False):
    """A cluster, GPUs of one type in typical hosts or a hardware profile, and a calibration; files
    are read. `network`: of a host, '400Gbit/s' or bytes/s, whatever the cluster's name suggests."""

    cluster: str | Cluster | None
    gpu: str | None
    network: str | float | None
    profile: str | None
    calibration: str | None


def machine_of_run(
    stack: str,
    *,
    cluster: str | Cluster | None = None,
    gpu: str | None = None,
    network: str | float | None = None,
    profile: str | None = None,
    calibration: str | None = None,
) -> tuple[Predictor, Callable[[RunSpec], Cluster | None]]:
    """Return the calibration and profile that predict runs of a stack, and the machine of each run,
    as 'plan' has it for as many GPUs. Without a machine only our own engine is predicted, on this
    host, where that has as many GPUs or cores as the run has ranks."""
    known = predictor(profile=profile, calibration=calibration)
    if cluster or gpu or network is not None:
        rate = bytes_per_s_from(network) if isinstance(network, str) else network
        other = None if cluster else profile

        @cache
        def planned(gpus: int) -> Cluster:
            return planned_cluster(cluster=cluster, gpu=gpu, profile=other, gpus=gpus, network=rate)

        return known, lambda run: planned(run.gpus)

    def local(run: RunSpec) -> Cluster | None:
        host = known.cluster_of(run)
        if not (host or profile) and (
            not engine_of(stack.strip()).is_ours or run.gpus > core_count()
        ):
            rule = f"has no machine: {counted(run.gpus, 'rank')} of {stack} do not run on this host"
            hint = "pass cluster, gpu (such as h100-80gb) or profile"
            raise UserError(rule, field="prediction", hint=hint)
        return host

    return known, local


def predictor(
    *,
    cluster: str | Cluster | None = None,
    profile: str | None = None,
    calibration: str | None = None,
) -> Predictor:
    named = known_cluster(cluster) if cluster else None
    measured = read_profile(profile) if profile else None
    known = calibrations.load(calibration) if calibration else None
    parts = [cluster if isinstance(cluster, str) else named.name if named else ""]
    if measured is not None:
        parts.append(f"profile of {measured.host}, {measured.made_at[:16]}")
    if known is not None:
        parts.append(f"calibration {known.name}")
    title = ", ".join(filter(None, parts))
    return Predictor(named, measured, known, title)


def stage_cluster(
    spec: RunSpec, cluster: str | Cluster | None, profile: str | None
) -> tuple[Cluster, str]:
    """Whose links and kernels one rank of a large world is priced by, and where they are from."""
    if cluster:
        known = known_cluster(cluster, spec.gpus)
        return known, cluster if isinstance(cluster, str) else known.name
    if profile:
        measured = read_profile(profile)
        return cluster_of(measured, spec.gpus), f"profile of {measured.host}"
    if spec.device != "cpu" and gpu_count() >= 1:
        host = local_cluster(spec.gpus)
        if host is not None:
            return host, f"{host.device.id}, its usual links"
    return rough_cpu(spec.gpus, spec.gpus), "a rough guess of one core a rank"
