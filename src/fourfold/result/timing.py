"""How long is a step, and how sure is that? The median of the timed steps with its interval.

The median: one slow step (a neighbour, a garbage collection) must not move the figure. The interval
holds the true median with 95% if steps are independent; it comes from ranks of the sorted times, so
it assumes nothing about their distribution. It says nothing about the next run: repeats do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    step_s: float
    low_s: float
    high_s: float
    samples: int


def timing(seconds: Sequence[float]) -> Timing | None:
    """None without a single timed step. Below six steps the interval is the whole range."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    outside = _ranks_outside(count)
    return Timing(
        step_s=middle,
        low_s=ordered[outside],
        high_s=ordered[count - 1 - outside],
        samples=count,
    )


def _ranks_outside(count: int) -> int:
    """How many values may be left out at each end so that 95% remain: binomial with p = 1/2."""
    tail, outside = 0.0, 0
    for k in range((count - 1) // 2):
        tail += math.comb(count, k) / 2.0**count if count < 1000 else 0.0
        if tail > 0.025:
            break
        outside = k + 1
    if count >= 1000:
        outside = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return min(outside, (count - 1) // 2)
