"""A real engine by its shipped template: torchtitan 0.2.2 trains on two ranks of this CPU, beside
our own engine, into one store and one table; its real log passes through `collect`."""

from __future__ import annotations

from pathlib import Path

import pytest

import fourfold
from tests.engines.titan_template import NAME, template

RUN = {
    "model": "llama-tiny",
    "gpus": 2,
    "steps": 6,
    "warmup": 2,
    "batch": {"seq_len": 128, "global_batch": 8, "micro_batch": 2},
    "policy": {"precision": "fp32", "sharding": "zero3"},
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, str]:
    folder = tmp_path_factory.mktemp("both")
    runs = str(folder / "runs")
    (theirs,) = fourfold.bench(
        RUN, fourfold.BenchRequest(runs=runs, engine=template(folder))
    ).rows()
    (ours,) = fourfold.bench(RUN, fourfold.BenchRequest(runs=runs)).rows()
    return theirs, ours, runs


def test_it_trains_and_its_steps_are_measured(both: tuple[dict, dict, str]) -> None:
    theirs, ours, _ = both
    assert theirs["outcome"] == "ok", (Path(theirs["folder"]) / "engine.log").read_text()[-3000:]
    assert ours["outcome"] == "ok"
    for run in both[:2]:
        # As many tokens, on as many ranks, by the clock of each engine.
        rate = 8 * 128 / 2 / run["step_s"]
        assert run["tokens_s_gpu"] == pytest.approx(rate, rel=1e-3)
        assert 5.5 < run["loss"] < 7.5  # 512 tokens at random: ln(512) is 6.2
    assert theirs["peak_bytes"] > 2**28


def test_both_engines_are_rows_of_one_table(both: tuple[dict, dict, str]) -> None:
    _, _, runs = both
    report = fourfold.report(fourfold.ReportRequest(runs=runs))
    assert {row["stack"] for row in report.rows()} == {NAME, "fourfold"}
    ((_, table),) = report.tables()
    engines = table.headings.index("Engine")
    assert sorted(row.cells[engines] for row in table.data) == ["fourfold", NAME]
    stored = fourfold.runs(fourfold.RunsRequest(runs=runs)).rows()
    assert len({row["run_id"] for row in stored}) == 1, "the same run, by two engines"


def test_its_real_log_is_collected_with_the_whole_configuration(both, tmp_path) -> None:
    theirs, _, _ = both
    log = Path(theirs["folder"]) / "engine.log"
    request = fourfold.CollectRequest(
        logs=(str(log),), out=str(tmp_path / "rows.csv"), fields={"hardware": "a100-80gb"}
    )
    answer = fourfold.collect(request)
    (row,) = answer.rows_read
    assert answer.files[0].book.unread == 0
    said = {
        "engine": "torchtitan", "status": "ok", "n_layers": "4", "d_model": "64", "n_heads": "4",
        "n_kv_heads": "2", "d_ff": "176", "vocab": "512", "seq_len": "128", "n_gpus": "2",
        "dp": "2", "tp": "1", "cp": "1", "pp": "1", "mbs": "2", "gbs": "8", "sharding": "zero3",
        "precision": "fp32", "act_ckpt": "none", "tied": "0",
    }  # fmt: skip
    assert {name: row[name] for name in said} == said
    # Every step but the first is a second line of the same log, read by two rules.
    assert 0 < int(row["steps"]) < 8
    assert float(row["step_s"]) == pytest.approx(theirs["step_s"], rel=0.5)
