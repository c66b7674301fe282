"""Does the planner learn from reports of our own runs, and from tables? fit, predict and score."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.result.report import RankMemory, RunReport, StepReport
from fourfold.spec import codec
from tests.cli import Cli
from tests.specs import run_spec

GOLDEN = Path(__file__).parent.parent / "golden"
WORDS = ["--cluster", "mosaic-h100"]


def _report(micro_batch: int, seconds: float, outcome: str = "ok") -> RunReport:
    sizes = {"seq_len": 4096, "micro_batch": micro_batch, "global_batch": 64}
    spec = run_spec("llama-3.2-1b", "dp8", precision="bf16-mixed", sharding="zero3", **sizes)
    slow_start = StepReport(step=0, seconds=50 * seconds, warmup=True)
    steps = (slow_start, *(StepReport(step=i, seconds=seconds) for i in range(1, 6)))
    memory = (RankMemory(rank=0, stage=0, peak_bytes=20 * 2**30),)
    return RunReport(spec=spec, outcome=outcome, steps=steps, memory=memory)  # type: ignore[arg-type]


def _store(folder: Path, reports: list[RunReport]) -> None:
    for i, report in enumerate(reports):
        (folder / f"run-{i}").mkdir(parents=True)
        (folder / f"run-{i}" / "run.json").write_text(codec.to_json(report))


def _entry(path: Path) -> dict[str, object]:
    (entry,) = json.loads(path.read_text())["entries"]
    return entry


def test_slower_runs_give_a_slower_machine(tmp_path: Path) -> None:
    for name, scale in (("fast", 1.0), ("slow", 1.6)):
        _store(
            tmp_path / name, [_report(m, scale * s) for m, s in ((1, 0.66), (2, 0.62), (4, 0.6))]
        )
        out = str(tmp_path / f"{name}.json")
        assert main(["fit", "--runs", str(tmp_path / name), *WORDS, "--out", out]) == 0
    fast, slow = _entry(tmp_path / "fast.json"), _entry(tmp_path / "slow.json")
    assert fast["engine"] == "fourfold"
    assert fast["cluster"] == "mosaic-h100"
    assert fast["rows_time"] == slow["rows_time"] == 3
    seconds = [_predicted(tmp_path / f"{name}.json", tmp_path) for name in ("fast", "slow")]
    assert 1.2 < seconds[1] / seconds[0] < 1.8


def _predicted(calibration: Path, folder: Path) -> float:
    out = folder / "plan.json"
    words = ["plan", "--model", "llama-3.2-1b", *WORDS, "--gpus", "8", "--seq-len", "4096"]
    words += ["--global-batch", "64", "--micro-batch", "2", "--dp", "8", "--sharding", "zero3"]
    words += ["--recompute", "none", "--stack", "fourfold", "--calibration", str(calibration)]
    with out.open("w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        assert main([*words, "--format", "json"]) == 0
    return json.loads(out.read_text())["ranked"][0]["step_s"]


def test_failed_runs_teach_no_speed(tmp_path: Path, cli: Cli) -> None:
    crashed = replace(_report(1, 1.0), outcome="crashed")
    _store(tmp_path / "runs", [crashed])
    out = str(tmp_path / "out.json")
    assert "contains no run" in cli(
        "fit", "--runs", tmp_path / "runs", *WORDS, "--out", out, status=2
    )
    assert not Path(out).exists()


def test_what_was_measured_apart_is_not_fitted(tmp_path: Path) -> None:
    _store(tmp_path / "runs", [_report(m, s) for m, s in ((1, 0.66), (2, 0.62), (4, 0.6))])
    words = ["fit", "--runs", str(tmp_path / "runs"), *WORDS, "--force", "--out"]
    entries = []
    for more in ([], ["--fix", "product=0.9", "--fix", "attention=0.74"]):
        assert main([*words, str(tmp_path / "one.json"), *more]) == 0
        entries.append(_entry(tmp_path / "one.json"))
    free, fixed = entries
    assert 0.0 < free["informed"]["engine"] < 1.0
    assert (
        "product" not in free["informed"]
    )  # three rows say what the engine takes, not its kernels
    assert (fixed["knobs"]["product"], fixed["knobs"]["attention"]) == (0.9, 0.74)
    assert fixed["informed"]["product"] == 1.0
    # What is left open makes up for it.
    assert fixed["knobs"]["engine"] < free["knobs"]["engine"]


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("attention", "must be a number from 0.1 to 2"),
        ("attention=fast", "must be a number from 0.1 to 2"),
        ("attention=nan", "must be a number from 0.1 to 2"),
        ("attention=2.5", "must be a number from 0.1 to 2"),
        ("flush=0.5", "does not name a coefficient; known: engine,"),
    ],
)
def test_a_coefficient_to_keep_is_checked(word: str, rule: str, tmp_path: Path, cli: Cli) -> None:
    _store(tmp_path / "runs", [_report(1, 0.66)])
    out = tmp_path / "one.json"
    words = ["fit", "--runs", str(tmp_path / "runs"), *WORDS, "--fix", word, "--out", str(out)]
    assert f"--fix {word} {rule}" in cli(*words, status=2)
    assert not out.exists()


def test_predict_counts_rows_and_verdicts(tmp_path: Path, cli: Cli) -> None:
    cli("predict", GOLDEN / "par4d.csv", "--out", tmp_path / "out.csv")
    assert re.search(r"predicted: 188 of 188 rows \(\d+ fit, \d+ uncertain, \d+ do not", cli.err)


def test_predict_without_out_prints_what_it_would_write(tmp_path: Path, cli: Cli) -> None:
    table = GOLDEN / "par4d.csv"
    cli("predict", table, "--out", tmp_path / "out.csv")
    written = (tmp_path / "out.csv").read_text()
    assert cli("predict", table, "--format", "csv") == written
    first = next(csv.DictReader(written.splitlines()))
    assert cli.json("predict", table)[0]["step_s"] == float(first["step_s"])
    page = cli("predict", table)
    assert "s/step" in page
    assert f"{float(first['step_s']):.4g}" in page
    assert "predicted: 188 of 188 rows" in page


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
    assert (entry["engine"], entry["date"]) == ("megatron-deepspeed", "2022")
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
