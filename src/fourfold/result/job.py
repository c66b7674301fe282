"""A job for the torch processes, and the small files and the report that come back: the whole
interface between a command and the processes that import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fourfold import files
from fourfold.errors import UserError
from fourfold.result import report
from fourfold.result.timing import Warmup
from fourfold.spec import RunSpec, check, codec
from fourfold.spec.train import TrainSettings

# ping: every rank joins and answers; finds a rank that can't come up before a long run does.
# engine: another engine's command on every node, which starts the ranks there.
JobKind = Literal[
    "run",
    "train",
    "verify",
    "trace",
    "dryrun",
    "calibrate",
    "one-rank",
    "weights",
    "ping",
    "engine",
]
# These start as many processes as their run has ranks; the others simulate ranks or need none.
_ONE_PROCESS_PER_RANK = ("run", "train", "ping", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds of silence that end a job: until the first step is done, and between steps."""

    start_s: float = 600.0
    step_s: float = 300.0

    def __post_init__(self) -> None:
        check.positive(start_s=self.start_s, step_s=self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`ranks` 0: as many processes as each run has ranks. `options` belong to the kind of job,
    `train` to a training."""

    job: JobKind
    specs: tuple[RunSpec, ...] = ()
    ranks: int = 0
    options: tuple[tuple[str, str], ...] = ()
    limits: Limits | None = None
    train: TrainSettings | None = None

    def __post_init__(self) -> None:
        check.whole(0, 2**24, ranks=self.ranks)
        if self.job in _ONE_PROCESS_PER_RANK and not self.specs:
            raise UserError(f"must have at least one run in a '{self.job}' job", field="specs")
        if self.job == "train" and (self.train is None or len(self.specs) != 1):
            raise UserError("must have one run and its settings in a 'train' job", field="train")

    @property
    def patient(self) -> bool:
        """Whether a request to stop lets the ranks save and leave by themselves."""
        return self.job == "train"

    @property
    def tasks(self) -> int:
        """Things to do one after the other; a job without runs is one task."""
        return max(1, len(self.specs))

    def processes(self, task: int) -> int:
        if self.ranks:
            return self.ranks
        return self.specs[task].gpus if self.job in _ONE_PROCESS_PER_RANK else 1

    def task_limits(self, task: int) -> Limits:
        if self.limits is not None or not self.specs:
            return self.limits or Limits()
        spec = self.specs[task]
        return Limits(start_s=spec.start_limit_s, step_s=spec.step_limit_s)

    def task_env(self, task: int) -> dict[str, str]:
        return dict(self.specs[task].policy.env) if self.specs else {}

    def option(self, name: str, default: str = "") -> str:
        return dict(self.options).get(name, default)


JOB_FILE = "job.json"
REPORT_FILE = "report.json"
# The launcher makes this file to ask every rank for its stack and its last collectives.
DUMP_FILE = "dump-request"
# The launcher makes this file to ask a training to save and end after the step it is in.
STOP_FILE = "stop-request"
# What another engine prints (on a site: engine-N.log of each node), and its part on a node.
LOG_FILE, LOG_FILES = "engine.log", "engine*.log"
ENGINE_FILE = "engine.sh"
# Names the file in which the first of several nodes tells the others its free port.
PORT_VARIABLE = "FOURFOLD_PORT_FILE"
# A beat is two lines of fixed length, rewritten in place: where the rank stands (by its main
# thread, whenever that changes), and that it lives (by its heart).
WHERE_BYTES, ALIVE_BYTES = 256, 1024
# Phases that may outlast a step: in them every mark counts as progress.
SLOW_PHASES = ("save", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Where a rank stands. `marks` counts phases passed; `groups` the collectives of each group."""

    rank: int
    pid: int
    at: float
    task: int
    stage: int
    phase: str
    steps: int
    marks: int
    groups: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank says of its own end, and when. `echo`: it knows that the cause is elsewhere.
    `shortage`: what it held when memory ran out."""

    outcome: report.Outcome
    failure: report.Failure
    at: float
    echo: bool = False
    shortage: report.OomReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank measured in one task; rank 0 alone adds samples, probes and environment."""

    memory: report.RankMemory
    times: report.RankSteps
    steps: tuple[report.StepReport, ...] = ()
    start_s: float = 0.0
    window_s: float = 0.0
    samples: tuple[report.DeviceSample, ...] = ()
    probes: tuple[report.ProbeReport, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    links: tuple[report.LinkRate, ...] = ()
    experts: tuple[report.ExpertLoad, ...] = ()
    warmup: Warmup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """`runs` has one entry per run of the job; `answers` are files beside the report."""

    job: str
    outcome: report.Outcome
    seconds: float
    runs: tuple[report.RunReport, ...] = ()
    answers: tuple[str, ...] = ()
    failure: report.Failure | None = None


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}.json"


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def facts_file(folder: Path, task: int, rank: int) -> Path:
    return folder / f"facts-{task}-{rank}.json"


def answer_file(folder: Path, task: int, part: int | None = None) -> Path:
    return folder / (f"answer-{task}.json" if part is None else f"answer-{task}-{part}.json")


def log_file(folder: Path, rank: int) -> Path:
    """stdout and stderr of a rank; -1, -2, ... are the processes that start the ranks of a host."""
    if rank >= 0:
        return folder / f"rank-{rank}.log"
    return folder / ("host.log" if rank == -1 else f"host-{-1 - rank}.log")


def padded(plain: Mapping[str, object], width: int) -> bytes:
    """One JSON line of exactly `width` bytes; '{}' when it can't fit."""
    line = json.dumps(plain).encode()
    return (line if len(line) < width else b"{}").ljust(width - 1) + b"\n"


def read_beat(path: Path) -> Beat | None:
    """None when the rank has not written yet, or is writing right now."""
    try:
        where, alive = files.read_own(path).splitlines()
        return codec.decode(Beat, json.loads(where) | json.loads(alive))
    except ValueError:
        return None
