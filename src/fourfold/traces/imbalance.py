"""Uneven experts: grouped products of one shape that do not take the same time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fourfold.traces import parts
from fourfold.traces.linked import Linked
from fourfold.traces.placing import Placed

# The share of calls (the fastest) that stand for even routing: layers differ, and some are near it.
_EVEN_QUANTILE = 0.10
# Equal work varies by less.
_NOISE = 0.06


@dataclass(frozen=True, slots=True)
class Imbalance:
    """`seconds` of a step beyond what all calls would take at the speed of the most even ones."""

    seconds: float
    fastest_ms: float
    slowest_ms: float


def expert_imbalance(linked: Linked, placed: Placed, steps: int) -> Imbalance | None:
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for at, one in placed.weighed.items():
        if placed.part[at] == parts.EXPERTS:
            p = one.product
            groups[p.m, p.n, p.k, p.groups].append(float(linked.kernels.seconds[at]))
    many = {key: np.array(seconds) for key, seconds in groups.items() if len(seconds) >= 4}
    if not many:
        return None
    lost, spread = 0.0, (0.0, 0.0, 0.0)
    for seconds in many.values():
        even = float(np.quantile(seconds, _EVEN_QUANTILE))
        lost += float(np.maximum(seconds - even, 0.0).sum()) / steps
        ratio = float(seconds.max()) / even
        spread = max(spread, (ratio, 1e3 * float(seconds.min()), 1e3 * float(seconds.max())))
    if spread[0] < 1.0 + _NOISE:
        return None
    return Imbalance(lost, spread[1], spread[2])
