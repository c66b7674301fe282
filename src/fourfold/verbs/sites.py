"""Where a job runs: this host, or a site whose scheduler is asked for it."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.events import OnEvent, progress, warnings
from fourfold.launch.batch_script import BatchJob
from fourfold.launch.campaign import Campaign, launch_run
from fourfold.launch.folder import job_folder, scratch
from fourfold.launch.identity import claim
from fourfold.launch.local import JobError, require_torch
from fourfold.launch.permit import Permit, warned_if_shared
from fourfold.launch.queue import Queue, Work
from fourfold.launch.slurm import QueuedJob, Slurm, described_job, is_submitted, script_of
from fourfold.result.files.store import Store
from fourfold.result.job import JOB_FILE, Job
from fourfold.result.report import RunReport
from fourfold.search.resolve import match_engine
from fourfold.spec import RunSpec, check, codec
from fourfold.spec.site import Site, read_site
from fourfold.verbs import Answer
from fourfold.verbs.engines import EngineTemplate, TemplateRuns, engine_template
from fourfold.verbs.machine import Predictor, predictor, read_calibration
from fourfold.verbs.run_requests import CalibrateRequest, Launch, MeasureRequest, SweepRequest


@dataclass(frozen=True, slots=True)
class Submission(Answer):
    """Jobs that were left to a scheduler, or batch scripts that are not submitted yet; `waiting`
    is about runs that the site does not want queued yet."""

    TABLE = "jobs"
    jobs: tuple[QueuedJob, ...] = ()
    scripts: tuple[str, ...] = ()
    waiting: str = ""


def site_of(request: Launch | CalibrateRequest) -> Site | None:
    """None: this host."""
    site = read_site(request.on)
    asked = {"print-launch": request.print_launch, "detach": getattr(request, "detach", False)}
    for flag, given in asked.items():
        if given and site is None:
            raise UserError("needs a site", field=f"--{flag}", hint="add --on slurm or --on SITE")
    return site


@contextlib.contextmanager
def work_folder(job: Job, site: Site | None) -> Iterator[Path]:
    """Where a job works whose command keeps nothing; gone when its end is told. On a site its name
    follows from the job: the same command finds it again, also after an error of its own."""
    if site is None:
        with scratch() as folder:
            yield folder
        return
    folder = _folder_of(job, site)
    with _claimed(folder):
        try:
            yield folder
        except JobError:  # the job's own end
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except BaseException:
            if not is_submitted(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of(job: Job, site: Site) -> Path:
    whole = f"{site.name}\n{codec.to_json(job)}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:12]
    return Path(site.shared or ".").absolute() / f"fourfold-{job.job}-{digest}"


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = claim(folder)
    except OSError as error:
        raise files.refused(error, folder, field="shared", verb="written") from None
    if own is None:
        rule, hint = "is followed by another command", "wait for that one, which has the answer"
        raise UserError(rule, field="job", value=str(folder), hint=hint)
    try:
        yield
    finally:
        own.release()


def submission(queue: Queue, specs: Sequence[RunSpec], request: MeasureRequest) -> Submission:
    if request.print_launch:
        return Submission(scripts=tuple(queue.prepare(specs)))
    if not request.engine:
        require_torch()
    jobs = tuple(described_job(place) for place in queue.detach(specs))
    return Submission(jobs, waiting=_waiting(len(queue.waiting), queue.slurm.site))


def _waiting(count: int, site: Site) -> str:
    if not count:
        return ""
    why = f"most_queued = {site.most_queued}"
    if site.queue != "each":
        why += f", one {site.queue} at a time"
    return f"{count} more wait{'s' * (count == 1)}: {why}; the same command submits them"


def submission_of(job: Job, folder: Path, on: Slurm, *, only_print: bool) -> Submission:
    """One job that is no run of a store, in the folder where it works."""
    batch = BatchJob(job, tuple(range(job.tasks)), (folder,), folder)
    with job_folder(folder):
        files.write_text(folder / JOB_FILE, codec.to_json(job))
        if only_print:
            return Submission(scripts=(files.read_own_text(on.write_script(batch)),))
        require_torch()
        on.submit(batch)
    return Submission((described_job(folder),))


def left_to(site: Site | None, job: Job, *, only_print: bool) -> Submission:
    """A job whose command keeps nothing, left to the site's scheduler, or its script; the same
    command follows it and has the answer."""
    if site is None:
        raise UserError("needs a site", field="detach", hint="--on slurm or --on SITE")
    folder, on = _folder_of(job, site), Slurm(site)
    with _claimed(folder):
        if on.knows(job, folder):
            scripts = (script_of(folder),) if only_print else ()
            return Submission(() if only_print else (described_job(folder),), scripts)
        return submission_of(job, folder, on, only_print=only_print)


def launcher_of(site: Site | None) -> Slurm | None:
    return Slurm(site) if site else None


def asked_template(request: MeasureRequest) -> EngineTemplate | None:
    check.that(not request.stack or request.engine, "stack", request.stack, "needs --engine")
    return engine_template(request.engine) if request.engine else None


def engine_predictor(request: MeasureRequest) -> Predictor:
    """Whoever runs it: predictions by its stack, and the rules of its release."""
    template, site = asked_template(request), site_of(request)
    named = request.cluster or request.profile
    known = predictor(
        cluster=request.cluster if named or site is None else site.cluster or None,
        profile=request.profile,
        calibration=request.calibration,
    )
    known = replace(known, remote=site is not None)
    if template is None:
        return known
    asked = request.stack or template.predicted_as
    calibration = known.calibration or read_calibration(None)
    engine = match_engine(asked, known.cluster, calibration)
    return replace(known, stack=engine.stack, release=template.release)


def campaign_of(
    request: MeasureRequest,
    known: Predictor,
    permit: Permit,
    on_event: OnEvent,
    options: tuple[tuple[str, str], ...] = (),
) -> Campaign:
    """Runs by the engine that was asked for, where that was asked for, into the request's store.
    `options` are those of our own engine's jobs."""
    template, site = asked_template(request), site_of(request)
    store, on = Store(request.runs, warn=warnings(on_event)), launcher_of(site)
    common = {
        "say": progress(on_event),
        "again": request.again if isinstance(request, SweepRequest) else (),
        "predictor": known,
    }
    if template is None:
        ours: Callable[..., RunReport] = partial(launch_run, options=options, permit=permit, on=on)
        ours = ours if on else warned_if_shared(ours, warnings(on_event))
        work = lambda spec, _: Work(Job(job="run", specs=(spec,), options=options))  # noqa: E731
        queue = Queue(store.root, on, work) if on else None
        return Campaign(store, runner=ours, queue=queue, **common)
    runs = TemplateRuns(template, known, permit, site)
    alone = warned_if_shared(runs.here, warnings(on_event))
    return Campaign(
        store,
        runner=partial(runs.on_site, on) if on else alone,
        engine=template.name,
        unsupported=runs.unsupported,
        queue=Queue(store.root, on, runs.work) if on else None,
        **common,
    )
