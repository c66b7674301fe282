"""Are two runs the same or different? Settings, surroundings, and a verdict that admits doubt.

Steps of one run say nothing about the next run: only repeats do. The verdict comes from repeats of
the two runs, else from the spread between repeats of other runs on the same device in the store.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from fourfold.result.record import Record

Verdict = Literal["same", "different", "can't tell"]
# Two-sided 95% of Student's t by degrees of freedom; beyond the list it is near 2.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    verdict: Verdict
    ratio: float | None
    spread: float | None
    why: str


def flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    """{'layout.tp': 2, ...}"""
    if not isinstance(plain, Mapping):
        return {prefix: plain}
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def differences(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    a, b = flat(one), flat(other)
    names = [*a, *(name for name in b if name not in a)]
    return [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def between_runs(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """(relative standard deviation between repeats, degrees of freedom), pooled over groups."""
    total, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1:
            logs = [math.log(value) for value in values]
            middle = mean(logs)
            total += sum((value - middle) ** 2 for value in logs)
            freedom += len(values) - 1
    return (math.sqrt(total / freedom), freedom) if freedom else None


def stored_spread(runs: Sequence[Record], device: str) -> tuple[float, int] | None:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.device == device and run.step_s:
            groups[run.run_id, run.torch].append(run.step_s)
    return between_runs(list(groups.values()))


def compare(
    one: Sequence[float], other: Sequence[float], known: tuple[float, int] | None
) -> Comparison:
    """`one` and `other` are seconds per step of each repeat; `known` is a stored spread."""
    if not one or not other:
        return Comparison(
            verdict="can't tell", ratio=None, spread=None, why="one run has no step time"
        )
    ratio = math.exp(mean(map(math.log, other)) - mean(map(math.log, one)))
    own = between_runs([one, other])
    basis = own or known
    if basis is None:
        why = "one run each, and no repeats in the store to estimate the spread; run with --repeat"
        return Comparison(verdict="can't tell", ratio=ratio, spread=None, why=why)
    spread, freedom = basis
    limit = _t95(freedom) * spread * math.sqrt(1 / len(one) + 1 / len(other))
    whose = "their own repeats" if own else "repeats of other runs on this device"
    why = f"runs spread by {100 * spread:.2f}% ({whose}); {100 * limit:.2f}% is significant"
    verdict: Verdict = "different" if abs(math.log(ratio)) > limit else "same"
    return Comparison(verdict=verdict, ratio=ratio, spread=spread, why=why)


def _t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else 2.0 + 2.5 / freedom
