"""Any engine by a template: outcomes alike, one store, nothing left running."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fourfold
from fourfold.cost.table.reports import report_rows
from fourfold.errors import UserError
from fourfold.launch import command
from fourfold.spec import catalog, codec
from fourfold.spec.engine import TEMPLATES
from fourfold.spec.run import RunSpec
from fourfold.verbs.engines import engine_template, filled
from tests.processes import wait_for, with_words

TESTS = Path(__file__).parent.parent
FAKE = TESTS / "samples" / "engine" / "fake.py"
RUN = {
    "model": "llama-2-7b",
    "gpus": 4,
    "steps": 4,
    "warmup": 1,
    "step_limit_s": 6.0,
    "start_limit_s": 30.0,
    "layout": {"tp": 2},
    "batch": {"seq_len": 2048, "global_batch": 32, "micro_batch": 1},
    "policy": {"precision": "bf16"},
}


def template(folder: Path, how: str = "ok", **more: Any) -> str:
    said = {"ends_itself": True, **more}
    words = [sys.executable, str(FAKE), "{settings}", "{iterations}", "0.25", how]
    path = folder / f"fake-{how}.toml"
    path.write_text(
        f'export = "megatron"\nreader = "megatron"\ncommand = {words!r}\n'
        f"ends_itself = {str(said['ends_itself']).lower()}\n"
    )
    return str(path)


def asked(folder: Path, how: str = "ok", **more: Any) -> dict[str, str]:
    engine = template(folder, how, **more)
    return {"runs": str(folder / "runs"), "engine": engine, "cluster": "mosaic-a100"}


def bench(folder: Path, how: str = "ok", run: Any = RUN, **more: Any) -> dict[str, Any]:
    return fourfold.bench(run, fourfold.BenchRequest(**asked(folder, how, **more))).rows()[0]


def at_work() -> dict[int, str]:
    """Engines, and children that they left."""
    return with_words("fake.py") | with_words("time.sleep(600)")


def test_a_run_is_measured_from_its_log(tmp_path: Path) -> None:
    run = bench(tmp_path)
    assert (run["outcome"], run["step_s"], run["timed_steps"]) == ("ok", 0.25, 4)
    assert (run["torch"], run["device"]) == ("fake-ok", "NVIDIA A100 SXM4 80GB")
    assert run["peak_bytes"] == 2**30
    assert run["loss"] == pytest.approx(10.5)
    assert run["predicted"]["step_s"] > 0
    assert run["tokens_s_gpu"] == pytest.approx(32 * 2048 / 0.25 / 4)


@pytest.mark.parametrize(
    ("how", "outcome", "words"),
    [
        ("oom", "oom", "CUDA out of memory"),
        ("crash", "crashed", "no such kernel"),
        ("hang", "hung", "step limit of 1.5 s"),
    ],
)
def test_failures_are_outcomes(tmp_path: Path, how: str, outcome: str, words: str) -> None:
    limit_s = 1.5 if how == "hang" else RUN["step_limit_s"]
    run = bench(tmp_path, how, RUN | {"step_limit_s": limit_s})
    assert run["outcome"] == outcome
    stored = fourfold.runs(fourfold.RunsRequest(runs=str(tmp_path / "runs")))
    (record,) = stored.rows()
    assert record["outcome"] == outcome
    report = Path(run["folder"])
    assert words in (report / "run.json").read_text()
    assert (report / "engine.log").is_file()


def test_what_the_engine_has_no_setting_for_is_illegal(tmp_path: Path) -> None:
    done = bench(tmp_path, run={**RUN, "policy": {"precision": "bf16", "loss_chunks": 4}})
    assert done["outcome"] == "illegal"
    assert "loss_chunks" in (Path(done["folder"]) / "run.json").read_text()


def test_enough_steps_end_an_engine_that_does_not_end(tmp_path: Path) -> None:
    run = bench(tmp_path, "idle", ends_itself=False)
    assert (run["outcome"], run["timed_steps"]) == ("ok", 4)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    """A child in a session of its own, as an elastic launcher's workers are."""
    run = bench(tmp_path, "child")
    assert run["outcome"] == "ok"
    assert not at_work()


