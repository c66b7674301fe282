"""The loop: logs are collected, the fit learns from 12 of them, and later runs are predicted
better than before.

One run that several nodes tell of is one row, whoever of them prints what.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import fourfold
from fourfold.verbs.collect import Collected
from tests.cli import Cli
from tests.logs import written
from tests.logs.reading import BLOOM, collected

SAMPLES = Path(__file__).parent.parent / "samples" / "logs"


def _collected(name: str, out: Path) -> str:
    answer = collected(SAMPLES / name, out=out, cluster="jean-zay", stack="megatron-lm-mine")
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


def test_why_no_collected_row_can_be_used_is_said(tmp_path: Path, cli: Cli) -> None:
    """Without the GPU, which these logs do not print."""
    rows = collected(SAMPLES / "first", out=tmp_path / "mine.csv").out
    why = "mine.csv: none of 12 rows is used: the run is incomplete; 'fourfold collect' names"
    assert why in cli("fit", rows, "--out", tmp_path / "own.json", status=2)
    cli("score", rows)
    assert why in cli.err


def test_a_plan_is_compared_with_the_best_measured_run(tmp_path: Path, cli: Cli) -> None:
    first = _collected("first", tmp_path / "mine.csv")
    words = (
        "plan --model gpt-181b --cluster jean-zay --gpus 384 --seq-len 2048 --global-batch 2048"
        f" --precision fp16 --stack megatron-deepspeed --top 1 --measured {first}"
    ).split()
    answer = cli.json(*words)
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
    said = cli(*words)
    assert f"best measured run, {best} of {first}: " in said
    assert f"#1 is predicted {abs(gain):.1f}% {'faster' if gain > 0 else 'slower'} (80%: " in said
    words[words.index("2048")] = "1024"
    assert "has no measured run of this model at this sequence" in cli(*words)


def test_how_a_name_was_read_is_said_of_answers_only(cli: Cli) -> None:
    asked = "--model gpt-3-175b --gpu h100 --gpus 64 --global-batch 64 --stack"
    words = ["plan", *asked.split(), "megatron"]
    cli(*words, "--seq-len", "2048", "--top", "1")
    said = cli.err
    assert "read as: gpu h100 = h100-80gb" in said
    assert "read as: stack megatron = " in said
    assert cli(*words, "--seq-len", "8192", status=2).startswith("error: --seq-len 8192 exceeds ")


def of_folder(folder: Path) -> Collected:
    return collected(folder, out=folder.parent / "rows.csv", cluster="jean-zay")


def stored(folder: Path, name: str, *logs: str) -> Path:
    """A run's folder in a store, with the log of each node."""
    place = folder / "runs" / name
    place.mkdir(parents=True)
    for node, text in enumerate(logs):
        (place / f"engine-{node}.log").write_text(text)
    return place


def halves(text: str) -> tuple[str, str]:
    """Megatron's log as two nodes print it: the arguments on the first, the steps on the last."""
    at = text.index(" iteration ")
    return text[:at], text[at:]


def test_the_configuration_of_the_first_node_and_the_steps_of_the_last_are_one_row(
    tmp_path: Path,
) -> None:
    text = written.megatron(BLOOM[0])
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "train.log").write_text(text)
    (whole,) = of_folder(tmp_path / "whole").rows_read
    place = stored(tmp_path, "a1_dp8_0", *halves(text))
    answer = of_folder(tmp_path / "runs")
    (row,) = answer.rows_read
    differs = ("row_id", "source", "log")
    assert {n: v for n, v in row.cells.items() if n not in differs} == {
        n: v for n, v in whole.cells.items() if n not in differs
    }
    assert (row["row_id"], row["log"]) == ("a1_dp8_0", str(place / "engine-0.log"))
    assert answer.files[0].book.lines == text.count("\n")


def test_every_run_of_a_store_is_one_row_and_its_slowest_node_counts(tmp_path: Path) -> None:
    logs = [written.titan([2000, 6600 - node, 6650 - node, 6640 - node]) for node in range(3)]
    logs[1] = logs[1].replace("memory: 52.30GiB", "memory: 70.25GiB")
    stored(tmp_path, "one", *logs)
    stored(tmp_path, "two", *logs[:2])
    for _ in range(2):  # collected again, rows take the place of the first
        answer = of_folder(tmp_path / "runs")
        assert [row["row_id"] for row in answer.rows_read] == ["one", "two"]
        assert answer.total == 2
    rates = [float(row["tokens_s_gpu"]) for row in answer.rows_read]
    assert rates == [pytest.approx(6638), pytest.approx(6639)]
    assert {row["mem_gb"] for row in answer.rows_read} == {"70.25"}


def test_the_worst_end_of_any_node_is_the_runs_end(tmp_path: Path) -> None:
    head, _ = halves(written.megatron(BLOOM[0]))
    stored(tmp_path, "one", head + "SomeError: a peer is gone\n", "CUDA out of memory. Tried\n")
    (row,) = of_folder(tmp_path / "runs").rows_read
    assert (row["outcome"], row["n_layers"]) == ("oom", BLOOM[0]["n_layers"])


def test_a_log_of_steps_that_cannot_be_read_is_incomplete_not_failed(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0]).replace("elapsed time per iteration (s)", "elapsed time (?)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text(text)
    (row,) = of_folder(tmp_path / "logs").rows_read
    assert (row["status"], row.missing) == ("incomplete", ("step_s",))
    assert any("lines of steps could be read" in note for note in row.notes)
    assert int(row["unread_lines"]) > 1
