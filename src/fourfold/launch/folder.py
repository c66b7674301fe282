"""The folder of a job: locked while a launcher works there, emptied of earlier starts, and never
followed out of; or a temporary one, cleared away by the next command if this one is killed.

Builds the report of a job from the files its ranks left: facts of every rank, merged by run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import MachineError, UserError
from fourfold.launch.identity import TOKEN_FILE, end_marked
from fourfold.launch.outcomes import own_words, read_if_whole
from fourfold.result import report
from fourfold.result.job import (
    DUMP_FILE,
    ENGINE_FILE,
    JOB_FILE,
    REPORT_FILE,
    STOP_FILE,
    Job,
    JobReport,
    RankFacts,
    facts_file,
)
from fourfold.spec import check

# What one start of ranks leaves; set aside when another follows in the same job.
TRACES = (
    "beat-*",
    "failure-*",
    "stack-*",
    "flight-*",
    "store-*",
    "news-*",
    "slurm*",
    DUMP_FILE,
    STOP_FILE,
)
_OURS = (
    *TRACES,
    "facts-*",
    "answer-*",
    "*.log",
    "failed-*",
    JOB_FILE,
    REPORT_FILE,
    TOKEN_FILE,
    ENGINE_FILE,
    "settings",
)


@contextlib.contextmanager
def job_folder(folder: Path) -> Iterator[None]:
    """Made or emptied of what a job leaves, with no process of an earlier start in it."""
    rule, hint = "is a symbolic link, which a job folder may not be", "pass the folder it points to"
    with _as_user_error(folder):
        check.that(not folder.is_symlink(), "folder", str(folder), rule, hint)
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, os.O_NOFOLLOW) as is_locked:
        with _as_user_error(folder):
            if is_locked:
                end_marked(folder)
            for path in (path for pattern in _OURS for path in folder.glob(pattern)):
                _remove(path)
        yield


@contextlib.contextmanager
def exclusive(folder: Path, flags: int = 0) -> Iterator[bool]:
    """No second start in a folder that exists, even where somebody has removed files from it: the
    kernel's lock, on the folder and not on its name; gone when this process is. False where the
    file system locks no folders, as some network ones; a training has a lock file besides."""
    with _as_user_error(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        is_locked = False
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                rule, hint = "is in use by another start", "wait for it, or choose another folder"
                raise UserError(rule, field="folder", value=str(folder), hint=hint) from None
        yield is_locked
    finally:
        os.close(handle)


def end_processes_of(folder: Path) -> int:
    """End what a killed launcher left running for this job folder, and say how many. Where a living
    one holds its lock, nothing is; where no folder can be locked, the caller knows that it is dead:
    by the lock file of a training, by the owner of a work folder."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    try:
        with exclusive(folder, os.O_NOFOLLOW):
            return end_marked(folder)
    except UserError:
        return 0


def set_aside(folder: Path, task: int) -> None:
    """Keep what a failed task left behind, out of the way of the next start."""
    aside = folder / f"failed-{task}"
    for pattern in TRACES:
        for path in folder.glob(pattern):
            aside.mkdir(exist_ok=True)
            shutil.move(path, aside / path.name)


