"""Days of a training: closed forms against events one by one, and against published runs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.cost.calendar.assumptions import NAMES, Assumptions, defaults
from fourfold.cost.calendar.training import (
    DAY_S,
    Phase,
    Spent,
    checkpoint_interval_s,
    daly,
    spares_for,
    training,
)
from fourfold.errors import UserError
from tests.sampling import examples

LLAMA = Phase(gpus=16384, host_gpus=8, work_s=48 * DAY_S, params=405 * 10**9, low=0.9, high=1.15)


def one(value: float) -> np.ndarray:
    return np.array([value])


@pytest.mark.parametrize("mean_s", [3000.0, 20_000.0])
def test_the_closed_form_is_the_mean_of_events(mean_s: float) -> None:
    """A save begins every `interval` seconds of work, pauses it, and counts once it is written."""
    interval, pause, write, recover = 600.0, 20.0, 90.0, 400.0
    rng, kept_s, clock_s = np.random.default_rng(7), 0.0, 0.0
    while kept_s < 1e8:
        while (fails_s := rng.exponential(mean_s)) < recover:
            clock_s += fails_s
        clock_s += recover
        runs_s = rng.exponential(mean_s)
        clock_s += runs_s
        kept_s += interval * max(0, math.floor((runs_s - write) / (interval + pause)))
    found = daly(one(1.0 / mean_s), one(interval), one(pause), one(recover + write))[0]
    assert found == pytest.approx(clock_s / kept_s, rel=0.01)


def test_the_interval_between_checkpoints_is_the_best() -> None:
    rate, pause, write = one(1.0 / 10_000.0), one(3.0), one(20.0)
    best = checkpoint_interval_s(rate, pause, write)
    took = [daly(rate, best * part, pause, one(700.0))[0] for part in (0.6, 1.0, 1.6)]
    assert took[1] < min(took[0], took[2])
    assert checkpoint_interval_s(rate, pause, one(5000.0)) == 5000.0  # a write ends before the next
    assert checkpoint_interval_s(one(0.0), pause, write) == DAY_S


@pytest.mark.parametrize("away", [0.0, 0.3, 4.0, 30.0, 900.0])
def test_spares_suffice_99_of_100_times(away: float) -> None:
    drawn = np.random.default_rng(1).poisson(away, 200_000)
    spares = spares_for(away)
    assert (drawn <= spares).mean() > 0.985
    assert spares == 0 or (drawn <= spares - 1).mean() < 0.992


def test_llama_3_s_snapshot() -> None:
    """54 days: 466 interruptions, more than 90% of the time effective (arXiv 2407.21783, 3.3.4)."""
    seen = defaults().changed({"failures_per_gpu_day": 466 / 54 / 16384})
    found = training([LLAMA], seen)
    assert found.effective == pytest.approx(0.90, abs=0.03)
    assert found.interruptions / found.total_s * 54 * DAY_S == pytest.approx(466)
    usual = training([LLAMA], defaults())
    assert usual.effective == pytest.approx(0.90, abs=0.03)
    parts = usual.parts[0]
    assert sum(float(getattr(parts, f"{name}_s")[0]) for name in Spent.PARTS) == usual.total_s
    assert min(float(getattr(parts, f"{name}_s")[0]) for name in Spent.PARTS) >= 0.0


@settings(max_examples=examples(200), deadline=None)
@given(
    gpus=st.sampled_from([8, 384, 9600, 65536]),
    days=st.floats(0.1, 300),
    low=st.floats(0.5, 1.0),
    high=st.floats(1.0, 3.0),
    chance=st.floats(0.02, 0.98),
)
def test_chance_and_time_are_inverse(gpus, days, low, high, chance) -> None:
    phase = Phase(gpus=gpus, host_gpus=8, work_s=days * DAY_S, params=10**10, low=low, high=high)
    found = training([phase], defaults())
    within = found.within_s(chance)
    assert found.chance(within) == pytest.approx(chance, abs=0.02)
    assert found.chance(within * 1.1) >= found.chance(within) >= found.chance(within * 0.9)
    assert found.within_s(0.1) <= found.within_s(0.5) <= found.within_s(0.9)
    assert found.total_s > phase.work_s
    two = [replace(phase, work_s=phase.work_s * part) for part in (0.3, 0.7)]
    assert training(two, defaults()).total_s == pytest.approx(found.total_s)


def test_what_is_worse_takes_longer() -> None:
    usual = training([LLAMA], defaults()).total_s
    worse = {"failures_per_gpu_day": 2e-3, "detect_s": "1h", "restart_s": 1200,
             "host_storage_bytes_per_s": "50MB/s", "save_pause_s": 60, "slow_found_days": 5,
             "evaluation_share": "5%", "repeated_share": 0.05, "spare_hosts": 3}  # fmt: skip
    for name, value in worse.items():
        assert training([LLAMA], defaults().changed({name: value})).total_s > usual, name
    spread = {"detect_s": {"value": 420, "low": 10, "high": 36000}}
    assert training([LLAMA], defaults().changed(spread)).within_s(0.9) > 1.2 * usual


def test_each_assumption_has_a_source_and_a_bad_one_an_error() -> None:
    known = defaults()
    assert all(getattr(known, name).source and getattr(known, name).about for name in NAMES)
    cases = {
        "detect": 1,
        "detect_s": "soon",
        "evaluation_share": "150%",
        "restart_s": -1,
        "save_pause_s": math.nan,
        "spare_hosts": "many",
        "host_storage_bytes_per_s": 0,
        "repair_days": {"value": 1},
        "repeated_share": {"value": 0.1, "low": 0.2, "high": 0.3},
        "slow_stretch": True,
    }
    for name, value in cases.items():
        with pytest.raises(UserError, match=name):
            Assumptions.changed(known, {name: value})
