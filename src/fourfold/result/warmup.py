"""When has a run warmed up? The rule, and by what it ended; seconds of steps, hertz of clocks.

The first steps (compiling, the optimizer's state, on a CPU the ledger) never count. Then windows of
steps are compared: warm-up is over when the medians of the last two agree, in step time and, where
it can be read, in clock. It ends at a number of steps or seconds even when they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

LEAD, WINDOW = 2, 3
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
