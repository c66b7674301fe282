"""The planner's running score: what was said before each run, against what came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fourfold.result.report import Outcome, Prediction, RankMemory, RunReport, StepReport
from fourfold.result.stored_run import StoredRun
from fourfold.search.running_score import scores, stored_predictions
from tests.specs import run_spec

SPEC = run_spec("llama-tiny", seq_len=8, global_batch=4)


def run(
    predicted_s: float | None,
    measured_s: float,
    *,
    outcome: Outcome = "ok",
    peak: float = 90.0,
    basis: str = "a cluster",
    micro: int = 1,
) -> StoredRun:
    said = None
    if predicted_s is not None:
        said = Prediction(
            step_s=predicted_s, step_s_low=0.9 * predicted_s, step_s_high=1.2 * predicted_s,
            peak_bytes=peak, limit_bytes=100.0, basis=basis,
        )  # fmt: skip
    return StoredRun.of(
        RunReport(
            spec=replace(SPEC, batch=replace(SPEC.batch, micro_batch=micro)),
            outcome=outcome,
            steps=(StepReport(step=0, seconds=measured_s),) if outcome == "ok" else (),
            memory=(RankMemory(rank=0, stage=0, peak_bytes=100),),
            predicted=said,
        )
    )


def test_errors_bias_coverage_and_regret() -> None:
    runs = [run(1.1, 1.0), run(0.8, 1.0, micro=2), run(1.05, 0.5, micro=4), run(None, 9.0)]
    (score,) = scores(stored_predictions(runs))
    assert score.runs == 3
    assert score.median_error_pct == pytest.approx(20.0)
    assert score.bias_pct == pytest.approx(10.0)
    assert score.inside_pct == pytest.approx(100 / 3)
    assert score.memory_bias_pct == pytest.approx(-10.0)
    assert score.regret_pct == pytest.approx(100.0)  # its first choice took 1.0 s, the best 0.5 s
    assert "regret of its first choice 100.0%" in str(score)


def test_fit_verdicts_count_out_of_memory_runs() -> None:
    runs = [
        run(1.0, 1.0, peak=90.0),  # said to fit, did
        run(1.0, 1.0, peak=120.0, micro=2),  # said not to, did
        run(1.0, 0.0, peak=120.0, micro=3, outcome="oom"),  # said not to, did not
        run(1.0, 0.0, peak=50.0, micro=4, outcome="oom"),  # said to fit, did not
        run(1.0, 0.0, peak=50.0, micro=4, outcome="crashed"),  # says nothing about memory
    ]
    (score,) = scores(stored_predictions(runs))
    assert (score.fit_runs, score.fit_right, score.missed_oom) == (4, 2, 1)
    assert "whether it fits right for 2 of 4, 1 out-of-memory not foreseen" in str(score)


def test_each_basis_has_its_own_score() -> None:
    runs = [run(1.0, 1.0), run(1.0, 1.0, micro=2), run(3.0, 1.0, basis="a guess")]
    first, second = scores(stored_predictions(runs))
    assert (first.basis, first.runs, second.basis) == ("a cluster", 2, "a guess")
    assert second.median_error_pct == pytest.approx(200.0)
    assert scores(stored_predictions([run(None, 1.0)])) == []


def test_only_an_out_of_memory_is_still_a_score() -> None:
    (score,) = scores(stored_predictions([run(1.0, 0.0, outcome="oom")]))
    assert score.median_error_pct is None
    assert str(score).endswith("whether it fits right for 0 of 1, 1 out-of-memory not foreseen")
