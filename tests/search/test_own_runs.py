"""Runs that the user has measured: they fit, stand in the table, and nothing slower is advised."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

import fourfold
from fourfold.search.plan_answer import PlanAnswer, PlanRow
from fourfold.show.plan import page
from fourfold.show.plan_notes import compared
from fourfold.units import short_s
from fourfold.verbs.requests import PlanRequest

REQUEST = PlanRequest(
    model="llama-3.1-70b", cluster="nvidia-h100", gpus=64, seq_len=8192, global_batch=256,
    stack="megatron", top=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> PlanAnswer:
    return fourfold.plan(REQUEST)


def table_of(path: Path, row: PlanRow, step_s: float, grad_dtype: str = "fp32") -> str:
    layout, policy = row.layout, row.policy
    cells = {
        "row_id": "mine-1", "source": "mine", "stack": "megatron-bridge-2026",
        "cluster": "nvidia-h100", "hardware": "h100-80gb", "gpus_per_node": 8, "family": "llama",
        "model": "llama-3.1-70b", "n_layers": 80, "d_model": 8192, "n_heads": 64, "n_kv_heads": 8,
        "d_ff": 28672, "vocab": 128256, "tied": 0, "seq_len": 8192, "n_gpus": 64,
        "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "vpp": policy.virtual_stages,
        "dp": layout.dp, "sharding": policy.sharding, "sequence_parallel": 1,
        "mbs": row.micro_batch, "gbs": 256, "precision": "bf16", "act_ckpt": policy.recompute,
        "attention": "flash", "step_s": step_s, "status": "ok", "grad_dtype": grad_dtype,
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(cells))
        writer.writeheader()
        writer.writerow(cells)
    return str(path)


def risky_row(plan: PlanAnswer) -> PlanRow:
    return next(row for row in plan.ranked if row.fit_chance < 0.9)


def test_measured_run_fits_and_comes_first_where_it_is_fastest(
    plan: PlanAnswer, tmp_path: Path
) -> None:
    own = risky_row(plan)
    path = table_of(tmp_path / "mine.csv", own, 0.99 * own.step_s)
    answer = fourfold.plan(replace(REQUEST, measured=path))
    best = answer.best
    assert best is not None
    assert (str(best), best.micro_batch) == (str(own), own.micro_batch)
    assert best.fit_chance == 1.0
    assert best.measured_s == 0.99 * own.step_s
    assert best.step_s == own.step_s
    sentence = page(answer)[0]
    assert isinstance(sentence, str)
    assert "You measured it: " in sentence
    assert answer.measured is not None
    assert "#1 itself, predicted 1.0% slower" in compared(answer.measured, best)
    front = fourfold.front(replace(REQUEST, measured=path), "memory")
    assert front.points[0].row.measured_s == 0.99 * own.step_s


def test_measured_run_is_listed_where_it_is_slow(plan: PlanAnswer, tmp_path: Path) -> None:
    assert plan.best is not None
    own = risky_row(plan)
    path = table_of(tmp_path / "mine.csv", own, 1.5 * plan.best.step_s)
    answer = fourfold.plan(replace(REQUEST, measured=path))
    assert answer.best is not None
    assert str(answer.best) == str(plan.best)
    listed = [row for row in answer.ranked if row.measured_s is not None]
    assert [str(row) for row in listed] == [str(own)]
    assert listed[0].fit_chance == 1.0
    assert "measured: " in listed[0].note


@pytest.mark.parametrize("share", [0.9, 0.99, 1.0, 1.01, 1.03])
def test_plan_advises_nothing_slower_than_a_measured_run(
    plan: PlanAnswer, tmp_path: Path, share: float
) -> None:
    assert plan.best is not None
    path = table_of(tmp_path / "mine.csv", plan.ranked[1], share * plan.best.step_s)
    best = fourfold.plan(replace(REQUEST, measured=path)).best
    assert best is not None
    assert best.measured_s is not None or best.step_s <= share * plan.best.step_s


def test_run_with_narrower_gradients_does_not_prove_that_wider_ones_fit(
    plan: PlanAnswer, tmp_path: Path
) -> None:
    own = risky_row(plan)
    path = table_of(tmp_path / "mine.csv", own, own.step_s, grad_dtype="bf16")
    answer = fourfold.plan(replace(REQUEST, measured=path))
    assert all(row.measured_s is None for row in answer.ranked)
    assert str(answer.best) == str(plan.best)


def test_calibration_knows_that_the_runs_which_taught_it_fit(
    plan: PlanAnswer, tmp_path: Path
) -> None:
    own, out = risky_row(plan), tmp_path / "mine.json"
    path = table_of(tmp_path / "mine.csv", own, 0.99 * own.step_s)
    fitted = fourfold.fit(fourfold.FitRequest(rows=(path,), name="mine"))
    out.write_text(fitted.json())
    answer = fourfold.plan(replace(REQUEST, calibration=str(out)))
    best = answer.best
    assert best is not None
    assert (str(best), best.fit_chance, best.measured_s) == (str(own), 1.0, 0.99 * own.step_s)
    both = fourfold.plan(replace(REQUEST, calibration=str(out), measured=path)).best
    assert both is not None
    assert (both.step_s, both.measured_s) == (best.step_s, best.measured_s)


def test_calibration_of_many_rows_keeps_no_runs(
    plan: PlanAnswer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fourfold.verbs.fit._MOST_OWN_RUNS", 0)
    path = table_of(tmp_path / "mine.csv", risky_row(plan), 40.0)
    fitted = fourfold.fit(fourfold.FitRequest(rows=(path,), name="mine"))
    assert fitted.calibration.runs == ""


def test_run_on_a_gpu_with_more_memory_does_not_prove_a_fit(
    plan: PlanAnswer, tmp_path: Path
) -> None:
    own = risky_row(plan)
    path = Path(table_of(tmp_path / "mine.csv", own, own.step_s))
    larger = path.read_text().replace("nvidia-h100,h100-80gb", "mine,h200")
    path.write_text(larger)
    answer = fourfold.plan(replace(REQUEST, measured=str(path)))
    assert all(row.measured_s is None for row in answer.ranked)


def test_measured_row_is_compared_by_what_was_measured(plan: PlanAnswer, tmp_path: Path) -> None:
    assert plan.best is not None
    own = risky_row(plan)
    path = table_of(tmp_path / "mine.csv", own, 1.5 * plan.best.step_s)
    answer = fourfold.plan(replace(REQUEST, measured=path))
    assert answer.best is not None
    (cells,) = [
        line for part in page(answer) for line in getattr(part, "rows", ())
        if any("measured" in cell for cell in line)
    ]  # fmt: skip
    assert f"+50.0% measured {short_s(1.5 * plan.best.step_s)}" in cells


def test_further_ways_to_run_a_layout_stand_by_their_seconds() -> None:
    """Fewer layouts fit than the table has rows."""
    rows = fourfold.plan(replace(REQUEST, top=20)).ranked
    slower = [row for row in rows if row.fit_chance >= 0.9 and row.exported and not row.tied]
    assert len({str(row.layout) for row in slower}) < len(slower)
    assert [row.step_s for row in slower] == sorted(row.step_s for row in slower)
