"""train: train a model in a folder, or resume one that has checkpoints, on any layout and world."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Annotated, Any, NamedTuple

from fourfold import files
from fourfold.cost.count.flops import DEFAULT, FlopsQuery, convention
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore, progress
from fourfold.launch.folder import exclusive
from fourfold.launch.local import run_job
from fourfold.launch.permit import Permit
from fourfold.launch.slurm import Slurm, living, script_of
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.files import curve
from fourfold.result.files.curve import Point
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.result.job import JOB_FILE, Job, JobReport, answer_file
from fourfold.result.report import Failure
from fourfold.result.trace import trace_window
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.supported import left_out
from fourfold.spec.tokens import read_info
from fourfold.spec.train import TrainSettings
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.bench import permit_of, tokens_of, warn_of_emulation
from fourfold.verbs.run_requests import TrainRequest
from fourfold.verbs.sites import Submission, described_job, launcher_of, site_of, submission_of
from fourfold.verbs.train_start import (
    described,
    end_killed,
    known_table,
    must_be_legal,
    must_have_packages,
    prepared,
)

TrainTable = Callable[[dict[str, Any]], Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSummary:
    """A loss curve in base units; speed over the last tenth of the steps."""

    first_loss: float
    last_loss: float
    recent_loss: float
    recent_steps: int
    best_loss: float
    best_step: int
    tokens: int
    sequences: int
    step_s: float
    tokens_s: float
    mfu_pct: Annotated[float | None, codec.NULL]
    trained_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState(Answer):
    """A training folder: how its last job ended, its newest checkpoint, and its curve."""

    outcome: str
    note: str | None = None
    failure: Failure | None = None
    folder: str
    steps: int
    checkpoint: Annotated[str | None, codec.NULL]
    unigram_nats: Annotated[float | None, codec.NULL]
    steps_done: int
    curve: Annotated[CurveSummary | None, codec.INLINE]  # None: no step is done
    convention: str
    points: Annotated[Sequence[Point], codec.HIDDEN]


def train(run: TrainTable, request: TrainRequest, *, on_event: OnEvent = ignore) -> TrainingState:
    """`run`: a run's table with a [train] table; or a function that makes it of what the folder
    was trained with."""
    folder, spec, settings = _asked(run, request, on_event)
    on = launcher_of(site_of(request))
    with folder.locked(), exclusive(folder.root):
        try:
            job = _followed(folder, on, on_event)
            job = job or _job(folder, spec, settings, request, on_event)
            if job is None:
                return _shown(folder, settings, TrainingEnd("ok"), request.convention, on_event)
            report = _trained(folder, job, permit_of(request), on, on_event)
            ended = _ended(folder, report, on_event)
            return _shown(folder, settings, ended, request.convention, on_event)
        finally:
            _settle(folder, on_event)


def submit_train(
    run: TrainTable, request: TrainRequest, *, on_event: OnEvent = ignore
) -> Submission:
    """Leave the training to the site's scheduler; `train` in the same folder follows it. With
    `print_launch` nothing is submitted."""
    if request.fresh:
        raise UserError("cannot be combined with --detach and --print-launch", field="--fresh")
    folder, spec, settings = _asked(run, request, on_event)
    on = launcher_of(site_of(request))
    if on is None:
        raise UserError("needs a site", field="detach", hint="--on slurm or --on SITE")
    with folder.locked(), exclusive(folder.root):
        job = _followed(folder, on, on_event)
        if job is None:
            job = _job(folder, spec, settings, request, on_event)
            if job is None:
                return Submission()
            permit_of(request).require(job.specs)
            return submission_of(job, folder.job, on, only_print=request.print_launch)
        if request.print_launch:
            return Submission(scripts=(script_of(folder.job),))
    return Submission((described_job(folder.job),))


def _asked(
    run: TrainTable, request: TrainRequest, on_event: OnEvent
) -> tuple[TrainingFolder, RunSpec, TrainSettings]:
    hint = "name a folder for it, as --out trained"
    folder = TrainingFolder(check.given(request.out, "out", hint))
    if folder.aside.exists():  # a --fresh was killed
        with folder.locked(), exclusive(folder.root):
            end_killed(folder, on_event)
            _settle(folder, on_event)
    table = run(known_table(folder, request)) if callable(run) else run
    spec, settings = described(table, folder, request, on_event)
    must_be_legal(spec, permit_of(request), is_here=site_of(request) is None)
    if without := left_out(spec.model):
        on_event(Event(f"note: {spec.model.name} is trained {without}"))
    must_have_packages(settings)
    if request.trace_steps:
        trace_window(request.trace_steps)
    if site_of(request) is None:
        warn_of_emulation([spec], on_event)
    return folder, spec, settings


def _followed(folder: TrainingFolder, on: Slurm | None, on_event: OnEvent) -> Job | None:
    """The training that Slurm has of this folder, queued or at work."""
    job_id = living(folder.job)
    if not job_id:
        return None
    if on is None:
        rule = f"is in use by Slurm job {job_id}"
        hint = f"follow it with --on, or end it with scancel {job_id}"
        raise UserError(rule, field="out", value=str(folder.root), hint=hint)
    on_event(Event(f"following Slurm job {job_id}, which keeps the settings it was given"))
    return codec.from_json(Job, files.read_text(folder.job / JOB_FILE))


def _job(
    folder: TrainingFolder,
    spec: RunSpec,
    settings: TrainSettings,
    request: TrainRequest,
    on_event: OnEvent,
) -> Job | None:
    """From the newest whole checkpoint on; None where all steps are done."""
    data = tokens_of(spec)
    start = prepared(request, folder, spec, settings, data.sha256 if data else "", on_event)
    if start is not None and start.step >= settings.steps:
        on_event(Event(f"all {counted(settings.steps, 'step')} are done"))
        return None
    folder.describe(spec, settings)
    options = {"out": str(folder.root), "load": start.folder.name if start else ""}
    if request.trace_steps:
        options["trace_steps"] = request.trace_steps
        (first, last), done = trace_window(request.trace_steps), start.step if start else 0
        if last <= done or first > settings.steps:  # no error: a batch job repeats its command
            on_event(Event(f"nothing is traced: steps {done + 1} to {settings.steps} are to come"))
    return Job(job="train", specs=(spec,), options=tuple(options.items()), train=settings)


def show_training(path: str, *, rule: str = DEFAULT, on_event: OnEvent = ignore) -> TrainingState:
    folder = TrainingFolder(path)
    table = folder.described()
    why = "is not a training folder: it has no train.toml"
    check.that(table, "show", path, why, "pass the --out of a 'fourfold train'")
    settings = codec.decode(TrainSettings, table.get("train", {}), "train")
    return _shown(folder, settings, None, rule, on_event)


class TrainingEnd(NamedTuple):
    """The outcome of a training's last job, and a note or the failure behind it."""

    outcome: str
    note: str | None = None
    failure: Failure | None = None


