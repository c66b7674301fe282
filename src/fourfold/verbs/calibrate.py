"""calibrate, demo: this machine's kernels, memory and links, measured; and the main job on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any

from fourfold.cost.fit.calibration import to_json
from fourfold.cost.fit.machine import calibration_of, coefficients_of
from fourfold.events import Event, OnEvent, ignore, progress
from fourfold.launch.folder import scratch
from fourfold.launch.local import answers_in, run_job
from fourfold.launch.permit import gpu_count
from fourfold.result.files.store import Store
from fourfold.result.job import Job, Limits
from fourfold.result.profile import HardwareProfile, cluster_of
from fourfold.result.quality import flags
from fourfold.result.report import Prediction, RunReport
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import rank_layouts
from fourfold.search.resolve import resolve
from fourfold.spec import Batch, Cluster, Policy, RunSpec, catalog, check, codec
from fourfold.spec.layout import AXES
from fourfold.spec.words import OURS
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.run_requests import CalibrateRequest
from fourfold.verbs.sites import Submission, launcher_of, left_to, site_of, work_folder

_QUICK_S, _WHOLE_S = 11.0, 130.0
CPU_RANKS = 4


@dataclass(frozen=True, slots=True)
class Calibrated(Answer):
    """A profile as its file, with the coefficients that follow from it; `ranks`: those of the
    cluster that this host is described as."""

    profile: Annotated[HardwareProfile, codec.AS_FILE]
    knobs: dict[str, float]
    ranks: Annotated[int, codec.HIDDEN]

    @classmethod
    def of_profile(cls, profile: HardwareProfile, ranks: int) -> Calibrated:
        return cls(profile, coefficients_of(profile), ranks)

    def rows(self) -> list[dict[str, Any]]:
        """One for each measured point, by kind."""
        kinds = ("gemms", "attentions", "copies", "collectives", "shared")
        plain = codec.encode(self.profile)
        return [{"kind": kind, **point} for kind in kinds for point in plain[kind]]

    def profile_json(self) -> str:
        return codec.to_json(self.profile)

    def cluster_toml(self) -> str:
        return codec.to_toml(cluster_of(self.profile, self.ranks))

    def calibration_json(self) -> str:
        cluster = cluster_of(self.profile, self.ranks)
        return to_json(calibration_of(self.profile, cluster))


def calibrate(request: CalibrateRequest | None = None, *, on_event: OnEvent = ignore) -> Calibrated:
    """The profile of this host, or of nodes of a site and the links between them; the torch
    processes are gone when it returns."""
    request = request or CalibrateRequest()
    job, site = _job(request), site_of(request)
    with work_folder(job, site) as folder:
        (profile,) = answers_in(
            folder, job, HardwareProfile, (None,), progress(on_event), launcher_of(site)
        )
    of_hosts = job.ranks if site else max(point.ranks for point in profile.shared)
    return Calibrated.of_profile(profile, request.ranks or of_hosts)


def submit_calibrate(request: CalibrateRequest) -> Submission:
    """Leave it to the site's scheduler; `calibrate` with the same request follows it and has the
    profile. With `print_launch` nothing is submitted."""
    return left_to(site_of(request), _job(request), only_print=request.print_launch)


def _job(request: CalibrateRequest) -> Job:
    ranks, device, quick = request.ranks, request.device, request.quick
    check.whole(1, 1024, ranks=ranks)
    check.whole(1, 4096, nodes=request.nodes)
    site = site_of(request)
    gpus = 0
    if device != "cpu":
        gpus = gpu_count() if site is None else site.gpus_per_node * (site.ask_gpus != "no")
    check.that(device != "cuda" or gpus, "device", device, "needs a GPU, and none is visible")
    options = {"quick": "true" if quick else "false", "device": "cuda" if gpus else "cpu"}
    options["seconds"] = str(_QUICK_S if quick else _WHOLE_S)
    measured = request.nodes * site.gpus_per_node if site else gpus or CPU_RANKS
    return Job(
        job="calibrate",
        ranks=measured,
        options=tuple(sorted(options.items())),
        limits=Limits(start_s=300.0, step_s=120.0),
    )


@dataclass(frozen=True, slots=True)
class Scene:
    model: str
    batch: Batch
    policy: Policy
    ranks: int


def scene(gpus: int) -> Scene:
    if gpus:
        batch = Batch(seq_len=2048, micro_batch=1, global_batch=8 * gpus)
        return Scene("llama-3.2-1b-untied", batch, Policy(precision="bf16-mixed"), gpus)
    batch = Batch(seq_len=128, micro_batch=1, global_batch=16)
    return Scene("llama-mini", batch, Policy(precision="fp32"), CPU_RANKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """A planned layout and what became of it; None: not measured."""

    layout: str
    sharding: str
    micro_batch: int
    predicted_s: float
    predicted_s_low: float
    predicted_s_high: float
    predicted_peak_bytes: float
    outcome: str
    measured_s: float | None = None
    measured_peak_bytes: int | None = None
    inside_interval: bool | None = None
    flags: list[str] | None = None
    loss: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Demo(Answer):
    TABLE = "runs"
    model: str
    cluster: str
    runs: tuple[DemoRun, ...]
    scene: Annotated[Scene, codec.HIDDEN]
    device: Annotated[str, codec.HIDDEN]

    @classmethod
    def of_runs(cls, scene: Scene, cluster: Cluster, runs: Sequence[DemoRun]) -> Demo:
        return cls(scene.model, cluster.name, tuple(runs), scene, cluster.device.name)


def demo(
    *, layouts: int = 3, steps: int = 6, store: str | None = None, on_event: OnEvent = ignore
) -> Demo:
    """`store`: where the runs are kept, with what was predicted (None: nowhere)."""
    layouts, steps = min(max(layouts, 1), 8), min(max(steps, 1), 1000)
    chosen = scene(gpu_count())
    on_event(Event("1 of 3: measuring this machine (fourfold calibrate --quick) ..."))
    profile = calibrate(CalibrateRequest(quick=True), on_event=on_event).profile
    cluster = cluster_of(profile, chosen.ranks)
    on_event(
        Event(
            f"2 of 3: planning {chosen.model} on {counted(chosen.ranks, 'rank')}"
            " (fourfold plan) ..."
        )
    )
    planned = _plan(chosen, cluster, profile, layouts, on_event)
    on_event(
        Event(
            f"3 of 3: running {counted(len(planned), 'layout')},"
            f" {counted(steps, 'timed step')} each ..."
        )
    )
    reports = _measure([spec for spec, _ in planned], steps, on_event)
    if store is not None:
        basis = f"profile of {profile.host}, {profile.made_at[:16]}"
        for (_, said), report in zip(planned, reports, strict=True):
            Store(store).keep(replace(report, predicted=replace(said, basis=basis)))
    runs = [_run(*one, report) for one, report in zip(planned, reports, strict=True)]
    return Demo.of_runs(chosen, cluster, runs)


def _plan(
    chosen: Scene, cluster: Cluster, profile: HardwareProfile, layouts: int, on_event: OnEvent
) -> list[tuple[RunSpec, Prediction]]:
    """The fastest plan and the best ones that divide the work in other ways."""
    known = calibration_of(profile, cluster)
    engine = resolve(OURS, cluster, known)
    ask = PlanQuery(
        model=catalog.model(chosen.model),
        resolved=replace(engine, no_rows="no run was measured here yet"),
        gpus=chosen.ranks,
        batch=chosen.batch,
        policy=chosen.policy,
        evidence={},
        fixed={"virtual_stages": 1, "recompute": "none"},
        explore=True,
    )
    found = rank_layouts(ask)
    on_event(Event(f"   {found.grid.legal:,} legal plans, {found.fitting:,} fit"))
    planned: dict[str, tuple[RunSpec, Prediction]] = {}
    for i in range(len(found)):
        layout = found.layout(i)
        axes = " ".join(axis for axis in AXES if layout.size(axis) > 1)
        if axes in planned:
            continue
        planned[axes] = (found.spec(i), found.predicted.one(i))
        if len(planned) == layouts:
            break
    return list(planned.values())


def _measure(specs: list[RunSpec], steps: int, on_event: OnEvent) -> list[RunReport]:
    timed = tuple(replace(spec, steps=steps, warmup=2) for spec in specs)
    with scratch() as folder:
        # Probes before and after each run tell a changed machine from a wrong prediction.
        job = Job(job="run", specs=timed, options=(("probe_s", "0.5"),))
        report = run_job(job, folder, progress=progress(on_event))
    return list(report.runs)


def _run(spec: RunSpec, predicted: Prediction, report: RunReport) -> DemoRun:
    run = DemoRun(
        layout=str(spec.layout),
        sharding=spec.policy.sharding,
        micro_batch=spec.batch.micro_batch,
        predicted_s=predicted.step_s,
        predicted_s_low=predicted.step_s_low,
        predicted_s_high=predicted.step_s_high,
        predicted_peak_bytes=predicted.peak_bytes,
        outcome=report.outcome,
        failure=report.failure.message if report.failure else None,
    )
    timed = [step for step in report.steps if not step.warmup]
    if report.outcome != "ok" or not timed:
        return run
    measured_s = median(step.seconds for step in timed)
    return replace(
        run,
        measured_s=measured_s,
        measured_peak_bytes=max(memory.peak_bytes for memory in report.memory),
        inside_interval=predicted.step_s_low <= measured_s <= predicted.step_s_high,
        flags=flags(report),
        loss=next((s.loss for s in reversed(timed) if s.loss is not None), None),
    )
