"""sweep: measure many runs; every outcome is stored, a stopped sweep resumes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from fourfold.cost.count.flops import Convention, FlopsQuery, convention
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.launch.campaign import Campaign, Done
from fourfold.result.report import OUTCOMES, Prediction
from fourfold.search.predict import run_s
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import Combination
from fourfold.units import show_seconds
from fourfold.verbs import Answer
from fourfold.verbs.bench import choose_micro_batch, permit_of, warn_of_emulation
from fourfold.verbs.machine import Predictor
from fourfold.verbs.run_requests import SweepRequest
from fourfold.verbs.sites import Submission, campaign_of, submission
from fourfold.verbs.sweep_source import Prepared, SkippedRun, Source, predictions, prepared

Figure = Annotated[float | None, codec.NULL]  # None: not measured, or not predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPrediction:
    """The seconds and bytes that were predicted for a run before it ran."""

    step_s: Figure
    step_s_low: Figure
    step_s_high: Figure
    peak_bytes: Figure
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRun:
    """A combination of a sweep, and what became of it."""

    combination: dict[str, Any]
    outcome: str
    run_id: str
    folder: str
    resumed: bool
    micro_batch: int
    step_s: Figure
    step_s_low: Figure
    step_s_high: Figure
    tokens_s_gpu: Figure
    tflops_gpu: Figure
    flop_rule: str
    peak_bytes: Figure
    predicted: SweepPrediction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept(Answer):
    """A run for each combination, in order; `counts` by outcome stand in JSON by themselves and
    among the other numbers. `is_guess`: predictions are rough, from the cores alone."""

    TABLE = "runs"
    total: int
    outcomes: Annotated[dict[str, int], codec.INLINE]
    counts: dict[str, int]
    dropped: int
    same: int
    skipped: tuple[SkippedRun, ...]
    runs: tuple[SweptRun, ...]
    is_guess: Annotated[bool, codec.HIDDEN]


@dataclass(frozen=True, slots=True, kw_only=True)
class IllegalRun:
    """A combination that no engine may run, and why."""

    combination: dict[str, Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A combination that a sweep would run, and its predicted seconds and bytes."""

    combination: dict[str, Any]
    run_id: str
    model: str
    layout: str
    gpus: int
    seq_len: int
    micro_batch: int | str
    global_batch: int
    precision: str
    sharding: str
    recompute: str
    runs_left: int
    step_s: float
    step_s_low: float
    step_s_high: float
    peak_bytes: float
    fits: Annotated[bool | None, codec.NULL]
    run_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan(Answer):
    """The runs that a sweep would start; `is_guess` as of `Swept`."""

    total: int
    illegal: tuple[IllegalRun, ...]
    planned: tuple[PlannedRun, ...]
    skipped: tuple[SkippedRun, ...]
    to_run: int
    predicted_s: float
    dropped: int
    same: int
    basis: str
    is_guess: Annotated[bool, codec.HIDDEN]

    def rows(self) -> list[dict[str, Any]]:
        """The planned and the illegal runs, a column for every axis."""
        runs = [("planned", run) for run in self.planned]
        runs += [("illegal", run) for run in self.illegal]
        rows = []
        for outcome, run in runs:
            plain = codec.encode(run)
            rows.append({"outcome": outcome, **plain.pop("combination"), **plain})
        return rows


def sweep(
    source: Source, request: SweepRequest | None = None, *, on_event: OnEvent = ignore
) -> Swept:
    """Run every combination; a failed one is recorded and the sweep goes on."""
    request = request or SweepRequest()
    ready = prepared(source, request, on_event)
    campaign = campaign_of(request, ready.known, permit_of(request), on_event)
    runs = _run_all(campaign, ready, request, on_event)
    counts = Counter(run.outcome for run in runs)
    by_outcome = {str(outcome): counts[outcome] for outcome in OUTCOMES}
    assert sum(by_outcome.values()) == ready.expansion.total
    return Swept(
        total=ready.expansion.total,
        outcomes=by_outcome,
        counts=by_outcome,
        dropped=ready.expansion.dropped,
        same=ready.expansion.same,
        skipped=tuple(ready.skipped),
        runs=tuple(runs),
        is_guess=ready.is_guess,
    )


def plan_sweep(
    source: Source, request: SweepRequest | None = None, *, on_event: OnEvent = ignore
) -> SweepPlan:
    """What the same sweep would run; nothing is started."""
    request = request or SweepRequest()
    ready = prepared(source, request, on_event)
    legal = [ready.expansion.combinations[place] for place in ready.legal]
    campaign = campaign_of(request, ready.known, permit_of(request), on_event)
    missing = [campaign.missing(one.spec, request.repeat) for one in legal]
    answers = predictions(ready.expansion, ready.legal, ready.known)
    rows = list(zip(legal, answers, missing, strict=True))
    return SweepPlan(
        total=ready.expansion.total,
        illegal=tuple(
            IllegalRun(combination=dict(one.varied), reason=why)
            for one, why in zip(ready.expansion.combinations, ready.refused, strict=True)
            if why
        ),
        planned=tuple(_planned(*row) for row in rows),
        skipped=tuple(ready.skipped),
        to_run=sum(missing),
        predicted_s=sum(run_s(run.spec, one.step_s) * left for run, one, left in rows),
        dropped=ready.expansion.dropped,
        same=ready.expansion.same,
        basis=answers[0].basis if answers else "",
        is_guess=ready.is_guess,
    )


