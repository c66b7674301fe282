"""What does a prediction say? Seconds of a step by part, bytes of the fullest stage by kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One named share of a total: seconds of a step, or bytes of a rank."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The interval holds 80% of measured runs; `parts` add up to `step_s`, `memory` to the peak."""

    step_s: float
    step_s_low: float
    step_s_high: float
    parts: tuple[Part, ...]
    peak_bytes: float
    memory: tuple[Part, ...]
    worst_stage: int
    fits: bool
    reasons: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    calibration: str = "generic"
