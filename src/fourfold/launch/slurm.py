"""Slurm: submits the batch scripts of jobs, asks what became of them, cancels them. What it knows
of a job is a file in the job's folder, so that any later command can follow it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fourfold import files
from fourfold.errors import MachineError, UserError
from fourfold.launch.batch_script import EXIT_FILE, STOPPED_FILE, BatchJob, script
from fourfold.result.job import JOB_FILE, Job
from fourfold.spec import codec
from fourfold.spec.site import Site

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
LIVING = (
    *WAITING,
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "STAGE_OUT",
    "RESIZING",
)
GONE_S = 90.0  # a cancelled job has KillWait (30 s unless the site says otherwise) to end
SCRIPT_FILE = "slurm.sh"
SUBMITTED_FILE = "slurm.json"
MEMBER_FILE = "slurm-batch.json"
_ASK_S, _SUBMIT_S = 30.0, 120.0  # a busy scheduler answers late; one that does not is asked again
_LOG = re.compile(r"slurm-([0-9]+)(?:_[0-9]+)?\.log\Z")
_STATE = re.compile(r"\bJobState=([A-Z_]+)")
_REASON = re.compile(r"\bReason=(\S+)")
_NODES = re.compile(r"\bNodeList=(\S+)")
_DOWN = re.compile(r"^NodeName=(\S+)(?:(?! State=).)* State=(?:DOWN|FAIL|ERROR)\b", re.MULTILINE)


class State(NamedTuple):
    name: str
    detail: str  # why it waits, or where it runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What Slurm calls a job. `step`: it is one of several runs in one allocation. `log`: the words
    of Slurm and of the script."""

    id: str
    tasks: tuple[int, ...] = ()
    step: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Which run of a script for several it is: that script, however it is submitted, and its logs
    are in the folder `logs`."""

    logs: str
    place: int
    array: bool
    tasks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slurm:
    """Submits jobs by a site's rules. `mine`: those that were submitted here, by number; others are
    followed only."""

    site: Site
    mine: set[str] = field(default_factory=set, compare=False, repr=False)

    def knows(self, job: Job, folder: Path) -> bool:
        """Whether this very job is queued, runs or has run to its end."""
        known = submitted(folder)
        if known is None or _stored_job(folder) != codec.to_json(job):
            return False
        over = has_run(folder) and not job.patient  # a training goes on
        return over or self.is_living(known.id)

    def is_living(self, job_id: str) -> bool:
        """A scheduler that does not answer has not forgotten it."""
        return self.state(job_id).name in ("", *LIVING)

    def submit(self, batch: BatchJob) -> list[Submitted]:
        """One script for all folders of the batch, whose job files are written."""
        path = self.write_script(batch)
        answer = ask(["sbatch", "--parsable", str(path)], at_most_s=_SUBMIT_S)
        if answer.returncode:
            last = answer.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UserError(
                f"Slurm rejected the job: {last[0]}",
                hint="correct the site file; --print-launch prints the script",
            )
        number = answer.stdout.strip().split(";")[0]
        step = len(batch.folders) > 1 and not batch.array
        known = []
        for place, folder in enumerate(batch.folders):
            job_id = f"{number}_{place}" if batch.array else number
            log = str(batch.logs / f"slurm-{job_id}.log")
            known.append(Submitted(id=job_id, tasks=batch.tasks, step=step, log=log))
            self.mine.add(job_id)
            files.write_text(folder / SUBMITTED_FILE, codec.to_json(known[-1]))
        return known

    def write_script(self, batch: BatchJob) -> Path:
        for place, folder in enumerate(batch.folders if len(batch.folders) > 1 else ()):
            one = Member(logs=str(batch.logs), place=place, array=batch.array, tasks=batch.tasks)
            files.write_text(folder / MEMBER_FILE, codec.to_json(one))
        path = batch.logs / SCRIPT_FILE
        files.write_text(path, script(batch, self.site))
        return path

    def state(self, job_id: str) -> State:
        """GONE where the scheduler knows nothing of it any more, '' where it does not answer. Text,
        not JSON, whose shape changes with every release."""
        answer = ask(["scontrol", "show", "job", "--oneliner", job_id])
        match = _STATE.search(answer.stdout)
        if match is not None:
            why = (_REASON if match[1] in WAITING else _NODES).search(answer.stdout)
            return State(match[1], why[1] if why and why[1] != "(null)" else "")
        if "Invalid job id" not in answer.stderr:
            return State("", answer.stderr.strip())
        # Forgotten (MinJobAge): accounting remembers, where there is any.
        answer = ask(["sacct", "-n", "-X", "-P", "-o", "State", "-j", job_id])
        words = answer.stdout.split()
        return State(words[0] if answer.returncode == 0 and words else "GONE", "")

    def down(self, nodes: str) -> list[str]:
        """Those of a job's nodes (as Slurm lists them, n[1-4]) that are down now."""
        return _DOWN.findall(ask(["scontrol", "show", "node", "--oneliner", nodes]).stdout)

    def cancel(self, *job_ids: str) -> None:
        if job_ids:
            ask(["scancel", *job_ids])

    def wait_until_gone(self, job_ids: Iterable[str]) -> None:
        left, until = list(job_ids), time.monotonic() + GONE_S
        while left and time.monotonic() < until:
            left = [one for one in left if self.is_living(one)]
            time.sleep(0.1 if left else 0.0)


