"""The sweep command: plans, counts that add up, and nothing run that was not asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.launch import campaign
from fourfold.result.report import RunReport, StepReport
from fourfold.result.store import Store
from fourfold.spec.run import RunSpec

SWEEP = """
gpus = 4
device = "cpu"
[batch]
seq_len = 64
global_batch = 12
[policy]
precision = "fp32"
[sweep]
model = ["llama-tiny", "mpt-tiny"]
tp = [1, 8]
micro_batch = [1, 2, 3]
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """The specs that reached the launcher; mpt-tiny with micro batch 3 goes out of memory."""
    seen: list[RunSpec] = []

    def runner(spec: RunSpec, folder: Path, say: object) -> RunReport:
        seen.append(spec)
        bad = spec.model.name == "mpt-tiny" and spec.batch.micro_batch == 3
        steps = (StepReport(step=0, seconds=0.5),)
        return RunReport(spec=spec, outcome="oom" if bad else "ok", steps=steps)

    monkeypatch.setattr(campaign.Campaign.__init__, "__kwdefaults__", {
        **campaign.Campaign.__init__.__kwdefaults__, "runner": runner,
    })  # fmt: skip
    return seen


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return str(tmp_path / "sweep.toml")


def test_counts_add_up_and_resuming_runs_nothing(
    tmp_path: Path, file: str, ran: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sweep", file, "--runs", str(tmp_path / "runs"), "--format", "json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["total"] == 12 == sum(data["counts"].values())
    assert {k: v for k, v in data["counts"].items() if v} == {"ok": 5, "oom": 1, "illegal": 6}
    assert "tp" in data["runs"][3]["reason"]
    assert len(ran) == 6
    assert main(words) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["counts"] == data["counts"]
    assert len(ran) == 6


def test_the_dry_run_lists_refusals_first_and_runs_nothing(
    tmp_path: Path, file: str, ran: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", file, "--runs", str(tmp_path / "runs"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("illegal")
    assert "12 combinations: 6 illegal, 6 legal" in out
    assert "to run: 6, about" in out
    assert ran == []
    assert not (tmp_path / "runs").exists()
    assert main(["sweep", file, "--dry-run", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_s"] > 0


FLAGS = [
    "sweep",
    "-m",
    "llama-tiny",
    "mpt-tiny",
    "-s",
    "5",
    "6",
    "-b",
    "9",
    "-t",
    "fp32",
    "-g",
    "1",
]


def test_the_flag_form_needs_run(
    tmp_path: Path, ran: list[RunSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--runs", str(tmp_path / "runs"), "--micro-batch", "1", "2", "--tag", "night"]
    assert main([*FLAGS, *where]) == 0
    assert "nothing was run: add --run" in capsys.readouterr().out
    assert ran == []
    assert main([*FLAGS, *where, "--run"]) == 0
    assert len(ran) == 8
    assert {(s.batch.seq_len, s.batch.global_batch) for s in ran} == {(32, 16), (64, 8)}
    assert {stored.summary.tag for stored in Store(tmp_path / "runs").runs()} == {"night"}


@pytest.mark.parametrize(
    "words",
    [
        ["sweep"],
        [*FLAGS, "also.toml"],
        [*FLAGS, "--micro-batch", "none"],
        ["sweep", "-m", "llama-tiny", "-s", "9", "-b", "3"],
        ["sweep", "-m", "llama-tiny", "-s", "9", "3"],
        [*FLAGS, "--where", "tp > 9"],
        [*FLAGS, "--repeat", "0"],
        ["sweep", "missing.toml"],
    ],
)
def test_bad_requests(words: list[str], ran: list[RunSpec]) -> None:
    assert main(words) == 2
    assert ran == []