def _remove(path: Path) -> None:
    """A link, not what it leads to."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def _as_user_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.refused(error, folder, field="folder", verb="used") from None


_PREFIX = "fourfold-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_LOCK = ".fourfold-scratch"
# Between making a folder and locking it; one without a lock for so long was killed there.
_MAKING_S = 3600.0


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Only ours to read, and gone afterwards."""
    import tempfile  # 15 ms with what it imports

    try:
        root = Path(tempfile.gettempdir())
        _clear(root)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    except OSError as error:
        raise MachineError(
            f"cannot create a temporary folder ({error.strerror or error})",
            hint="free some space, or set TMPDIR",
        ) from None
    handle = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(folder / ".lock", flags, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # It gets its name when it is locked: a lock that nobody holds is of a dead holder.
        os.rename(folder / ".lock", folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


def _clear(root: Path) -> None:
    """Remove our own folders whose holder is dead; whatever can't be removed stays."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_ours(entry.stat(follow_symlinks=False)):
                    _clear_one(root / entry.name)


def _is_ours(facts: os.stat_result) -> bool:
    private = stat.S_IMODE(facts.st_mode) == 0o700
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and private


def _clear_one(folder: Path) -> None:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        if time.time() - folder.lstat().st_mtime > _MAKING_S and not any(folder.iterdir()):
            folder.rmdir()
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held: an OSError, and it stays
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


# How a task ended, and the failure it ended with.
End = tuple[report.Outcome, report.Failure | None]


def job_report(
    job: Job, folder: Path, ends: Mapping[int, End], seconds: float, started_at: str
) -> JobReport:
    """A task without an end (our own bug stopped the launcher) counts as cancelled."""
    lost = ("cancelled", report.Failure(rank=-1, stage=0, phase="", message="the launcher stopped"))
    whole = {task: ends.get(task, lost) for task in range(job.tasks)}
    worst = min(whole.values(), key=lambda end: report.WORST_FIRST.index(end[0]))
    runs = tuple(
        run_report(job, task, folder, end, started_at)
        for task, end in whole.items()
        if job.specs and job.job in ("run", "train", "ping", "verify", "one-rank")
    )
    return JobReport(
        job=job.job,
        outcome=worst[0],
        seconds=seconds,
        runs=runs,
        answers=tuple(sorted(path.name for path in folder.glob("answer-*.json"))),
        failure=worst[1],
    )


def run_report(job: Job, task: int, folder: Path, end: End, started_at: str) -> report.RunReport:
    """Steps, start and environment as rank 0 saw them, loss from whoever has it."""
    paths = (facts_file(folder, task, rank) for rank in range(job.processes(task)))
    facts = [fact for path in paths if (fact := read_if_whole(RankFacts, path)) is not None]
    own = ("environment", "samples", "probes", "warmup")
    of_first: dict[str, Any] = {name: getattr(facts[0], name) for name in own} if facts else {}
    return report.RunReport(
        spec=job.specs[task],
        outcome=end[0],
        steps=_steps(facts),
        memory=tuple(fact.memory for fact in facts),
        ranks=tuple(fact.times for fact in facts),
        links=_slowest([link for fact in facts for link in fact.links]),
        experts=_loads(facts),
        start_s=max((fact.start_s for fact in facts), default=0.0),
        window_s=max((fact.window_s for fact in facts), default=0.0),
        failure=end[1],
        started_at=started_at,
        shortage=_shortage(folder, task, end[1]) if end[0] == "oom" else None,
        **of_first,
    )


def _loads(facts: list[RankFacts]) -> tuple[report.ExpertLoad, ...]:
    """Ranks of a stage have counted together: any of them says it for its layers."""
    by_layer = {load.layer: load for fact in facts for load in fact.experts}
    return tuple(by_layer[layer] for layer in sorted(by_layer))


def _slowest(links: list[report.LinkRate]) -> tuple[report.LinkRate, ...]:
    """One for each axis, level and kind: a step waits for its slowest group."""
    slowest: dict[tuple[str, str, str], report.LinkRate] = {}
    for link in links:
        key = (link.axis, link.level, link.op)
        if key not in slowest or link.seconds > slowest[key].seconds:
            slowest[key] = link
    return tuple(slowest.values())


def _shortage(folder: Path, task: int, failure: report.Failure | None) -> report.OomReport | None:
    """From the words of the rank that failed; another task's start sets them aside."""
    for place in (folder / f"failed-{task}", folder):
        own_failure = own_words(place, failure.rank) if failure else None
        if own_failure is not None:
            return own_failure.shortage
    return None


def _steps(facts: list[RankFacts]) -> tuple[report.StepReport, ...]:
    """A step lasts as long as on its slowest rank; loss and norm from the first that has it."""
    merged = []
    for same in zip(*(fact.steps for fact in facts), strict=False):
        losses = (step.loss for step in same if step.loss is not None)
        norms = (step.grad_norm for step in same if step.grad_norm is not None)
        seconds, skipped = max(s.seconds for s in same), any(s.skipped for s in same)
        loss, norm = next(losses, None), next(norms, None)
        merged.append(replace(same[0], seconds=seconds, loss=loss, grad_norm=norm, skipped=skipped))
    return tuple(merged)