def ask(command: list[str], *, at_most_s: float = _ASK_S) -> subprocess.CompletedProcess[str]:
    # Of an allocation this command itself may be called in: they describe another job.
    outer = ("SLURM_", "SBATCH_")
    env = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(outer)}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=at_most_s,
            check=False,
            errors="replace",
            env=env,
        )
    except FileNotFoundError:
        raise MachineError(
            f"{command[0]} is not installed on this host",
            hint="start from a login node of the cluster, or omit --on",
        ) from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {at_most_s:g} s")


def submitted(folder: Path) -> Submitted | None:
    """By a command or, as the script's log tells, by hand."""
    with contextlib.suppress(UserError):
        return codec.from_json(Submitted, files.read_own_text(folder / SUBMITTED_FILE))
    of = _member(folder)
    logs = Path(of.logs) if of else folder
    numbers = [int(m[1]) for path in logs.glob("slurm-*.log") if (m := _LOG.match(path.name))]
    if not numbers and (logs / SCRIPT_FILE).exists():
        numbers = _queued_jobs_logging_to(logs)
    if not numbers:
        return None
    newest = f"{max(numbers)}_{of.place}" if of and of.array else str(max(numbers))
    step = of is not None and not of.array
    return Submitted(id=newest, step=step, log=str(logs / f"slurm-{newest}.log"))


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that the scheduler has, and the folder where it works."""

    slurm_job: str
    folder: str


def described_job(place: Path) -> QueuedJob:
    job = submitted(place) or Submitted(id="")
    return QueuedJob(job.id, str(place))


def is_submitted(folder: Path) -> bool:
    """And was not stopped by the user."""
    return not (folder / STOPPED_FILE).exists() and submitted(folder) is not None


def has_run(folder: Path) -> bool:
    """Whether the job of this folder came to an end that counts."""
    return (folder / EXIT_FILE).exists() and not (folder / STOPPED_FILE).exists()


def script_of(folder: Path) -> str:
    """The script by which the job of this folder was submitted."""
    return files.read_text((logs_of(folder) or folder) / SCRIPT_FILE, field="script")


def logs_of(folder: Path) -> Path | None:
    """Where Slurm's words on this job folder are, if not there."""
    of = _member(folder)
    return Path(of.logs) if of else None


def _member(folder: Path) -> Member | None:
    with contextlib.suppress(UserError):
        return codec.from_json(Member, files.read_own_text(folder / MEMBER_FILE))
    return None


def _queued_jobs_logging_to(logs: Path) -> list[int]:
    """Numbers of the user's queued jobs that will write there: a job that waits has no log yet."""
    if shutil.which("squeue") is None:  # nothing of this host can be queued there
        return []
    answer = ask(["squeue", "--me", "-h", "-O", "ArrayJobID:.32,StdOut:.4096"])
    rows = (line.split(maxsplit=1) for line in answer.stdout.splitlines())
    return [int(row[0]) for row in rows if len(row) == 2 and Path(row[1]).parent == logs]


def living(folder: Path) -> str:
    """The Slurm job that is queued or runs for this job folder; '' where there is none."""
    known = submitted(folder)
    return known.id if known is not None and Slurm(Site()).is_living(known.id) else ""


def _stored_job(folder: Path) -> str:
    try:
        return files.read_own_text(folder / JOB_FILE)
    except UserError:
        return ""
