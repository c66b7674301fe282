"""How long is a step, and how sure is that? The median of the timed steps with its interval.

Warm-up ends when steps no longer get faster: after the asked warm-up, a step is left out as long as
the median of it and the two after it is over 3% above the median of all later ones, up to half of
the steps. The median of the rest: one slow step (a neighbour) must not move the figure. The
interval holds the true median with 95% if steps are independent; it comes from ranks of the sorted
times and assumes nothing about their distribution. It says nothing about the next run: repeats do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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
    """None without a single timed step. Below six steps the interval is the whole range."""
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
