"""Tables of other people: any CSV by a mapping file, exports of metrics, nccl-tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.cost.table.reference import read_table
from fourfold.errors import UserError
from fourfold.logs.mapping import plain_heading, propose, read_mapping
from fourfold.logs.row import COLUMNS, Row
from fourfold.search.rows.read import parse
from fourfold.verbs.collect import Collected
from tests.logs.reading import collected

SAMPLES = Path(__file__).parent.parent / "samples"
COLLEAGUE = (SAMPLES / "colleague.csv").read_text()
MAP = (SAMPLES / "colleague.toml").read_text()


def made(folder: Path, name: str, text: str, mapping: str = "", **more: str) -> Collected:
    (folder / name).write_text(text)
    columns = folder / "columns.toml"
    columns.write_text(mapping)
    path = str(columns) if mapping else None
    return collected(folder / name, out=folder / "rows.csv", map=path, **more)


def test_a_table_without_a_mapping_gets_one_to_fill_in(tmp_path: Path) -> None:
    answer = made(tmp_path, "colleague.csv", COLLEAGUE)
    assert (answer.ok, answer.rows_read) == (False, ())
    (text,) = answer.proposals
    said = tomllib.loads(text)
    assert said["columns"] == {
        "tp": "tp_size", "pp": "pipeline", "mbs": "mb", "step_s": "sec_per_iter",
        "hardware": "gpu_type",
    }  # fmt: skip
    for asked in ("seq_len", "n_gpus", "gbs", "precision", "sharding", "act_ckpt", "model"):
        assert f"# {asked} = " in text
    read_mapping(text)


def test_elapsed_time_of_a_training_is_read_by_its_clock(tmp_path: Path) -> None:
    """As in LlamaFactory's trainer_log.jsonl (its issue 774); a day may end on the way."""
    times = ("23:58:50", "23:59:52", "1 day, 0:00:50", "1 day, 0:01:52", "1 day, 0:02:52")
    lines = "".join(
        f'{{"current_steps": {3200 + 10 * at}, "total_steps": 3235, "loss": 4.4, "epoch": 0.99, '
        f'"percentage": 98.9, "elapsed_time": "{time}", "remaining_time": "0:03:25"}}\n'
        for at, time in enumerate(times)
    )
    answer = made(tmp_path, "trainer_log.jsonl", lines)
    (row,) = answer.rows_read
    assert float(row["step_s"]) == pytest.approx(6.0, abs=0.2)
    assert answer.files[0].book.unread == 0


def test_a_colleagues_table_becomes_usable_rows(tmp_path: Path) -> None:
    answer = made(tmp_path, "colleague.csv", COLLEAGUE, MAP)
    assert [row["status"] for row in answer.rows_read] == ["ok", "ok", "oom", "ok"]
    assert [row["dp"] for row in answer.rows_read] == ["16", "8", "2", "2"]
    assert [row["hardware"] for row in answer.rows_read] == 3 * ["a100-80gb"] + ["a100-40gb"]
    assert float(answer.rows_read[0]["tokens_s_gpu"]) == pytest.approx(256 * 4096 / 31.5 / 16)
    rows = parse(read_table(answer.out))
    assert rows.usable.all()
    assert rows.columns.layers.tolist() == [32.0] * 4


