"""Can this measurement be trusted? What happened in the timed window that should not have.

A flagged row is still a row: the flags say what to doubt.
"""

from __future__ import annotations

from fourfold.result.read.timing import timing
from fourfold.result.report import RunReport

# Known work before and after the steps may differ by this much on a healthy machine.
_PROBE_CHANGE = 0.05
# The window's wall clock against the steps' own times: more means somebody waited between steps.
_WINDOW_GAP = 0.10
# Driver's reasons that cost speed, by bit and in words; an idle GPU (1), a set clock (2) or one
# kept in step with others (0x10) is no fault of the run. From NVML's list of clock event reasons.
_SLOWING = {
    0x04: "software power cap", 0x08: "hardware slowdown", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "hardware power brake",
}  # fmt: skip
_SLOWING_WORDS = ("slowdown", "thermal", "power_brake", "power_cap")


def flags(report: RunReport) -> list[str]:
    found = []
    reasons = sorted({reason for one in report.samples for reason in throttles(one.throttle)})
    if reasons:
        found.append(f"throttled: {', '.join(reasons)}")
    retries = sum(rank.retries for rank in report.memory)
    if retries:
        found.append(f"{retries} allocator retries in the window")
    recompiles = sum(rank.recompiles for rank in report.ranks)
    if recompiles:
        found.append(f"{recompiles} recompiles in the window")
    if report.warmup is not None and report.warmup.still_drifts:
        found.append(f"still warming up: {report.warmup.words}")
    found += _probe_flags(report)
    timed = [step.seconds for step in report.steps if not step.warmup]
    if report.window_s and timed and report.window_s > (1 + _WINDOW_GAP) * sum(timed):
        found.append(f"wall clock {report.window_s:.3g} s, but the steps sum to {sum(timed):.3g} s")
    lost = sum(step.skipped for step in report.steps if not step.warmup)
    if lost:
        found.append(f"{lost} of {len(timed)} timed steps were skipped (fp16 overflow)")
    known = timing(timed)
    if known is not None and known.dropped:
        found.append(f"the first {known.dropped} timed steps were slower and are excluded")
    if known is not None and known.high_s > 1.2 * known.low_s:
        found.append(f"steps vary by {100 * (known.high_s / known.low_s - 1):.0f}%")
    return found


def throttles(said: str) -> list[str]:
    """What slowed the device: the driver writes a mask of bits (0x...44), other tools words."""
    text = said.strip().lower()
    if text.startswith("0x"):
        try:
            mask = int(text, 16)
        except ValueError:
            return [text]  # not readable: better doubted than passed over
        return [words for bit, words in _SLOWING.items() if mask & bit]
    words = text.replace(" ", "_")
    return [said.strip()] if any(word in words for word in _SLOWING_WORDS) else []


def _probe_flags(report: RunReport) -> list[str]:
    rates = {probe.when: probe for probe in report.probes}
    if not {"before", "after"} <= rates.keys():
        return []
    found = []
    for name, words in (("flops_per_s", "GEMMs"), ("bytes_per_s", "copies")):
        before, after = getattr(rates["before"], name), getattr(rates["after"], name)
        if before > 0 and abs(after / before - 1) > _PROBE_CHANGE:
            found.append(
                f"{words} {100 * (after / before - 1):+.0f}% after the run: the machine changed"
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
