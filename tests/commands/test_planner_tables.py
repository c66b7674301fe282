"""predict, fit and score from the command line: files, exit codes, what a stranger reads."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from tests.cli import Cli

GOLDEN = Path(__file__).parent.parent / "golden"


def test_predict_says_of_how_many_rows(tmp_path: Path, cli: Cli) -> None:
    cli("predict", GOLDEN / "par4d.csv", "--out", tmp_path / "out.csv")
    assert "188 of 188" in cli.err


def test_fit_then_predict_and_score_with_it(tmp_path: Path, cli: Cli) -> None:
    mine = tmp_path / "mine.json"
    told = cli.json("fit", GOLDEN / "bloom.csv", "--out", mine)
    assert {e["stack"] for e in told["entries"]} == {
        "megatron-deepspeed-2022",
        "megatron-deepspeed-2022b",
    }
    assert all(len(e["free_time"]) <= 6 and len(e["free_memory"]) <= 3 for e in told["entries"])
    stored = json.loads(mine.read_text())
    entry = stored["entries"][0]
    assert entry["rows_time"] == 64
    assert entry["errors_pct"]["cv_median"] > 0
    args = ["score", str(GOLDEN / "bloom.csv"), "--calibration", str(mine)]
    (score,) = cli.json(*args)["scores"]
    assert score["how"] == "as fitted"
    assert score["rows"] == 69
    assert score["median_pct"] < 4


def test_suggest_names_runs_and_ignores_results(tmp_path: Path, cli: Cli) -> None:
    plain = cli.json("fit", GOLDEN / "mpt.csv", "--suggest", "3")["suggested"]
    assert len(plain) == 6
    with (GOLDEN / "mpt.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    blind = tmp_path / "mpt.csv"
    with blind.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        for row in rows:
            writer.writerow(row | dict.fromkeys(("step_s", "tokens_s_gpu", "tflops_gpu"), ""))
    assert cli.json("fit", blind, "--suggest", "3")["suggested"] == plain


def test_score_reads_as_a_table(cli: Cli) -> None:
    text = cli("score", GOLDEN / "mpt.csv", GOLDEN / "bloom.csv")
    assert "median %" in text
    assert "as fitted" in text
