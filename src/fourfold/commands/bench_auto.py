"""Micro batch 'auto': the largest that fits, by prediction first, then by a few short trials.

Every trial is a run of its own in fresh processes, so an out-of-memory ends it for all ranks alike:
nobody waits for a rank that has given up. Trials are bounded, and halve what is left open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fourfold.search.forecast import Forecast
from fourfold.search.legal import Target, why_not
from fourfold.spec.run import RunSpec

MOST_TRIALS = 6


def with_micro(spec: RunSpec, micro: int) -> RunSpec:
    return replace(spec, batch=replace(spec.batch, micro_batch=micro))


def legal_sizes(spec: RunSpec) -> list[int]:
    """From one sequence to a rank's whole share, as far as the layout allows."""
    share = -(-spec.batch.global_batch // spec.layout.dp)
    found = []
    for micro in range(1, share + 1):
        one = with_micro(spec, micro)
        if not why_not(one.model, one.layout, one.batch, one.policy, Target(gpus=one.gpus)):
            found.append(micro)
    return found


def first_guess(sizes: list[int], answers: list[Forecast], limit_bytes: float) -> int:
    """Place of the largest size whose predicted memory fits; the smallest when none does."""
    fitting = [at for at, answer in enumerate(answers) if answer.peak_bytes <= limit_bytes]
    return fitting[-1] if fitting else 0


def largest_fitting(
    sizes: list[int], guess: int, fits: Callable[[int], bool]
) -> tuple[int | None, list[tuple[int, bool]]]:
    """(the largest size that ran, the trials). Starts at the guess and closes in by halves."""
    low, high = -1, len(sizes)  # low ran, high did not
    at = guess
    trials: list[tuple[int, bool]] = []
    while high - low > 1 and len(trials) < MOST_TRIALS:
        good = fits(sizes[at])
        trials.append((sizes[at], good))
        low, high = (at, high) if good else (low, at)
        at = (low + high) // 2 if trials and high <= len(sizes) else low
        if good and high == len(sizes):
            at = min(len(sizes) - 1, low + max(1, (len(sizes) - low) // 2))
        at = max(low + 1, min(high - 1, at))
    return (sizes[low] if low >= 0 else None), trials
