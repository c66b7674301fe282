"""one_rank: one rank of a large world on this device, with real kernels and without its peers. It
is no run of its layout, so the run store, reports and fits never see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fourfold import files
from fourfold.cost import one_rank as model
from fourfold.cost.fit import calibration
from fourfold.cost.fit.machine import coefficients_of
from fourfold.cost.memory.peak import USABLE, memory
from fourfold.cost.one_rank import StageCompute
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.events import OnEvent, ignore, progress
from fourfold.launch.folder import scratch
from fourfold.launch.local import run_job
from fourfold.result.job import Job, Limits, answer_file
from fourfold.result.one_rank import (
    OneRankResult,
    gap_pct,
    kernels_layer_s,
    kernels_micro_s,
    layer_s,
    micro_s,
)
from fourfold.result.report import Failure, Outcome, RunReport
from fourfold.result.trace import trace_path
from fourfold.search.fixes import remedies
from fourfold.search.legal import require_legal
from fourfold.search.predict import predict
from fourfold.search.resolve import resolve
from fourfold.spec import RunSpec, check, codec
from fourfold.spec.engine import engine_of
from fourfold.spec.run import AnyRun, put_layout
from fourfold.spec.words import OURS
from fourfold.verbs import Answer
from fourfold.verbs.bench import described, permit_of
from fourfold.verbs.machine import read_profile, stage_cluster
from fourfold.verbs.run_requests import OneRankRequest
from fourfold.verbs.run_shown import post_mortem

_WARMUP, _STEPS = 2, 3
_LIMITS = Limits(start_s=1800.0, step_s=900.0)


class StagePlanner:
    """What the planner says of one stage of a run, on the cluster that is asked about."""

    def __init__(self, request: OneRankRequest, spec: RunSpec) -> None:
        self.spec = spec
        self.cluster, self.basis = stage_cluster(spec, request.cluster, request.profile)
        has_experts = spec.model.moe is not None
        entry = resolve(OURS, self.cluster, calibration.shipped(), experts=has_experts).entry
        known = coefficients_of(read_profile(request.profile)) if request.profile else {}
        on_cpu = {"base_gib": 0.0} if self.cluster.device.id.startswith("cpu") else {}
        self.entry = replace(entry, coefficients={**entry.coefficients, **known, **on_cpu})
        self.columns = columns_of([spec], cluster=self.cluster, engine=engine_of(OURS))

    def fullest_stage(self) -> int:
        room = memory(self.columns, self.entry.coefficients)
        at_first = float(room.first_bytes[0]) >= float(room.last_bytes[0])
        return 0 if at_first else self.spec.layout.pp - 1

    def post_mortem(self, report: RunReport) -> dict[str, Any]:
        """An out-of-memory as bench tells it: held, predicted, and what would fit."""
        limit = float(report.spec.memory_limit or USABLE * self.cluster.device.memory_bytes)
        forecasts = partial(predict, cluster=self.cluster)
        fixes = remedies(report.spec, forecasts, limit_bytes=limit)
        own = replace(forecasts([report.spec])[0], limit_bytes=limit, basis=self.basis)
        return post_mortem(replace(report, predicted=own, remedies=fixes))


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRank:
    """One rank of one layout: what was measured of it, and what the planner says.

    `planner_step_s`: predicted before anything was measured. Where the rank failed, `failure` and
    after an out-of-memory error `post_mortem` say why, and nothing is measured.
    """

    model: str
    layout: str
    world: int
    rank: int
    place: dict[str, int]
    spec: Annotated[RunSpec, codec.SPARSE]
    outcome: Outcome
    planner_basis: str
    planner_step_s: float
    planner_step_s_low: float
    planner_step_s_high: float
    failure: Failure | None = None
    post_mortem: dict[str, Any] | None = None
    measured: OneRankResult | None = None
    # GEMMs and attention of a layer timed alone, and the same layer in the engine.
    kernels_layer_s: float | None = None
    engine_layer_s: float | None = None
    layer_gap_pct: float | None = None
    bare_micro_s: float | None = None
    engine_micro_s: float | None = None
    predicted: StageCompute | None = None
    # Measured compute of a step with predicted traffic and bubble, and its parts.
    step_s_with_modelled_traffic: float | None = None
    step_parts_s: dict[str, float] | None = None

    def row(self) -> dict[str, Any]:
        """Its numbers, without kernels, phases and the whole spec."""
        plain = codec.encode(self)
        row = {n: v for n, v in plain.items() if not isinstance(v, dict | list)}
        row |= {"sharding": self.spec.policy.sharding, "micro_batch": self.spec.batch.micro_batch}
        if self.measured is not None:
            row |= {"compute_s": self.measured.compute_s, "peak_bytes": self.measured.peak_bytes}
        return row | {"predicted": plain.get("predicted", {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRanks(Answer):
    """The ranks that were measured here, each without its peers."""

    kind: str = "stand-in"
    ranks: tuple[OneRank, ...]

    @property
    def ok(self) -> bool:
        return all(rank.measured is not None for rank in self.ranks)

    def rows(self) -> list[dict[str, Any]]:
        return [rank.row() for rank in self.ranks]


def one_rank(
    run: AnyRun, request: OneRankRequest | None = None, *, on_event: OnEvent = ignore
) -> OneRanks:
    """Each of the request's layouts is put into the run."""
    request = request or OneRankRequest()
    run = codec.encode(run) if isinstance(run, RunSpec) else run
    specs = [_spec(run, request, text) for text in request.layouts or ("",)]
    planners = [StagePlanner(request, spec) for spec in specs]
    ranks = [_rank(request.as_rank, planner) for planner in planners]
    for spec in specs:
        require_legal(spec)
    options = [("ranks", ",".join(map(str, ranks)))]
    if request.micro_batches is not None:
        options.append(("micro_batches", ",".join([str(request.micro_batches)] * len(specs))))
    if request.trace:
        options.append(("trace", str(trace_path(request.trace))))
    measured = measure_ranks(specs, options, request, on_event)
    return OneRanks(
        ranks=tuple(
            _beside(planner, rank, _of_rank(report, rank), result)
            for planner, rank, (report, result) in zip(planners, ranks, measured, strict=True)
        )
    )