def _ended(folder: TrainingFolder, report: JobReport, on_event: OnEvent) -> TrainingEnd:
    failure = report.failure
    if failure is None:
        answer = texts.parse_json(files.read_text(answer_file(folder.job, 0), field="answer"))
        if isinstance(answer, dict) and answer["stopped"]:
            return TrainingEnd("stopped", "on request; run the same command to continue")
        return TrainingEnd(report.outcome)
    on_event(Event(f"{report.outcome}: {failure.who}: {failure.said}"))
    on_event(Event(f"logs of the ranks: {folder.job}"))
    return TrainingEnd(report.outcome, failure=failure)


def _settle(folder: TrainingFolder, on_event: OnEvent) -> None:
    note = folder.finish_fresh()
    if note:
        on_event(Event(note))


def _trained(
    folder: TrainingFolder, job: Job, permit: Permit, on: Slurm | None, on_event: OnEvent
) -> JobReport:
    assert job.train is not None
    apart, say = checkpoints.set_apart(folder.checkpoints), _progress(folder, job.train, on_event)
    report = run_job(job, folder.job, progress=say, permit=permit, on=on)
    for name, reason in checkpoints.set_apart(folder.checkpoints).items():
        if apart.get(name) != reason:
            passed = f"skipped a checkpoint, kept as {name}, for the one before: {reason}"
            on_event(Event(passed))
    return report


