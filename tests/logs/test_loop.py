"""The loop: logs are collected, the fit learns from 12 of them, and later runs are predicted
better than before."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import fourfold
from fourfold.cli import main

SAMPLES = Path(__file__).parent.parent / "samples" / "logs"


def _collected(name: str, out: Path) -> str:
    request = fourfold.CollectRequest(
        logs=(str(SAMPLES / name),), cluster="jean-zay", stack="megatron-lm-mine", out=str(out)
    )
    answer = fourfold.collect(request)
    assert answer.ok
    assert all(row.is_usable for row in answer.rows_read)
    return answer.out


def _score(rows: str, calibration: str | None) -> dict[str, float]:
    request = fourfold.ScoreRequest(rows=(rows,), calibration=calibration)
    (score,) = fourfold.score(request).rows()
    return score


def test_twelve_collected_runs_improve_the_prediction_of_later_ones(tmp_path: Path) -> None:
    first = _collected("first", tmp_path / "mine.csv")
    later = _collected("later", tmp_path / "later.csv")
    before = _score(later, None)
    fitted = fourfold.fit(fourfold.FitRequest(rows=(first,)))
    assert [(e.stack, e.cluster, e.rows_time) for e in fitted.calibration.entries] == [
        ("megatron-lm-mine", "jean-zay", 12)
    ]
    (tmp_path / "mine.json").write_text(fitted.json())
    after = _score(later, str(tmp_path / "mine.json"))
    assert (before["rows"], after["rows"]) == (8, 8)
    assert after["median_pct"] < 0.8 * before["median_pct"]


def test_a_plan_is_compared_with_the_best_measured_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _collected("first", tmp_path / "mine.csv")
    words = (
        "plan --model gpt-181b --cluster jean-zay --gpus 384 --seq-len 2048 --global-batch 2048"
        f" --precision fp16 --stack megatron-deepspeed --top 1 --measured {first}"
    ).split()
    assert main([*words, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    with open(first, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["n_layers"] == "72"]
    assert len(rows) == 2
    speeds = {
        r["row_id"]: 2048 * int(r["gbs"]) / float(r["step_s"]) / int(r["n_gpus"]) for r in rows
    }
    best = max(speeds, key=lambda name: speeds[name])
    measured = answer["measured"]
    assert measured["row"] == best
    assert measured["tokens_s_gpu"] == pytest.approx(speeds[best])
    gain = 100 * (answer["ranked"][0]["tokens_s_gpu"] / speeds[best] - 1)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"best measured run, {best} of {first}: " in said
    assert f"#1 is predicted {abs(gain):.1f}% {'faster' if gain > 0 else 'slower'} (80%: " in said
    words[words.index("2048")] = "1024"
    assert main(words) == 0
    assert "has no measured run of this model at this sequence" in capsys.readouterr().out


def test_how_a_name_was_read_is_said_of_answers_only(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model gpt-3-175b --gpu h100 --gpus 64 --global-batch 64 --stack"
    words = ["plan", *asked.split(), "megatron"]
    assert main([*words, "--seq-len", "2048", "--top", "1"]) == 0
    said = capsys.readouterr().err
    assert "read as: gpu h100 = h100-80gb" in said
    assert "read as: stack megatron = " in said
    assert main([*words, "--seq-len", "8192"]) == 2
    assert capsys.readouterr().err.startswith("error: --seq-len 8192 exceeds ")
