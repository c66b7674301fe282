"""The report of a run: its prediction, its measurements, and what it held when memory ran out. Only
facts: MFU and the like are computed when it is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from fourfold.result.one_rank import Large, MemoryKind
from fourfold.result.timing import Warmup
from fourfold.spec.run import RunSpec

# How a run can end, worst first: a job's outcome is the worst of its runs'.
Outcome = Literal["cancelled", "crashed", "hung", "oom", "nonfinite", "illegal", "ok"]
WORST_FIRST: tuple[Outcome, ...] = get_args(Outcome)
OUTCOMES = WORST_FIRST[::-1]


def published_word(outcome: str) -> str:
    """Published tables know ok, oom, hang and fail."""
    return {"ok": "ok", "oom": "oom", "hung": "hang", "absent": "absent"}.get(outcome, "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step. `loss` is None on ranks that do not see it or when it was not read.

    `skipped`: a gradient of fp16 overflowed and weights stayed as they were; the norm is None then.
    `loss_scale`: what the loss was multiplied by, where it was.
    """

    step: int
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    warmup: bool = False
    skipped: bool = False
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak bytes of a rank: live tensors, and what the allocator reserved (0 where it has none).

    `optimizer_bytes`: the most while weights were updated (0: not known); a plain loop makes
    temporaries there that fused kernels do not.
    `device_bytes`: in use on the whole device at the end. `retries`: allocations that only went
    through after the cache was emptied.
    """

    rank: int
    stage: int
    peak_bytes: int
    reserved_bytes: int = 0
    device_bytes: int = 0
    retries: int = 0
    optimizer_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSteps:
    """One rank's clock: seconds of each step, and of those without waiting (empty: not known).

    `recompiles`: graphs compiled while steps were timed; there should be none. `data_s`: of each
    step, what the host waited for tokens. `compile_s`: compiling in all, by the compiler's clock.
    """

    rank: int
    host: str = ""
    step_s: tuple[float, ...] = ()
    busy_s: tuple[float, ...] = ()
    recompiles: int = 0
    data_s: tuple[float, ...] = ()
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """A look at rank 0's device while it worked; `throttle` as the driver writes it, '' unknown."""

    at_s: float
    clock_hz: float
    power_w: float
    temperature_c: float
    throttle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Known work before and after the steps: a changed rate means a changed machine."""

    when: Literal["before", "after"]
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """What a group of the layout gets when all groups of its axis talk at once.

    `level`: whether the group stays on one host. `op` all-reduce, or send to the next stage;
    `payload_bytes` of the whole tensor.
    """

    axis: str
    ranks: int
    level: Literal["host", "network"]
    op: str
    payload_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """Through each rank, one way: a ring's all-reduce moves 2 (n-1)/n of the payload."""
        share = 2.0 * (self.ranks - 1) / self.ranks if self.op == "all-reduce" else 1.0
        return share * self.payload_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """Tokens of a layer's experts over the timed steps: the `largest` and the standard deviation
    (`spread`) over the mean, and the share of choices that were dropped."""

    layer: int
    largest: float
    spread: float
    dropped: float = 0.0


# What follows the indented lines of a traceback; launchers put the rank before each line.
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]: ?)?Traceback \(most recent call last\):\n"
    r"(?:(?:\[\w+\]: ?)?  .*\n)+(?:\[\w+\]: ?)?(\S.*)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Who failed first, where it stood and what it said; rank -1 when nobody could tell."""

    rank: int
    stage: int
    phase: str
    message: str

    @property
    def said(self) -> str:
        """In one line: the exception of the first traceback in it, else its first line."""
        found = _EXCEPTION.search(self.message)
        return found.group(1) if found else self.message.strip().partition("\n")[0]

    @property
    def who(self) -> str:
        """Rank, stage and phase; the worker or the launcher where it was no rank."""
        if self.rank < 0:
            return self.phase or "launcher"
        return f"rank {self.rank}, stage {self.stage}, {self.phase or 'start'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """`environment` holds versions, device, hosts and variables as texts.

    `start_s`: from launch until the first step could begin. `window_s`: wall clock over the timed
    steps together, beside the sum of their own times. `predicted`: before it ran. After an
    out-of-memory: `shortage`, what the failing rank held, and `remedies`, what would fit.
    """

    spec: RunSpec
    outcome: Outcome
    environment: tuple[tuple[str, str], ...] = ()
    steps: tuple[StepReport, ...] = ()
    memory: tuple[RankMemory, ...] = ()
    ranks: tuple[RankSteps, ...] = ()
    samples: tuple[DeviceSample, ...] = ()
    probes: tuple[ProbeReport, ...] = ()
    links: tuple[LinkRate, ...] = ()
    experts: tuple[ExpertLoad, ...] = ()
    warmup: Warmup | None = None
    start_s: float = 0.0
    window_s: float = 0.0
    failure: Failure | None = None
    started_at: str = ""
    repeat: int = 0
    predicted: Prediction | None = None
    shortage: OomReport | None = None
    remedies: tuple[Remedy, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """What a rank held when it ran out of memory. On a CPU the ledger knows every live tensor; on
    a GPU the allocator knows its blocks, and tensors that Python still sees name some of them.

    `asked_bytes`: the allocation that failed (0: not known); `live_bytes` do not hold it unless
    the ledger counted it. `limit_bytes`: what the rank might use (0: not known)."""

    live_bytes: int
    asked_bytes: int = 0
    limit_bytes: int = 0
    reserved_bytes: int = 0
    kinds: tuple[MemoryKind, ...] = ()
    largest: tuple[Large, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of a step with the interval that should hold 80% of runs, bytes of the fullest rank.

    `limit_bytes`: what a rank might use (0: unknown). `basis`: which calibration, cluster or
    profile said it; `provenance` what that rests on: measured, near, blended or physics ('' in
    older files); `fit_chance`: of its memory, where the machine is known.
    """

    step_s: float
    step_s_low: float
    step_s_high: float
    peak_bytes: float
    limit_bytes: float = 0.0
    basis: str = ""
    provenance: str = ""
    fit_chance: float | None = None

    @property
    def fits(self) -> bool | None:
        return self.peak_bytes <= self.limit_bytes if self.limit_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that would make a run fit (or not enough), and what it would cost; predicted."""

    change: str
    fits: bool
    peak_bytes: float
    step_s: float
    slower_pct: float
