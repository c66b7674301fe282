"""`bench --as-rank` with a canned stand-in in the launcher's place."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.result.job import Job, JobReport, answer_file
from fourfold.result.one_rank import KernelTime, OneRankResult, PhaseTime, Traffic
from fourfold.result.report import Failure, RunReport
from fourfold.spec import codec
from fourfold.verbs import one_rank
from tests.cli import Cli

ASK = [
    "bench", "--model", "llama-3.1-70b", "--world", "512", "--seq-len", "4096",
    "--global-batch", "512", "--micro-batch", "1", "--cluster", "jean-zay",
]  # fmt: skip
THREE = ["--layout", "tp8 zero3", "--layout", "pp4 dp16 tp8", "--layout", "pp8 dp16 tp4"]


def canned(job: Job, task: int) -> OneRankResult:
    spec = job.specs[task]
    layers = 80 // spec.layout.pp
    rank = int(job.option("ranks").split(",")[task])
    kernel = {"makes": "output", "when": "forward", "shape": "4096x1280x8192", "flops": 10**12}
    phases = {"layers": 5e-3 * layers, "layers back": 11e-3 * layers, "head": 1e-3, "once": 0.01}
    micros = spec.batch.micro_count(spec.layout.dp)
    return OneRankResult(
        rank=rank,
        world=spec.gpus,
        stage=spec.layout.coordinates(rank)["pp"],
        layers=layers,
        micro_batches=micros,
        ran=4,
        step_s=(0.5, 0.6),
        compute_s=micros * (16e-3 * layers + 1e-3) + 0.01,
        phases=tuple(PhaseTime(name=name, seconds=s) for name, s in phases.items()),
        kernels=(
            KernelTime(part="mlp", name="up", calls=layers, seconds=8e-3, **kernel),
            KernelTime(part="attention", name="core", calls=layers, seconds=2e-3, **kernel),
        ),
        update_s=1e-3,
        update_elements=10**8,
        comm=(Traffic(axis="tp", op="all-gather", bytes=2**30, calls=100),),
        flops=10**15,
        peak_bytes=40 * 2**30,
        reserved_bytes=50 * 2**30,
        retries=0,
        peaks_from="allocator",
        device="NVIDIA H200",
        torch="2.11",
    )


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What was launched; layouts with 7 as micro batch do not fit."""
    seen: list[Job] = []

    def run_job(job: Job, folder: Path, *, progress: object, permit: object) -> JobReport:
        seen.append(job)
        runs = []
        for task, spec in enumerate(job.specs):
            fits = spec.batch.micro_batch != 7
            if fits:
                path = answer_file(folder, task)
                path.write_text(codec.to_json(canned(job, task)))
            failure = Failure(rank=0, stage=0, phase="forward", message="CUDA out of memory")
            outcome = "ok" if fits else "oom"
            runs.append(RunReport(spec=spec, outcome=outcome, failure=None if fits else failure))
        return JobReport(job="one-rank", outcome="ok", seconds=1.0, runs=tuple(runs))

    monkeypatch.setattr(one_rank, "run_job", run_job)
    return seen


def test_three_layouts_are_one_table(jobs, cli, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = list(csv.DictReader(io.StringIO(cli(*ASK, *THREE, "--as-rank", "0", "--format", "csv"))))
    assert [f"{row['layout']} {row['sharding']} mbs{row['micro_batch']}" for row in rows] == [
        "pp1 dp64 cp1 tp8 zero3 mbs1",
        "pp4 dp16 cp1 tp8 zero1 mbs1",
        "pp8 dp16 cp1 tp4 zero1 mbs1",
    ]
    for row in rows:
        assert float(row["kernels_layer_s"]) == pytest.approx(0.010)
        assert float(row["engine_layer_s"]) == pytest.approx(0.016)
        assert float(row["predicted.compute_s"]) > 0
    assert [spec.policy.sharding for spec in jobs[0].specs] == ["zero3", "zero1", "zero1"]
    assert not list(tmp_path.iterdir()), "a stand-in is no run of its layout"


def test_a_step_is_measured_compute_and_modelled_traffic(jobs, cli, tmp_path) -> None:
    out = tmp_path / "found.json"
    words = [*ASK, *THREE, "--as-rank", "0", "--out", str(out)]
    data = cli.json(*words)
    assert data == json.loads(out.read_text())
    for one in data["ranks"]:
        parts = one["step_parts_s"]
        assert one["step_s_with_modelled_traffic"] == pytest.approx(sum(parts.values()))
        assert parts["compute, measured"] == one["measured"]["compute_s"]
        assert parts["tp"] > 0
        assert all(seconds >= 0 for seconds in parts.values())
        predicted = one["predicted"]
        assert predicted["compute_s"] == pytest.approx(sum(predicted["compute_parts_s"].values()))
    flat, pipe, _ = (one["step_parts_s"] for one in data["ranks"])
    assert flat["pp"] == flat["bubble"] == 0
    # Three of four stages wait once: (pp - 1) micro batches, each a little over 0.32 s.
    assert pipe["bubble"] == pytest.approx(3 * 0.33, rel=0.5)


def test_one_layout_is_told_in_full(jobs: list[Job], cli: Cli) -> None:
    text = cli(*ASK, "--layout", "pp4 dp16 tp8", "--as-rank", "last")
    assert jobs[0].option("ranks") == "384"
    for words in ("layers, forward", "all-gather", "bubble", "planner's own step", "4 of 32"):
        assert words in text


def test_the_flags_of_bench_say_the_layout_too(jobs: list[Job]) -> None:
    words = [*ASK, "--pp", "4", "--tp", "8", "--sharding", "zero2", "--as-rank", "worst"]
    assert main([*words, "--micro-batches", "0", "--set", "policy.compile=true"]) == 0
    (spec,) = jobs[0].specs
    assert (str(spec.layout), spec.policy.zero, spec.policy.compile) == (
        "pp4 dp16 cp1 tp8", 2, True,
    )  # fmt: skip
    assert (jobs[0].option("ranks"), jobs[0].option("micro_batches")) == ("0", "0")


def test_out_of_memory_is_a_row_with_a_way_out(jobs: list[Job], cli: Cli) -> None:
    words = ["--layout", "tp8 zero3", "--layout", "tp8 zero3 batch.micro_batch=7"]
    text = cli(*ASK, *words, "--as-rank", "0", status=1)
    assert "CUDA out of memory" in text
    assert "changes that would fit" in text
    assert "+60%" in text, "the other layout is still told"