def _run_all(
    campaign: Campaign, ready: Prepared, request: SweepRequest, on_event: OnEvent
) -> list[SweptRun]:
    rule = convention(request.convention)
    pairs = list(zip(ready.expansion.combinations, ready.refused, strict=True))
    for combination, why in pairs:
        if why:
            on_event(Event(f"illegal: {combination.label}: {why}"))
    campaign.clear_up()
    if campaign.queue is None and not request.engine:
        warn_of_emulation((pairs[place][0].spec for place in ready.legal), on_event)
    runs: list[SweptRun] = []
    with campaign.queued(_to_queue(campaign, ready, request.repeat)):
        for number, (one, why) in enumerate(pairs, start=1):
            done = _run(campaign, one.spec, why, request.repeat, ready.known, on_event)
            runs.append(_row(one, done, why, rule))
            on_event(Event(f"[{number}/{ready.expansion.total}] {one.label}: {_ended(done)}"))
    return runs


def _to_queue(campaign: Campaign, ready: Prepared, repeats: int) -> list[RunSpec]:
    """Runs that are known before any of them has run."""
    if campaign.queue is None:
        return []
    specs = [ready.expansion.combinations[place].spec for place in ready.legal]
    sized = [spec for spec in specs if spec.batch.micro_batch]
    return [spec for spec in sized for _ in range(campaign.missing(spec, repeats))]


def submit_sweep(
    source: Source, request: SweepRequest, *, on_event: OnEvent = ignore
) -> Submission:
    """Leave the runs to the site's scheduler; `sweep` with the same source follows them. With
    `print_launch` nothing is submitted."""
    ready = prepared(source, request, on_event)
    campaign = campaign_of(request, ready.known, permit_of(request), on_event)
    if campaign.queue is None:
        raise UserError("needs a site", field="detach", hint="--on slurm or --on SITE")
    specs = campaign.supported(_to_queue(campaign, ready, request.repeat))
    return submission(campaign.queue, specs, request)


def _run(
    campaign: Campaign, spec: RunSpec, why: str, repeats: int, known: Predictor, on_event: OnEvent
) -> Done:
    if why:
        return campaign.refuse(spec, why)
    if not spec.batch.micro_batch:
        spec, _ = choose_micro_batch(spec, campaign, known, on_event)
    return campaign.run(spec, repeats)[-1]


def _ended(done: Done) -> str:
    step_s = done.stored.summary.step_s
    text = done.outcome + (f", {show_seconds(step_s)} per step" if step_s is not None else "")
    return f"{text} (already stored)" if done.resumed else text


def _row(one: Combination, done: Done, why: str, rule: Convention) -> SweptRun:
    summary, spec = done.stored.summary, one.spec
    predicted = summary.predicted
    tflops = None
    if summary.tokens_s_gpu:
        tflops = rule.count(FlopsQuery.of_spec(spec)).model * summary.tokens_s_gpu / 1e12
    return SweptRun(
        combination=dict(one.varied),
        outcome=done.outcome,
        run_id=summary.run_id,
        folder=str(done.stored.folder),
        resumed=done.resumed,
        micro_batch=summary.spec.batch.micro_batch,
        step_s=summary.step_s,
        step_s_low=summary.step.low_s if summary.step else None,
        step_s_high=summary.step.high_s if summary.step else None,
        tokens_s_gpu=summary.tokens_s_gpu,
        tflops_gpu=tflops,
        flop_rule=rule.id,
        peak_bytes=summary.peak_bytes,
        predicted=SweepPrediction(
            step_s=predicted.step_s if predicted else None,
            step_s_low=predicted.step_s_low if predicted else None,
            step_s_high=predicted.step_s_high if predicted else None,
            peak_bytes=predicted.peak_bytes if predicted else None,
            basis=predicted.basis if predicted else "",
        ),
        reason=why or summary.failure,
    )


def _planned(run: Combination, predicted: Prediction, left: int) -> PlannedRun:
    spec = run.spec
    return PlannedRun(
        combination=dict(run.varied),
        run_id=spec.run_id,
        model=spec.model.name,
        layout=str(spec.layout),
        gpus=spec.gpus,
        seq_len=spec.batch.seq_len,
        micro_batch=spec.batch.micro_batch or "auto",
        global_batch=spec.batch.global_batch,
        precision=spec.policy.precision_name,
        sharding=spec.policy.sharding,
        recompute=spec.policy.recompute,
        runs_left=left,
        step_s=predicted.step_s,
        step_s_low=predicted.step_s_low,
        step_s_high=predicted.step_s_high,
        peak_bytes=predicted.peak_bytes,
        fits=predicted.fits,
        run_s=run_s(spec, predicted.step_s),
    )