def _progress(
    folder: TrainingFolder, settings: TrainSettings, on_event: OnEvent
) -> Callable[[str], None]:
    """Where the training stands, from its own curve; before the first step, what the ranks say."""
    show = progress(on_event)

    def say(text: str) -> None:
        if folder.aside.exists() and folder.newest() is not None:
            folder.finish_fresh()
        point = curve.last(folder.metrics)
        if point is None or "steps done" not in text or text.startswith("0 steps"):
            show(text)
            return
        left_s = (settings.steps - point.step) * point.step_s
        left = f", {timedelta(seconds=math.ceil(left_s))} left" if left_s else ", saving"
        show(
            f"step {point.step} of {settings.steps}, loss {point.loss:.4f}, lr {point.lr:.3g}, "
            f"{point.tokens_per_s:,.0f} tokens/s{left}"
        )

    return say


def _unigram_nats(folder: TrainingFolder) -> float | None:
    """What a model that knows only frequencies would reach; None without a readable token file."""
    name = folder.described().get("data")
    try:
        return read_info(name).unigram_nats if isinstance(name, str) and name else None
    except UserError:  # it has moved since
        return None


def _mfu_factor(rule: str, folder: TrainingFolder) -> float:
    """Return the MFU by a convention over that by the default one, which the curve has."""
    if rule == DEFAULT:
        return 1.0
    table = {name: part for name, part in folder.described().items() if name != "train"}
    ask = FlopsQuery.of_spec(codec.load(RunSpec, table))
    return convention(rule).count(ask).model / convention(DEFAULT).count(ask).model


def _shown(
    folder: TrainingFolder,
    settings: TrainSettings,
    end: TrainingEnd | None,
    rule: str,
    on_event: OnEvent,
) -> TrainingState:
    read = curve.parse(folder.metrics)
    newest = folder.newest()
    if read.bad:
        lines = counted(len(read.bad), "line")
        on_event(Event(f"left out {lines} of {folder.metrics} that can't be read"))
    for name, error in checkpoints.damaged(folder.checkpoints):
        on_event(Event(f"skipped {name}: {error.rule}"))
    rule, summary = convention(rule).id, summarize_curve(read.points)
    if summary is not None and summary.mfu_pct is not None:
        factor = _mfu_factor(rule, folder)
        summary = replace(summary, mfu_pct=summary.mfu_pct * factor)
    if end is None:
        done = newest is not None and newest.step >= settings.steps
        end = TrainingEnd("done" if done else "not finished")
    return TrainingState(
        outcome=end.outcome,
        note=end.note,
        failure=end.failure,
        folder=str(folder.root),
        steps=settings.steps,
        checkpoint=newest.folder.name if newest else None,
        unigram_nats=_unigram_nats(folder),
        steps_done=read.points[-1].step if read.points else 0,
        curve=summary,
        convention=rule,
        points=read.points,
    )


def summarize_curve(points: Sequence[Point]) -> CurveSummary | None:
    if not points:
        return None
    recent = points[-max(1, len(points) // 10) :]
    best = min(points, key=lambda point: point.loss)
    mfu = [point.mfu_pct for point in recent if point.mfu_pct is not None]
    return CurveSummary(
        first_loss=points[0].loss,
        last_loss=points[-1].loss,
        recent_loss=sum(point.loss for point in recent) / len(recent),
        recent_steps=len(recent),
        best_loss=best.loss,
        best_step=best.step,
        tokens=points[-1].tokens,
        sequences=points[-1].sequences,
        step_s=median(point.step_s for point in recent),
        tokens_s=median(point.tokens_per_s for point in recent),
        mfu_pct=median(mfu) if mfu else None,
        trained_s=sum(point.step_s for point in points),
    )