def test_units_and_words_of_a_table(tmp_path: Path) -> None:
    text = "Iteration time (ms),Peak mem MB,Result\n2500,40960,completed\n0,0,Out of memory\n"
    proposed = tomllib.loads(made(tmp_path, "a.csv", text).proposals[0])
    assert proposed["columns"]["step_s"] == {"column": "Iteration time (ms)", "unit": "ms"}
    mapping = (
        '[columns]\nstep_s = {column = "Iteration time (ms)", unit = "ms"}\n'
        'mem_gb = {column = "Peak mem MB", unit = "MB"}\nstatus = "Result"\n'
    )
    first, second = made(tmp_path, "a.csv", text, mapping).rows_read
    assert (first["step_s"], first["mem_gb"], first["outcome"]) == ("2.5", "40", "ok")
    assert (second["step_s"], second["outcome"]) == ("", "oom")


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ('[columns]\nstep = "x"\n', "unknown field 'step'"),
        ('[columns]\ntp = "TP"\n', "is not a heading"),
        ("[columns]\ntp = 3\n", "must name a heading"),
        ('[columns]\nstep_s = {column = "mb", unit = "h"}\n', "unknown unit"),
        ('[rows]\ntp = "mb"\n', "unknown table"),
        ("[columns\n", "TOML"),
    ],
)
def test_a_wrong_mapping_is_named(tmp_path: Path, mapping: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        made(tmp_path, "a.csv", COLLEAGUE, mapping)


@given(st.lists(st.text(min_size=1, max_size=20), max_size=30))
def test_any_headings_make_a_proposal_that_can_be_read(headings: list[str]) -> None:
    found, strange = propose(headings)
    assert len(found) + len(strange) == len(headings)
    assert set(found) <= set(COLUMNS)


@pytest.mark.parametrize(
    "column", [name for name in COLUMNS if name not in ("source", "flop_rule")]
)
def test_the_schemas_own_names_are_understood(column: str) -> None:
    assert propose([column.upper()])[0] == {column: column.upper()}
    assert plain_heading(column) == column.replace("_", "")


def _row(answer: Collected) -> Row:
    (row,) = answer.rows_read
    return row


def test_wandbs_own_counter_is_not_the_optimizers(tmp_path: Path) -> None:
    """A Trainer that logs every tenth step: 41.5 s between lines are of ten."""
    lines = [f"{n},{1.7e9 + 41.5 * n},{3 - n / 100},{10 * n}" for n in range(1, 20)]
    text = "\n".join(["_step,_timestamp,train/loss,train/global_step", *lines, ""])
    row = _row(made(tmp_path, "history.csv", text))
    assert float(row["step_s"]) == pytest.approx(4.15)


def test_wandb_export(tmp_path: Path) -> None:
    text = '"Step","run1 - iteration-time","run1 - iteration-time__MIN"\n'
    text += "".join(f'"{n}","{s}","{s}"\n' for n, s in [(1, 9.5), (2, 2.5), (3, 2.25), (4, 2.75)])
    row = _row(made(tmp_path, "wandb.csv", text, n_gpus="8"))
    assert (float(row["step_s"]), row["steps"], row["n_gpus"]) == (2.5, "3", "8")


def test_tensorboard_export_of_a_tag(tmp_path: Path) -> None:
    text = "Wall time,Step,Value\n"
    text += "".join(f"{1e9 + 10 * n},{n},{s}\n" for n, s in [(1, 9.5), (2, 2.5), (3, 2.25)])
    row = _row(made(tmp_path, "run-a-tag-iteration-time.csv", text))
    assert float(row["step_s"]) == 2.375
    row = _row(made(tmp_path, "run-a-tag-lm-loss.csv", text))
    assert float(row["step_s"]) == 10.0  # the wall clock between steps


def test_tensorboard_json(tmp_path: Path) -> None:
    text = "[[1.0, 1, 9.5], [2.0, 2, 2.5], [3.0, 3, 2.25], [4.0, 4]]"
    answer = made(tmp_path, "run-a-tag-iteration-time.json", text)
    assert (float(_row(answer)["step_s"]), answer.files[0].book.unread) == (2.375, 1)


def test_a_folder_may_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("hello\n")
    (tmp_path / "colleague.csv").write_text(COLLEAGUE)
    assert collected(SAMPLES / "logs", out=tmp_path / "o.csv", cluster="jean-zay").ok
    assert not collected(tmp_path / "README.txt", out=tmp_path / "p.csv").ok


def test_json_lines(tmp_path: Path) -> None:
    text = '{"n_layers": 32, "n_gpus": 8, "seq_len": 2048, "gbs": 64}\n'
    text += "".join(
        f'{{"_step": {n}, "throughput(tps)": {r}, "memory/max_reserved(GiB)": 61.5}}\n'
        for n, r in [(1, 100.0), (10, 4000.0), (20, 4096.0), (30, 4100.0)]
    )
    text += "not json\n"
    answer = made(tmp_path, "history.jsonl", text)
    row = _row(answer)
    assert float(row["tokens_s_gpu"]) == pytest.approx(4096)
    assert float(row["step_s"]) == pytest.approx(64 * 2048 / 4096 / 8)
    assert (row["mem_gb"], answer.files[0].book.unread) == ("61.5", 1)


def test_nccl_tests_tell_of_links_not_of_runs(tmp_path: Path) -> None:
    answer = collected(SAMPLES / "all_reduce_4x8.log", out=tmp_path / "o.csv")
    link = answer.files[0].link
    assert (link["op"], link["hosts"], link["ranks"], answer.ok) == ("all_reduce", 4, 32, True)
    assert 1e9 < link["bytes_per_s"] < 1e12


def test_a_store_of_our_own_runs_is_no_folder_of_logs(tmp_path: Path) -> None:
    (tmp_path / "run_0").mkdir()
    for name in ("run.json", "rank-0.log"):
        (tmp_path / "run_0" / name).write_text('{"schema": 1, "type": "RunReport"}')
    (tmp_path / ".index.json").write_text("{}")
    with pytest.raises(UserError, match=r"no log of another engine; 'fourfold report'"):
        collected(tmp_path, out=tmp_path / "rows.csv")
    (tmp_path / "run_0" / "run.json").write_text('{"theirs": 1}')
    assert collected(tmp_path, out=tmp_path / "rows.csv").files
