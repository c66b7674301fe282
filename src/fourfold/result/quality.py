"""What to doubt in a measurement, and whether two runs differ. Steps of one run say nothing about
the next run: the verdict comes from repeats, its own or those of other runs on the same device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Literal

from fourfold.escape import flattened
from fourfold.result.report import RunReport
from fourfold.result.stored_run import StoredRun
from fourfold.result.timing import LEAD, Timing, timing
from fourfold.spec.supported import left_out
from fourfold.units import counted

# Known work before and after the steps may differ by this much on a healthy machine.
_PROBE_CHANGE = 0.05
# The window's wall clock against the steps' own times: more means somebody waited between steps.
_WINDOW_GAP = 0.10
# Times the slow end of what was predicted that 16 bits take on a CPU without instructions for them.
_EMULATED = 3.0
# Driver's reasons that cost speed, by bit and in words; an idle GPU (1), a set clock (2) or one
# kept in step with others (0x10) is no fault of the run. From NVML's list of clock event reasons.
_SLOWING = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_SLOWING_WORDS = ("slowdown", "thermal", "power_brake", "power_cap")


def flags(report: RunReport) -> list[str]:
    doubts = []
    reasons = sorted({why for sample in report.samples for why in throttles(sample.throttle)})
    if reasons:
        doubts.append(f"throttled: {', '.join(reasons)}")
    retries = sum(rank.retries for rank in report.memory)
    if retries:
        times = "retried once" if retries == 1 else f"retried {retries} times"
        doubts.append(f"the allocator {times} in the window")
    recompiles = sum(rank.recompiles for rank in report.ranks)
    if recompiles:
        doubts.append(f"{counted(recompiles, 'recompile')} in the window")
    if report.warmup is not None and report.warmup.still_drifts:
        doubts.append(f"still warming up: {report.warmup.words}")
    elif report.warmup is not None and report.warmup.steps < LEAD:
        why = "compilation, first allocations or, on a CPU, counting of memory"
        doubts.append(f"timed steps include {why}: use --warmup {LEAD} or more")
    doubts += _probe_flags(report)
    timed = [step.seconds for step in report.steps if not step.warmup]
    if report.window_s and timed and report.window_s > (1 + _WINDOW_GAP) * sum(timed):
        total = f"the steps sum to {sum(timed):.3g} s"
        doubts.append(f"wall clock {report.window_s:.3g} s, but {total}")
    lost = sum(step.skipped for step in report.steps if not step.warmup)
    if lost:
        doubts.append(f"{lost} of {len(timed)} timed steps were skipped (fp16 overflow)")
    known = timing(timed)
    if known is not None and known.dropped:
        slow = "step was" if known.dropped == 1 else f"{known.dropped} steps were"
        doubts.append(f"the first {slow} slower and left out")
    if known is not None and known.high_s > 1.2 * known.low_s:
        doubts.append(f"steps vary by {100 * (known.high_s / known.low_s - 1):.0f}%")
    without = "" if dict(report.environment).get("engine") else left_out(report.spec.model)
    doubts += [f"measured {without}"] if without else []
    return doubts + _emulation_flags(report, known)


def _emulation_flags(report: RunReport, known: Timing | None) -> list[str]:
    kind, said = report.spec.policy.dtypes.compute, report.predicted
    on_gpu = "cuda" in dict(report.environment)
    if on_gpu or kind not in ("bf16", "fp16") or known is None or said is None:
        return []
    if known.step_s <= _EMULATED * said.step_s_high:
        return []
    times = f"{known.step_s / said.step_s:.0f} times the predicted seconds"
    return [f"{times}: a CPU without {kind} instructions? Try --precision fp32"]


def throttles(reasons: str) -> list[str]:
    """What slowed the device: the driver writes a mask of bits (0x...44), other tools words."""
    text = reasons.strip().lower()
    if text.startswith("0x"):
        try:
            mask = int(text, 16)
        except ValueError:
            return [text]  # not readable: better doubted than passed over
        return [words for bit, words in _SLOWING.items() if mask & bit]
    words = text.replace(" ", "_")
    return [reasons.strip()] if any(word in words for word in _SLOWING_WORDS) else []


def _probe_flags(report: RunReport) -> list[str]:
    rates = {probe.when: probe for probe in report.probes}
    if not {"before", "after"} <= rates.keys():
        return []
    doubts = []
    for name, words in (("flops_per_s", "GEMMs"), ("bytes_per_s", "copies")):
        before, after = getattr(rates["before"], name), getattr(rates["after"], name)
        change = after / before - 1 if before > 0 else 0.0
        if abs(change) > _PROBE_CHANGE:
            doubts.append(f"{words} {100 * change:+.0f}% after the run: the machine changed")
    return doubts


def straggler(report: RunReport) -> tuple[int, float] | None:
    """(rank, share of its time at work): the rank that waits least, where the clocks tell."""
    shares = {
        rank.rank: sum(rank.busy_s) / sum(rank.step_s)
        for rank in report.ranks
        if rank.busy_s and sum(rank.step_s) > 0
    }
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda rank: shares[rank])
    return rank, shares[rank]


Verdict = Literal["same", "different", "can't tell"]
# Two-sided 95% of Student's t by degrees of freedom; beyond the list it is near 2.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    verdict: Verdict
    ratio: float | None
    spread: float | None
    why: str


def differences(one: Any, other: Any) -> list[tuple[str, Any, Any]]:
    a, b = flattened(one), flattened(other)
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


def stored_spread(runs: Sequence[StoredRun], device: str) -> tuple[float, int] | None:
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
        why = "one run has no step time"
        return Comparison(verdict="can't tell", ratio=None, spread=None, why=why)
    ratio = math.exp(mean(map(math.log, other)) - mean(map(math.log, one)))
    own = between_runs([one, other])
    basis = own or known
    if basis is None:
        why = "one run each, and no repeats in the store to estimate the spread; run with --repeat"
        return Comparison(verdict="can't tell", ratio=ratio, spread=None, why=why)
    spread, freedom = basis
    t95 = _T95[freedom - 1] if freedom <= len(_T95) else 2.0 + 2.5 / freedom
    limit = t95 * spread * math.sqrt(1 / len(one) + 1 / len(other))
    whose = "their own repeats" if own else "repeats of other runs on this device"
    why = f"runs spread by {100 * spread:.2f}% ({whose}); {100 * limit:.2f}% is significant"
    verdict: Verdict = "different" if abs(math.log(ratio)) > limit else "same"
    return Comparison(verdict=verdict, ratio=ratio, spread=spread, why=why)