def _beside(
    planner: StagePlanner, rank: int, report: RunReport, result: OneRankResult | None
) -> OneRank:
    """What came back of a rank, beside the planner's numbers and, if it ran, the step of both."""
    spec, coefficients = planner.spec, planner.entry.coefficients
    step = predictions(planner.columns, planner.entry).one(0)
    answer = OneRank(
        model=spec.model.name,
        layout=str(spec.layout),
        world=spec.gpus,
        rank=rank,
        place=spec.layout.coordinates(rank),
        spec=spec,
        outcome=report.outcome,
        planner_basis=planner.basis,
        planner_step_s=step.step_s,
        planner_step_s_low=step.step_s_low,
        planner_step_s_high=step.step_s_high,
    )
    if result is None:
        is_oom = report.outcome == "oom"
        story = planner.post_mortem(report) if is_oom else None
        return replace(answer, failure=report.failure, post_mortem=story)
    parts = model.joined(planner.columns, coefficients, result)
    kernels_s, engine_s = kernels_layer_s(result), layer_s(result)
    return replace(
        answer,
        measured=result,
        kernels_layer_s=kernels_s,
        engine_layer_s=engine_s,
        layer_gap_pct=gap_pct(engine_s, kernels_s),
        bare_micro_s=kernels_micro_s(result),
        engine_micro_s=micro_s(result),
        predicted=model.predicted(planner.columns, coefficients, result),
        step_s_with_modelled_traffic=sum(parts.values()),
        step_parts_s=parts,
    )


def measure_ranks(
    specs: Sequence[RunSpec],
    options: Sequence[tuple[str, str]],
    request: OneRankRequest,
    on_event: OnEvent = ignore,
) -> list[tuple[RunReport, OneRankResult | None]]:
    """Run one rank of each spec; the result is None where the report tells of a failure."""
    job = Job(job="one-rank", specs=tuple(specs), options=tuple(options), limits=_LIMITS)
    with scratch() as folder:
        report = run_job(job, folder, progress=progress(on_event), permit=permit_of(request))
        return [
            (run, codec.from_json(OneRankResult, files.read_text(answer_file(folder, task))))
            if run.outcome == "ok"
            else (run, None)
            for task, run in enumerate(report.runs)
        ]


def _of_rank(report: RunReport, rank: int) -> RunReport:
    """The only process calls itself 0; who it stood for is who failed."""
    if report.failure is None or report.failure.rank < 0:
        return report
    return replace(report, failure=replace(report.failure, rank=rank))


def _spec(run: Mapping[str, Any], request: OneRankRequest, text: str) -> RunSpec:
    """The run under the layout text, which may add a sharding and any fields."""
    table = put_layout(run, text, replaces=True)
    if request.world is not None:
        table["gpus"] = request.world
    table = {"steps": _STEPS, "warmup": _WARMUP, **table}
    spec = described(table, ranks=1)
    rule = "must be a number here, not 'auto'"
    check.that(spec.batch.micro_batch, "micro_batch", None, rule, "pass a micro batch")
    return replace(spec, warmup=max(2, spec.warmup))


def _rank(wanted: str, planner: StagePlanner) -> int:
    spec = planner.spec
    stages = {"first": 0, "last": spec.layout.pp - 1, "worst": planner.fullest_stage()}
    if wanted in stages:
        return stages[wanted] * spec.layout.stride("pp")
    rule = f"must be a rank of {spec.layout}, 0 to {spec.gpus - 1}, or first, last or worst"
    hint = f"the last rank is {spec.gpus - 1}"
    check.that(wanted.isdecimal() and int(wanted) < spec.gpus, "as-rank", wanted, rule, hint)
    return int(wanted)