def test_ctrl_c_ends_the_engine_and_stores_nothing(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(codec.to_toml(codec.load(RunSpec, RUN)))
    command = [sys.executable, "-m", "fourfold", "bench", "--spec", str(spec), "--runs"]
    command += [str(tmp_path / "runs"), "--engine", template(tmp_path, "silent")]
    process = subprocess.Popen(
        [*command, "--cluster", "mosaic-a100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(at_work)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
    assert not at_work()
    assert fourfold.runs(fourfold.RunsRequest(runs=str(tmp_path / "runs"))).rows() == []


def test_a_sweep_keeps_engines_apart_and_resumes(tmp_path: Path) -> None:
    table = {**RUN, "layout": {}, "sweep": {"tp": [1, 2, 4], "micro_batch": [1, 3]}}
    request = fourfold.SweepRequest(**asked(tmp_path))
    first = fourfold.sweep(table, request)
    # Megatron wants whole micro batches: 3 does not divide any share of 32.
    assert first.counts["ok"] == 3
    assert first.counts["illegal"] == 3
    again = fourfold.sweep(table, request)
    assert all(run.resumed for run in again.runs)
    other = fourfold.SweepRequest(**asked(tmp_path, "oom"))
    assert fourfold.sweep(table, other).counts["oom"] == 3


def test_the_planners_choices_by_an_engine(tmp_path: Path) -> None:
    request = fourfold.SweepRequest(**asked(tmp_path))
    table = {name: RUN[name] for name in ("model", "steps", "warmup", "policy")}
    table |= {"gpus": 8, "batch": {"seq_len": 2048, "global_batch": 64}}
    source = fourfold.PlanSweep(table=table, count=3)
    answer = fourfold.sweep(source, request)
    assert answer.counts["ok"] == 3
    report = fourfold.report(fourfold.ReportRequest(runs=str(tmp_path / "runs")))
    assert report.scores[0].runs == 3


def test_the_same_run_by_two_engines_is_two_rows_and_none_of_ours(tmp_path: Path) -> None:
    for how in ("ok", "child"):
        done = bench(tmp_path, how)
        assert (Path(done["folder"]) / "engine.log").is_file(), "where its numbers are from"
    runs = str(tmp_path / "runs")
    report = fourfold.report(fourfold.ReportRequest(runs=runs))
    ((_, table),) = report.tables()
    column = table.headings.index("Engine")
    assert sorted(row.cells[column] for row in table.data) == ["fake-child", "fake-ok"]
    said: list[str] = []
    with pytest.raises(UserError, match="contains no run"):
        report_rows(runs, catalog.cluster("mosaic-a100"), said.append)
    assert said == [f"left out: 2 runs of other engines, which 'fourfold collect {runs}' reads"]
    request = fourfold.CollectRequest(logs=(runs,), out=str(tmp_path / "rows.csv"))
    assert [row["step_s"] for row in fourfold.collect(request).rows_read] == ["0.25", "0.25"]


# --- templates


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_shipped_templates_take_the_settings_that_are_exported(name: str, tmp_path: Path) -> None:
    found = engine_template(name)
    assert found.export == name
    words = " ".join(found.command)
    assert "{settings}/run.sh" in words


def test_shipped_megatron_flags_are_its_own() -> None:
    known = tomllib.loads((TESTS / "golden" / "megatron_flags.toml").read_text())
    names = {name for value in known.values() if isinstance(value, list) for name in value}
    flags = [word for word in engine_template("megatron").command if word.startswith("--")]
    assert flags
    missing = [flag for flag in flags if flag not in names]
    assert missing == [], missing


def test_places_are_filled_and_strange_ones_refused() -> None:
    assert filled("{tp}x{pp} {{}}", {"tp": 8, "pp": 2}) == "8x2 {{}}"
    with pytest.raises(UserError, match="unknown place"):
        filled("{tensor}", {"tp": 8})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "command"),
        ("command = []", "is required; write"),
        ('command = ["a"]\nexport = "nowhere"', "unknown engine"),
        ('command = ["a"]\nreader = "axolotl"', "unknown reader"),
        ('command = ["a"]\nshell = true', "unknown field"),
        ('command = ["", "a"]', "must begin with a program"),
        ('command = ["a", "b\\u0000c"]', "no NUL in a word"),
        ('command = ["a"]\n[env]\n"A B" = "1"', "is not a variable name"),
        ('command = ["a"]\n[env]\nA = "1\\n2"', "must be printable text"),
        ('command = ["a"]\n[env]\nMASTER_PORT = "1"', "MASTER_PORT.*is set by fourfold"),
        ('command = ["a"]\n[env]\nMASTER_ADDR = "n1"', "is set by fourfold"),
        ('command = ["a"]\n[env]\nNODE_RANK = "0"', "is set by fourfold"),
        ('command = ["a"]\n[env]\nFOURFOLD_JOB = "x"', "is set by fourfold"),
    ],
)
def test_a_wrong_template_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        engine_template(str(path))
    with pytest.raises(UserError, match="unknown engine 'megatronn'"):
        engine_template("megatronn")


def test_a_command_that_does_not_exist_is_said(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('command = ["/no/such/program"]\n')
    request = fourfold.BenchRequest(runs=str(tmp_path / "runs"), engine=str(path))
    with pytest.raises(UserError, match="cannot be started"):
        fourfold.bench(RUN, request)


def test_a_signal_while_the_engine_starts_leaves_nothing_running(tmp_path, monkeypatch) -> None:
    started: list[subprocess.Popen] = []

    def start(*args, **how) -> subprocess.Popen:
        started.append(subprocess.Popen(*args, **how))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens yet"))
    known = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    monkeypatch.setattr(command, "subprocess", known)
    watch = command.Watch(
        take=lambda *_: 0, start_limit_s=60, step_limit_s=60, enough=1, grace_s=0, say=print
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            command.run_command(["sleep", "600"], {}, tmp_path, watch)
        assert started[0].wait() < 0
    finally:
        signal.signal(signal.SIGTERM, before)
        started[0].kill()
