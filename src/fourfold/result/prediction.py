"""What was said about a run before it ran? Kept beside what it measured, for the running score."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of a step with the interval that should hold 80% of runs, bytes of the fullest rank.

    `limit_bytes`: what a rank might use (0: unknown). `basis`: which calibration, cluster or
    profile said it.
    """

    step_s: float
    step_s_low: float
    step_s_high: float
    peak_bytes: float
    limit_bytes: float = 0.0
    basis: str = ""

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
