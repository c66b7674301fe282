"""When a run has warmed up, how long a step takes, and how sure that is.

Warm-up is over when the medians of the last two windows of steps agree, in time and in clock. The
figure is the median of the timed steps, less leading ones that are still over 3% slower; its
interval holds the true median with 95%. It says nothing about the next run: repeats do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

LEAD, WINDOW = 2, 3
# Fewer steps have no 95% interval of their median: theirs is the whole range.
LEAST_SAMPLES = 6
AGREE, CLOCK_AGREE = 0.03, 0.05
MOST_STEPS, MOST_S = 32, 60.0
Ending = Literal["going on", "steady", "most steps", "most seconds", "count"]
# What a rank that decides tells the others, by place.
ENDINGS: tuple[Ending, ...] = ("going on", "steady", "most steps", "most seconds", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """`drift`: median step time of the last window over the one before, less 1; None: not asked."""

    steps: int
    ended: Ending
    drift: float | None = None
    clock_drift: float | None = None

    @property
    def words(self) -> str:
        if self.ended == "count":
            return "as requested"
        drift = "too few steps to tell" if self.drift is None else f"{100 * self.drift:+.1f}%"
        clock = "" if self.clock_drift is None else f", clock {100 * self.clock_drift:+.1f}%"
        rule = f"medians of the last two windows of {WINDOW}: {drift}{clock}"
        if self.ended == "steady":
            return f"steady, {rule}"
        limit = f"{MOST_STEPS} steps" if self.ended == "most steps" else f"{MOST_S:g} s"
        return f"stopped at the limit of {limit}, {rule}"

    @property
    def still_drifts(self) -> bool:
        slower = self.drift is not None and abs(self.drift) > AGREE
        clock = self.clock_drift is not None and abs(self.clock_drift) > CLOCK_AGREE
        return self.ended in ("most steps", "most seconds") and (slower or clock)


def drift(windows: Sequence[Sequence[float]]) -> float | None:
    """Of the last window against the one before; None where one of them says nothing."""
    if len(windows) < 2 or not windows[-1] or not windows[-2]:
        return None
    before = median(windows[-2])
    return median(windows[-1]) / before - 1 if before > 0 else None


def verdict(
    times: Sequence[Sequence[float]],
    clocks: Sequence[Sequence[float]],
    *,
    least: int,
    spent_s: float,
) -> Warmup:
    """After each window: `times` of the steps after LEAD, `clocks` seen meanwhile (maybe none)."""
    steps = LEAD + sum(map(len, times))
    slower, clock = drift(times), drift(clocks)
    steady = slower is not None and abs(slower) <= AGREE
    steady = steady and (clock is None or abs(clock) <= CLOCK_AGREE)
    ended: Ending = "going on"
    if steps >= least and steady:
        ended = "steady"
    elif steps >= max(least, MOST_STEPS):
        ended = "most steps"
    elif steps >= least and spent_s >= MOST_S:
        ended = "most seconds"
    return Warmup(steps=steps, ended=ended, drift=slower, clock_drift=clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    step_s: float
    low_s: float
    high_s: float
    samples: int
    dropped: int = 0


_DRIFT = 1.03


def drifting(seconds: Sequence[float]) -> int:
    """How many leading steps still belong to the warm-up."""
    head = 0
    while head < len(seconds) // 2 and len(seconds) - head >= 6:
        if median(seconds[head : head + 3]) <= _DRIFT * median(seconds[head + 3 :]):
            break
        head += 1
    return head


def timing(seconds: Sequence[float]) -> Timing | None:
    """None without a single timed step. Below LEAST_SAMPLES the interval is the whole range."""
    if not seconds:
        return None
    dropped = drifting(seconds)
    ordered = sorted(seconds[dropped:])
    count = len(ordered)
    outside = _ranks_outside(count)
    return Timing(
        step_s=median(ordered),
        low_s=ordered[outside],
        high_s=ordered[count - 1 - outside],
        samples=count,
        dropped=dropped,
    )


def _ranks_outside(count: int) -> int:
    """The most values beyond each end that leave the true median inside with 95%: at most `outside`
    of `count` fair coins fall on one side with 2.5% (from 1000 on, by the normal distribution)."""
    if count >= 1000:
        return math.floor(count / 2 - 0.98 * math.sqrt(count) - 0.5)
    tail, outside = 0.0, 0
    for k in range(count):
        tail += math.comb(count, k) / 2.0**count
        if tail > 0.025:
            break
        outside = k
    return outside
