"""A job for the torch processes: its kind, its runs, and its time limits.

The job file and the report that comes back (`fourfold.result.job`) are the whole interface between
a command and the processes that import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings

# ping: every rank joins and answers; finds a rank that can't come up before a long run does.
JobKind = Literal[
    "run", "train", "verify", "trace", "dryrun", "calibrate", "one-rank", "weights", "ping"
]  # fmt: skip
# These start as many processes as their run has ranks; the others simulate ranks or need none.
_ONE_PROCESS_PER_RANK = ("run", "train", "ping")


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
