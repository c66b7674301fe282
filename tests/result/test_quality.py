"""Every reason to doubt a row raises its own flag, and a clean run raises none.

The rule that ends a warm-up: no drift in step time and clock, or a limit that is told.

Same, different or can't tell; what to doubt about a measurement; when warm-up is over.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.result.quality import between_runs, compare, differences, flags, straggler
from fourfold.result.report import (
    DeviceSample,
    Prediction,
    ProbeReport,
    RankMemory,
    RankSteps,
    RunReport,
    StepReport,
)
from fourfold.result.timing import (
    LEAD,
    MOST_S,
    MOST_STEPS,
    WINDOW,
    Warmup,
    drifting,
    timing,
    verdict,
)
from fourfold.spec import codec
from tests.specs import run_spec

SPEC = run_spec("llama-tiny", seq_len=8)
FURTHER = replace(SPEC, model=replace(SPEC.model, mtp=1))


def report(*, seconds: tuple[float, ...] = (1.0,) * 8, **fields: object) -> RunReport:
    plain: dict = {
        "steps": tuple(StepReport(step=i, seconds=s) for i, s in enumerate(seconds)),
        "memory": (RankMemory(rank=0, stage=0, peak_bytes=10),),
        "ranks": (RankSteps(rank=0, step_s=seconds),),
        "window_s": sum(seconds) * 1.01,
        "samples": (sample("0x0000000000000000"),),
        "probes": probes(1.0, 1.01),
        "warmup": Warmup(steps=8, ended="steady", drift=0.01),
    }
    return RunReport(**({"spec": SPEC, "outcome": "ok"} | plain | fields))


def sample(throttle: str) -> DeviceSample:
    return DeviceSample(
        at_s=0.0, clock_hz=1.9e9, power_w=600.0, temperature_c=60.0, throttle=throttle
    )


def probes(before: float, after: float) -> tuple[ProbeReport, ...]:
    return (
        ProbeReport(when="before", flops_per_s=1e12 * before, bytes_per_s=1e12),
        ProbeReport(when="after", flops_per_s=1e12 * after, bytes_per_s=1e12),
    )


def test_a_clean_run_has_no_flag() -> None:
    assert flags(report()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"samples": (sample("0x0000000000000004"),)}, "throttled: software power cap"),
        ({"samples": (sample("0x0000000000000000"), sample("0x0000000000000048"))}, "throttled"),
        ({"samples": (sample("HW Thermal Slowdown"),)}, "throttled"),
        ({"samples": (sample("sw_power_cap"),)}, "throttled"),
        (
            {"memory": (RankMemory(rank=0, stage=0, peak_bytes=9, retries=2),)},
            "the allocator retried 2 times in the window",
        ),
        ({"ranks": (RankSteps(rank=0, recompiles=3),)}, "3 recompiles in the window"),
        ({"ranks": (RankSteps(rank=0, recompiles=1),)}, "1 recompile in the window"),
        ({"probes": probes(1.0, 0.9)}, "GEMMs -10% after the run"),
        ({"spec": FURTHER}, "measured without multi-token prediction (MTP, 1 layer)"),
        ({"window_s": 20.0}, "wall clock 20 s, but the steps sum to 8 s"),
        ({"seconds": (2.0, 2.0, 2.0, *(1.0,) * 9)}, "the first 2 steps were slower"),
        ({"seconds": (1.0, 1.5, 1.0, 1.5, 1.0, 1.5)}, "steps vary by 50%"),
        (
            {"warmup": Warmup(steps=32, ended="most steps", drift=0.2)},
            "still warming up: stopped at the limit of 32 steps",
        ),
        ({"warmup": Warmup(steps=1, ended="count")}, "timed steps include compilation"),
        (
            {"predicted": Prediction(step_s=0.02, step_s_low=0.01, step_s_high=0.04, peak_bytes=1)},
            "50 times the predicted seconds: a CPU without bf16 instructions? Try --precision fp32",
        ),
    ],
)
def test_each_doubt_is_told(fields, words) -> None:
    assert any(words in flag for flag in flags(report(**fields))), flags(report(**fields))


@pytest.mark.parametrize("throttle", ["0x0000000000000001", "0x0000000000000002", "", "Not Active"])
def test_idling_and_a_set_clock_are_no_fault(throttle: str) -> None:
    assert flags(report(samples=(sample(throttle),))) == []


def test_the_straggler_waits_least() -> None:
    ranks = tuple(
        RankSteps(rank=rank, step_s=(1.0, 1.0), busy_s=(busy, busy))
        for rank, busy in enumerate((0.5, 0.9, 0.4))
    )
    assert straggler(report(ranks=ranks)) == (1, 0.9)
    assert straggler(report(ranks=ranks[:1])) is None


FLAT = [[1.0, 1.01, 0.99], [1.0, 1.02, 0.98]]


def judged(times, clocks=(), least=0, spent_s=0.0) -> Warmup:
    return verdict(times, clocks, least=least, spent_s=spent_s)


def test_two_windows_that_agree_end_it() -> None:
    assert judged(FLAT[:1]).ended == "going on"
    found = judged(FLAT)
    assert (found.ended, found.steps, found.drift) == ("steady", LEAD + 2 * WINDOW, 0.0)
    assert "steady, medians of the last two windows of 3: +0.0%" in found.words


def test_drift_in_either_direction_goes_on() -> None:
    assert judged([[1.0] * 3, [0.96] * 3]).ended == "going on"
    assert judged([[1.0] * 3, [1.04] * 3]).ended == "going on"
    assert judged([[2.0] * 3, [1.0] * 3, [0.98] * 3]).ended == "steady"
    assert judged([[1.0, 9.0, 1.0], [1.0, 1.0, 9.0]]).ended == "steady"  # one slow step each


def test_a_falling_clock_goes_on_and_an_unread_one_does_not_matter() -> None:
    assert judged(FLAT, [[1.9e9] * 4, [1.7e9] * 4]).ended == "going on"
    assert judged(FLAT, [[1.9e9] * 4, [1.88e9] * 4]).ended == "steady"
    assert judged(FLAT, [[], [1.7e9]]).ended == "steady"


def test_never_fewer_than_asked() -> None:
    assert judged(FLAT, least=20).ended == "going on"


def test_limits_are_told() -> None:
    rising = [[float(n)] * WINDOW for n in range(1, (MOST_STEPS - LEAD) // WINDOW + 1)]
    assert judged(rising[:-1]).ended == "going on"
    found = judged(rising)
    assert found.ended == "most steps"
    assert found.still_drifts
    assert f"the limit of {MOST_STEPS} steps" in found.words
    assert judged([[30.0] * 3], spent_s=MOST_S).ended == "most seconds"
    assert not judged([[30.0] * 3], spent_s=MOST_S).still_drifts  # nothing is known to drift


def test_a_report_without_a_warm_up_still_reads() -> None:
    plain = {
        "outcome": "ok",
        "spec": {"model": "llama-tiny", "gpus": 1, "batch": {"seq_len": 8}, "warmup": 3},
        "memory": [{"rank": 0, "stage": 0, "peak_bytes": 5}],
        "ranks": [{"rank": 0, "step_s": [1.0], "busy_s": [0.5]}],
    }
    report = codec.load(RunReport, plain)
    assert (report.warmup, report.links, report.predicted, report.shortage) == (
        None,
        (),
        None,
        None,
    )
    assert not report.spec.settle
    assert codec.load(RunReport, codec.dump(report)) == report


def test_a_run_that_does_not_say_how_many_steps_settles() -> None:
    table = {"model": "llama-tiny", "gpus": 1, "batch": {"seq_len": 8}}
    loose = codec.load(RunReport, {"outcome": "ok", "spec": table}).spec
    assert loose.settle
    fixed = codec.load(RunReport, {"outcome": "ok", "spec": {**table, "warmup": 3}}).spec
    assert not fixed.settle
    assert fixed.run_id == loose.run_id


def test_verdicts() -> None:
    assert compare([1.0], [1.2], None).verdict == "can't tell"
    assert compare([1.0, 1.001, 0.999], [1.2, 1.201, 1.199], None).verdict == "different"
    assert compare([1.0, 1.1, 0.9], [1.02, 1.12, 0.93], None).verdict == "same"
    assert compare([1.0], [1.2], (0.01, 10)).verdict == "different"
    assert compare([1.0], [1.01], (0.01, 10)).verdict == "same"
    assert compare([], [1.0], (0.01, 10)).verdict == "can't tell"
    assert compare([1.0], [2.0], None).ratio == pytest.approx(2.0)


def test_spread_is_pooled_over_groups() -> None:
    assert between_runs([[1.0], [2.0]]) is None
    spread = between_runs([[1.0, 1.1], [2.0, 2.2]])
    assert (spread[0], spread[1]) == (pytest.approx(0.0674, abs=1e-3), 2)


def test_differences_are_named_by_path() -> None:
    one = {"layout": {"tp": 1, "pp": 2}, "seed": 0}
    other = {"layout": {"tp": 2, "pp": 2}, "tag": "x", "seed": 0}
    assert differences(one, other) == [("layout.tp", 1, 2), ("tag", None, "x")]


def test_warmup_ends_when_steps_no_longer_get_faster() -> None:
    assert drifting([5.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 2
    assert drifting([1.0] * 10) == 0
    assert drifting([1.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 0  # one slow step is no drift
    known = timing([5.0, 3.0, 2.0, *[1.0] * 9])
    assert (known.step_s, known.dropped) == (1.0, 2)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 30, 999, 1000, 5000])
def test_the_interval_holds_the_median(count: int) -> None:
    known = timing([1.0 + 0.001 * (n % 17) for n in range(count)])
    assert known.low_s <= known.step_s <= known.high_s
    assert known.samples + known.dropped == count
    assert timing([]) is None


@pytest.mark.parametrize(
    ("count", "outside"), [(5, 0), (6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (100, 39), (1000, 468)]
)
def test_the_interval_is_that_of_the_sign_test(count: int, outside: int) -> None:
    """Ranks of the 95% interval of a median, as tables of the binomial distribution print them."""
    known = timing(list(range(count)))
    assert (known.low_s, known.high_s) == (outside, count - 1 - outside)
