"""Runs a job on this host: starts its ranks, watches them, ends them, writes the report. (Why not
torchrun: docs/tour.md.)"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from fourfold import files
from fourfold.errors import MachineError, UserError
from fourfold.launch.command import stop_signals
from fourfold.launch.folder import End, exclusive, job_folder, job_report, scratch, set_aside
from fourfold.launch.outcomes import first_failure, silent, stopped
from fourfold.launch.permit import Permit
from fourfold.launch.ranks import POLL_S, Ranks, Silence, Standstill, wait_for
from fourfold.launch.slurm import Slurm
from fourfold.launch.slurm_ranks import SlurmRanks, started
from fourfold.result.files.stored import seal
from fourfold.result.job import (
    DUMP_FILE,
    JOB_FILE,
    REPORT_FILE,
    STOP_FILE,
    Job,
    JobReport,
    answer_file,
    facts_file,
)
from fourfold.result.report import Failure
from fourfold.spec import codec

Progress = Callable[[str], None]
_DUMP_S = 3.0  # after a hang, ranks dump their stacks


class JobError(MachineError):
    """A job without which the command has no answer did not end well."""


def must_be_ok(report: JobReport) -> None:
    if report.outcome == "ok":
        return
    failure = report.failure
    where = f" ({failure.who}): {failure.message}" if failure else ""
    raise JobError(f"{report.job} {report.outcome}{where}")


# The ranks of one start, wherever they are.
Started = Ranks | SlurmRanks


def run_job(
    job: Job,
    folder: Path,
    *,
    progress: Progress | None = None,
    permit: Permit | None = None,
    on: Slurm | None = None,
) -> JobReport:
    """Do every task of the job; a failed one is an entry in the report, the next ones still run.
    Ctrl-C and SIGTERM end the ranks, write the report with what is left as `cancelled`, and then
    raise KeyboardInterrupt. A training is first asked to save and end; see `stop_signals`."""
    require_torch()
    permit = permit or Permit()
    if on is None:
        permit.require_job(job)
    else:  # how much room there is elsewhere is the scheduler's to say
        permit.require(job.specs)
    followed = on is not None and on.knows(job, folder)  # started by an earlier command
    with exclusive(folder) if followed else job_folder(folder):
        files.write_text(folder / JOB_FILE, codec.to_json(job))
        return _run_all(job, folder, progress, on)


def _run_all(job: Job, folder: Path, progress: Progress | None, on: Slurm | None) -> JobReport:
    began, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    ends: dict[int, End] = {}
    places: dict[int, tuple[tuple[str, str], ...]] = {}
    todo = list(range(job.tasks))
    try:
        with stop_signals(folder / STOP_FILE if job.patient else None):
            while todo:
                batch = _batch(job, todo)
                ranks = started(on, job, batch, folder) if on else Ranks(job, batch, folder)
                ends |= _run_batch(job, batch, ranks, progress)
                places |= dict.fromkeys(batch, ranks.environment)
                todo = [task for task in todo if task not in ends]
                if todo:
                    set_aside(folder, max(ends))
    except KeyboardInterrupt:
        words = Failure(rank=-1, stage=0, phase="", message="stopped by the user")
        cancelled: End = ("cancelled", words)
        ends |= dict.fromkeys((task for task in todo if task not in ends), cancelled)
        raise
    finally:
        report = job_report(job, folder, ends, time.monotonic() - began, started_at)
        report = _placed(report, places)
        files.write_bytes(folder / REPORT_FILE, seal(codec.to_json(report)), own=True)
    return report


def _placed(report: JobReport, places: Mapping[int, tuple[tuple[str, str], ...]]) -> JobReport:
    """With what the launcher knows of where each run was."""
    runs = (
        replace(run, environment=tuple(sorted({*run.environment, *places.get(task, ())})))
        for task, run in enumerate(report.runs)
    )
    return replace(report, runs=tuple(runs))


@functools.cache
def require_torch() -> None:
    """Found without importing it: that takes seconds, and this process never needs it. The
    ./fourfold script, where it started this process, fetches it once; not before, since a mistake
    in a command is told sooner than gigabytes are there."""
    fetch = os.environ.get("FOURFOLD_FETCH")
    if fetch and subprocess.run([fetch, "fetch-torch"], stdout=2).returncode == 0:
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        hint = "pip install torch (the ./fourfold script installs it)"
        raise UserError("this command needs torch, which is not installed", hint=hint)


def _batch(job: Job, todo: list[int]) -> list[int]:
    """The next tasks that can share one start: same number of ranks, same environment."""
    starts = {task: (job.processes(task), job.task_env(task)) for task in todo}
    return list(itertools.takewhile(lambda task: starts[task] == starts[todo[0]], todo))


def _run_batch(
    job: Job, batch: list[int], ranks: Started, progress: Progress | None
) -> dict[int, End]:
    """Outcomes of the tasks that ended, at least one; the rest must be started again."""
    folder = ranks.scene.folder
    try:
        outcome, failure = _watch(job, ranks, progress)
    except BaseException:
        ranks.stop()
        raise
    ranks.end()
    ends: dict[int, End] = {}
    for task in batch:
        done = all(facts_file(folder, task, rank).exists() for rank in range(ranks.scene.ranks))
        ends[task] = ("ok", None) if done else (outcome, failure)
        if not done:
            break
    return ends


def _watch(job: Job, ranks: Started, progress: Progress | None) -> End:
    silence, standstill = Silence(job, progress), Standstill()
    scene = ranks.scene
    while True:
        host_gone = ranks.poll()
        if any(code for code, _ in scene.exits.values()) or (host_gone and not ranks.all_ended):
            if ranks.hear_out():
                continue
            return first_failure(scene)
        if ranks.all_ended:
            return "ok", None
        if ranks.queued:
            silence.wait(ranks.queued)
            time.sleep(POLL_S)
            continue
        still = standstill.broken(scene)
        limit = silence.broken(scene)
        if still is not None or limit:
            (scene.folder / DUMP_FILE).touch()
            dumped = lambda: len(list(scene.folder.glob("stack-*.txt"))) >= scene.ranks  # noqa: E731
            wait_for(dumped, _DUMP_S)
            if still is not None:
                return "hung", stopped(scene, still, standstill.seconds(still))
            ranks.poll()
            return "hung", silent(scene, silence.seconds, limit)
        time.sleep(POLL_S)


T = TypeVar("T")


def answers(
    job: Job,
    kind: type[T],
    parts: Sequence[int | None],
    progress: Progress | None,
) -> list[T]:
    """What the first task of a job answers, in parts or whole (None); its files are gone then."""
    with scratch() as folder:
        return answers_in(folder, job, kind, parts, progress)


def answers_in(
    folder: Path,
    job: Job,
    kind: type[T],
    parts: Sequence[int | None],
    progress: Progress | None,
    on: Slurm | None = None,
) -> list[T]:
    report = run_job(job, folder, progress=progress, on=on)
    must_be_ok(report)
    texts = (files.read_text(answer_file(folder, 0, part)) for part in parts)
    return [codec.from_json(kind, text) for text in texts]
