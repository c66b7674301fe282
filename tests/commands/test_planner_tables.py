"""predict, fit and score from the command line: files, exit codes, what a stranger reads."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fourfold.cli import main

GOLDEN = Path(__file__).parent.parent / "golden"


def test_predict_writes_a_line_for_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert main(["predict", str(GOLDEN / "par4d.csv"), "--out", str(out)]) == 0
    with out.open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 188
    first = rows[0]
    assert first["row_id"] == "par4d000"
    low, mid, high = (float(first[n]) for n in ("step_s_low", "step_s", "step_s_high"))
    assert 0 < low < mid < high
    assert first["fits"] in ("0", "1")
    assert "188 of 188" in capsys.readouterr().err


def test_predict_of_an_empty_or_foreign_file_is_a_bad_request(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert main(["predict", str(empty), "--out", str(tmp_path / "o.csv")]) == 2
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("a,b\n1,2\n")
    assert main(["predict", str(foreign), "--out", str(tmp_path / "o.csv")]) == 2
    assert not (tmp_path / "o.csv").exists()


def test_fit_then_predict_and_score_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    assert main(["fit", str(GOLDEN / "bloom.csv"), "--out", str(mine), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {e["stack"] for e in told["entries"]} == {
        "megatron-deepspeed-2022",
        "megatron-deepspeed-2022b",
    }
    assert all(len(e["free_time"]) <= 6 and len(e["free_memory"]) <= 3 for e in told["entries"])
    stored = json.loads(mine.read_text())
    entry = stored["entries"][0]
    assert entry["rows_time"] == 64
    assert entry["errors_pct"]["cv_median"] > 0
    args = ["score", str(GOLDEN / "bloom.csv"), "--calibration", str(mine), "--format", "json"]
    assert main(args) == 0
    (score,) = json.loads(capsys.readouterr().out)["scores"]
    assert score["how"] == "as fitted"
    assert score["rows"] == 69
    assert score["median_pct"] < 4


def test_suggest_names_runs_and_ignores_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", str(GOLDEN / "mpt.csv"), "--suggest", "3", "--format", "json"]) == 0
    plain = json.loads(capsys.readouterr().out)["suggested"]
    assert len(plain) == 6
    with (GOLDEN / "mpt.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    blind = tmp_path / "mpt.csv"
    with blind.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        for row in rows:
            writer.writerow(row | dict.fromkeys(("step_s", "tokens_s_gpu", "tflops_gpu"), ""))
    assert main(["fit", str(blind), "--suggest", "3", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["suggested"] == plain


def test_fit_without_rows_or_out_is_a_bad_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit"]) == 2
    assert main(["fit", str(GOLDEN / "mpt.csv")]) == 2
    assert main(["fit", str(GOLDEN / "mpt.csv"), "--suggest", "0"]) == 2
    assert "--out" in capsys.readouterr().err


def test_score_reads_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(GOLDEN / "mpt.csv"), str(GOLDEN / "bloom.csv")]) == 0
    text = capsys.readouterr().out
    assert "median %" in text
    assert "as fitted" in text
