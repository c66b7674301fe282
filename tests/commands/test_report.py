"""The report, runs and lint commands over a store of runs and over published tables."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.result.files.store import Store
from fourfold.result.report import Failure, RankMemory, RunReport, StepReport
from fourfold.tables.styles import MPT
from tests.cli import Cli
from tests.specs import run_spec

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    for number, (tp, micro) in enumerate(((1, 1), (1, 2), (2, 1), (2, 2))):
        fields = {"seq_len": 64, "micro_batch": micro, "global_batch": 8, "precision": "fp32"}
        fields |= {"sharding": "zero3", "tag": "first" if tp == 1 else "second"}
        bad = number == 3
        report = RunReport(
            spec=run_spec("mpt-tiny", f"dp{4 // tp} tp{tp}", **fields),
            outcome="oom" if bad else "ok",
            environment=(("device", "CPU"), ("torch", "2.13")),
            steps=tuple(StepReport(step=i, seconds=0.1 + number / 10) for i in range(3)),
            memory=(RankMemory(rank=0, stage=0, peak_bytes=10**7 * (number + 1)),),
            failure=Failure(rank=2, stage=0, phase="step", message="limit") if bad else None,
            started_at=f"2026-01-0{number + 1}T00:00:00+00:00",
        )
        Store(root).keep(report)
    return root


def test_runs_are_listed_filtered_and_sorted(store: Path, cli: Cli) -> None:
    def listed(*words: str) -> dict:
        return cli.json("runs", "--runs", store, *words)

    everything = listed()
    assert everything["total"] == 4
    assert everything["outcomes"] == {"ok": 3, "oom": 1}
    assert [row["step_s"] for row in listed("--where", "tp == 1")["runs"]] == [0.1, 0.2]
    assert listed("--where", "step_s < 0.25 and mem_gb > 0.015")["total"] == 1
    assert listed("--where", "step_s > 0")["total"] == 3  # the failed one has none
    assert listed("--tag", "second", "--outcome", "oom")["runs"][0]["failure"].startswith("rank 2")
    assert [row["peak_bytes"] for row in listed("--sort", "peak_bytes")["runs"]][-1] == 4 * 10**7
    cli("runs", "--runs", store, "--where", "colour == 1", status=2)
    assert "4 runs in" in cli("runs", "--runs", store)


def test_report_writes_both_files(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    assert main(["report", "--runs", str(store), "--style", "mpt", "--out", str(out)]) == 0
    lines = (tmp_path / "results.csv").read_text().splitlines()
    rows = list(csv.reader(lines))
    assert tuple(rows[0]) == (*(column.heading for column in MPT), "about")
    assert {len(row) for row in rows} == {21}
    assert len(rows) == 5
    assert main(["lint", str(tmp_path / "results.md"), str(tmp_path / "results.csv")]) == 0


@pytest.mark.parametrize("style", ["mpt", "topology", "scaling"])
@pytest.mark.parametrize("form", ["text", "md", "csv", "json"])
def test_every_style_and_form(store: Path, style: str, form: str, cli: Cli) -> None:
    words = ["report", str(store), str(GOLDEN / "raw_samples.md"), "--style", style]
    assert cli(*words, "--format", form).strip()


def test_report_as_json_keeps_every_row(store: Path, cli: Cli) -> None:
    rows = cli.json("report", "--runs", store)["rows"]
    assert [row["status"] for row in rows].count("oom") == 1
    assert all(row["tflops_gpu"] > 0 for row in rows if row["status"] == "ok")


def test_only_earlier_results_are_replaced(tmp_path: Path, store: Path, cli: Cli) -> None:
    words = ["report", "--runs", str(store), "--out", str(tmp_path / "results")]
    cli(*words)
    before = (tmp_path / "results.md").read_text()
    cli(*words, "--style", "mpt")  # its own, in whatever style
    mine = "| my own table | kept by hand |\n"
    (tmp_path / "results.md").write_text(mine)
    csv_before = (tmp_path / "results.csv").read_text()
    assert "--force" in cli(*words, status=2)
    assert (tmp_path / "results.md").read_text() == mine
    assert (tmp_path / "results.csv").read_text() == csv_before  # both or none
    cli(*words, "--force")
    assert (tmp_path / "results.md").read_text() == before


def test_one_run_is_shown_in_full(store: Path, cli: Cli) -> None:
    bad = next(item for item in Store(store).runs() if item.summary.outcome == "oom")
    words = ["runs", "show", bad.name[:12], "--runs", str(store)]
    out = cli(*words)
    assert "out of memory: rank 2 (stage 0) in step" in out
    assert cli.json(*words)["post_mortem"]["rank"] == 2
    good = next(item for item in Store(store).runs() if item.summary.outcome == "ok")
    assert "B out of memory: rank 2" in cli("diff", good.name, bad.name, "--runs", store)
    cli("runs", "list", "--runs", store, status=2)
    cli("runs", "show", "zz", "--runs", store, status=2)


def test_no_results_is_a_bad_request(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "empty").mkdir()
    cli("report", "--runs", tmp_path / "empty", status=2)


def test_a_clean_file_leaves_with_zero(cli: Cli) -> None:
    assert "nothing found; 1 table, 188 rows checked" in cli("lint", GOLDEN / "par4d.csv")


def test_ignored_rules_do_not_count(cli: Cli) -> None:
    cli("lint", GOLDEN / "bloom.csv", status=1)
    cli("lint", GOLDEN / "bloom.csv", "--ignore", "size-label")


@pytest.mark.parametrize("form", ["text", "md", "csv", "json"])
def test_every_form_prints(form: str, cli: Cli) -> None:
    cli("lint", "--rules", "--format", form)
    assert "gpus-axes" in cli("lint", GOLDEN / "raw_samples.md", "--format", form, status=1)
