"""Micro batch 'auto': the largest that fits, by prediction first, then by a few short trials.

Every trial is a run of its own in fresh processes, so an out-of-memory ends it for all ranks alike:
nobody waits for a rank that has given up. Trials are bounded, and halve what is left open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fourfold.commands import progress
from fourfold.commands.foresight import Foresight
from fourfold.launch.campaign import Campaign
from fourfold.result.prediction import Prediction
from fourfold.search.legal import Target, why_not
from fourfold.spec.run import RunSpec

MOST_TRIALS = 6
# Trials are stored like runs, but measure nothing.
TRIAL_TAG = "auto-trial"


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


def guessed(spec: RunSpec, ahead: Foresight) -> RunSpec:
    """A run of 'auto' with the size that prediction alone would take; others as they are."""
    sizes = [] if spec.batch.micro_batch else legal_sizes(spec)
    if not sizes:
        return spec
    return with_micro(spec, sizes[first_guess(_said(spec, sizes, ahead))])


def decide(spec: RunSpec, campaign: Campaign) -> tuple[RunSpec, list[dict[str, Any]]]:
    """The spec with its micro batch chosen, and the trials that chose it; they are stored too."""
    sizes = [] if spec.batch.micro_batch else legal_sizes(spec)
    if not sizes:
        return (spec if spec.batch.micro_batch else with_micro(spec, 1)), []
    ahead = campaign.foresight
    guess = first_guess(_said(spec, sizes, ahead)) if isinstance(ahead, Foresight) else 0
    short = replace(spec, steps=1, warmup=1, settle=False, tag=TRIAL_TAG)

    def fits(size: int) -> bool:
        progress.end_line()
        print(f"trying micro batch {size}", file=sys.stderr, flush=True)
        (done,) = campaign.run(with_micro(short, size))
        return done.outcome == "ok"

    best, trials = largest_fitting(sizes, guess, fits)
    found = [{"micro_batch": size, "fits": good} for size, good in trials]
    return with_micro(spec, best or sizes[0]), found


def _said(spec: RunSpec, sizes: list[int], ahead: Foresight) -> list[Prediction]:
    return ahead.predictions([with_micro(spec, size) for size in sizes])


def first_guess(answers: list[Prediction]) -> int:
    """Place of the largest size whose predicted memory fits; the smallest when none does."""
    fitting = [at for at, answer in enumerate(answers) if answer.fits]
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
