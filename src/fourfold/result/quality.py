"""Can this measurement be trusted? What happened in the timed window that should not have.

A flagged row is still a row: the flags say what to doubt.
"""

from __future__ import annotations

from fourfold.result.report import RunReport
from fourfold.result.timing import timing

# Known work before and after the steps may differ by this much on a healthy machine.
_PROBE_CHANGE = 0.05
# The window's wall clock against the steps' own times: more means somebody waited between steps.
_WINDOW_GAP = 0.10
# Driver's reasons that cost speed; an idle GPU or a set clock limit is no fault of the run.
_SLOWING = ("hw_slowdown", "hw_thermal", "sw_thermal", "hw_power_brake", "sw_power_cap", "thermal")


def flags(report: RunReport) -> list[str]:
    found = []
    reasons = sorted({sample.throttle for sample in report.samples if _slows(sample.throttle)})
    if reasons:
        found.append(f"throttled: {', '.join(reasons)}")
    retries = sum(rank.retries for rank in report.memory)
    if retries:
        found.append(f"{retries} allocator retries")
    recompiles = sum(rank.recompiles for rank in report.ranks)
    if recompiles:
        found.append(f"{recompiles} recompiles in the window")
    found += _probe_flags(report)
    timed = [step.seconds for step in report.steps if not step.warmup]
    if report.window_s and timed and report.window_s > (1 + _WINDOW_GAP) * sum(timed):
        found.append(
            f"wall clock {report.window_s:.3g} s over steps that take {sum(timed):.3g} s together"
        )
    lost = sum(step.skipped for step in report.steps if not step.warmup)
    if lost:
        found.append(f"{lost} of {len(timed)} timed steps changed no weights (fp16 overflow)")
    known = timing(timed)
    if known is not None and known.dropped:
        found.append(f"{known.dropped} more steps of warm-up than asked")
    if known is not None and known.high_s > 1.2 * known.low_s:
        found.append(f"steps vary by {100 * (known.high_s / known.low_s - 1):.0f}%")
    return found


def _slows(throttle: str) -> bool:
    words = throttle.lower().replace(" ", "_")
    return any(reason in words for reason in _SLOWING)


def _probe_flags(report: RunReport) -> list[str]:
    rates = {probe.when: probe for probe in report.probes}
    if not {"before", "after"} <= rates.keys():
        return []
    found = []
    for name, words in (("flops_per_s", "products"), ("bytes_per_s", "copies")):
        before, after = getattr(rates["before"], name), getattr(rates["after"], name)
        if before > 0 and abs(after / before - 1) > _PROBE_CHANGE:
            found.append(
                f"{words} {100 * (after / before - 1):+.0f}% after the run: machine changed"
            )
    return found


def straggler(report: RunReport) -> tuple[int, float] | None:
    """(rank, share of its time at work): the rank that waits least, where the clocks tell."""
    shares = {
        rank.rank: sum(rank.busy_s) / sum(rank.step_s)
        for rank in report.ranks
        if rank.busy_s and sum(rank.step_s) > 0
    }
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda one: shares[one])
    return rank, shares[rank]
