"""One run that several nodes tell of is one row, whoever of them prints what."""

from __future__ import annotations

from pathlib import Path

import pytest

import fourfold
from fourfold.verbs.collect import Collected
from tests.logs import written
from tests.logs.test_readers import BLOOM


def collected(folder: Path, *logs: str) -> Collected:
    request = fourfold.CollectRequest(
        logs=logs or (str(folder),), out=str(folder.parent / "rows.csv"), cluster="jean-zay"
    )
    return fourfold.collect(request)


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
    (whole,) = collected(tmp_path / "whole").rows_read
    place = stored(tmp_path, "a1_dp8_0", *halves(text))
    answer = collected(tmp_path / "runs")
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
        answer = collected(tmp_path / "runs")
        assert [row["row_id"] for row in answer.rows_read] == ["one", "two"]
        assert answer.total == 2
    rates = [float(row["tokens_s_gpu"]) for row in answer.rows_read]
    assert rates == [pytest.approx(6638), pytest.approx(6639)]
    assert {row["mem_gb"] for row in answer.rows_read} == {"70.25"}


def test_the_worst_end_of_any_node_is_the_runs_end(tmp_path: Path) -> None:
    head, _ = halves(written.megatron(BLOOM[0]))
    stored(tmp_path, "one", head + "SomeError: a peer is gone\n", "CUDA out of memory. Tried\n")
    (row,) = collected(tmp_path / "runs").rows_read
    assert (row["outcome"], row["n_layers"]) == ("oom", BLOOM[0]["n_layers"])


def test_a_log_of_steps_that_cannot_be_read_is_incomplete_not_failed(tmp_path: Path) -> None:
    text = written.megatron(BLOOM[0]).replace("elapsed time per iteration (s)", "elapsed time (?)")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").write_text(text)
    (row,) = collected(tmp_path / "logs").rows_read
    assert (row["status"], row.missing) == ("incomplete", ("step_s",))
    assert any("lines of steps could be read" in note for note in row.notes)
    assert int(row["unread_lines"]) > 1
