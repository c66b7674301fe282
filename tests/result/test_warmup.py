"""The rule that ends a warm-up: no drift in step time and clock, or a limit that is told."""

from __future__ import annotations

from fourfold.result.report import RunReport
from fourfold.result.timing import LEAD, MOST_S, MOST_STEPS, WINDOW, Warmup, verdict
from fourfold.spec import codec

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
