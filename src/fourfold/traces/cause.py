"""What a cause is, and all that causes are looked for in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fourfold.traces import parts
from fourfold.traces.expect import Expected, Run
from fourfold.traces.host import TracedTimes
from fourfold.traces.linked import Linked

# A loss below this share of the step is no news.
LEAST_SHARE = 0.015
# Norms, activations and casts, which a compiler fuses.
MEMORY_BOUND = (parts.ELEMENTWISE, parts.LOSS, parts.COPIES)
Sure = Literal["measured", "likely"]


@dataclass(frozen=True, slots=True)
class Cause:
    """`fix`: the word of --what-if that takes it away. `low` and `high`: seconds of a step that may
    be won. `sure`: 'measured' in the trace itself, or 'likely' by what is expected."""

    name: str
    seconds: float
    low: float
    high: float
    sure: Sure
    evidence: str
    remedy: str
    fix: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceCase:
    """All that causes are looked for in. `fits_without`: bytes that the run would hold without
    recomputing, and those of the GPU; None: not known."""

    linked: Linked
    run: Run
    measured: dict[str, float]
    expected: Expected
    times: tuple[TracedTimes, ...]
    step_s: float
    fits_without: tuple[float, float] | None = None
    is_priced: bool = True

    def over(self, *names: str) -> float:
        """Seconds beyond the middle of what is expected."""
        return sum(self.measured.get(name, 0.0) for name in names) - self.expected.mid(*names)

    def is_outside(self, *names: str) -> bool:
        if not self.expected.mid(*names):
            return False
        spent = sum(self.measured.get(name, 0.0) for name in names)
        return spent > self.expected.high(*names)


def ratio(case: TraceCase, names: tuple[str, ...]) -> float:
    mid = case.expected.mid(*names)
    return sum(case.measured.get(name, 0.0) for name in names) / mid if mid else 1.0
