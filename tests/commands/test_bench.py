"""The bench and diff commands with a runner in the launcher's place; a benchmark on a GPU is
compiled where nobody says otherwise, under a name of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold.result.report import Failure, RankMemory, RunReport, StepReport
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.verbs import bench, sites
from fourfold.verbs.bench import described
from tests.cli import Cli

RUN = ["bench", "--model", "llama-tiny", "--gpus", "2", "--seq-len", "64", "--global-batch", "16"]
CPU = ["--precision", "fp32", "--set", "device=cpu"]


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds per step; more than four sequences at once do not fit."""
    seconds = [0.5]

    def run(spec: RunSpec, folder: Path, say: object, **how: object) -> RunReport:
        steps = tuple(StepReport(step=i, seconds=seconds[0]) for i in range(spec.steps))
        fits = spec.batch.micro_batch <= 4
        return RunReport(
            spec=spec,
            outcome="ok" if fits else "oom",
            environment=(("device", "NVIDIA H200"), ("torch", "2.13")),
            steps=steps if fits else (),
            memory=(RankMemory(rank=0, stage=0, peak_bytes=10**6),),
            failure=None if fits else Failure(rank=1, stage=0, phase="forward", message="limit"),
        )

    monkeypatch.setattr(sites, "launch_run", run)
    return seconds


def test_one_run_in_full(tmp_path: Path, speed: list[float], cli: Cli) -> None:
    words = [*RUN, *CPU, "--micro-batch", "2", "--runs", str(tmp_path)]
    data = cli.json(*words)
    assert (data["outcome"], data["step_s"], data["tokens_s_gpu"]) == ("ok", 0.5, 1024.0)
    assert data["conventions"]["mpt"]["mfu_pct"] > 0
    assert data["predicted"]["step_s"] > 0
    out = cli(*words)
    for word in ("step time", "samples/s", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "HFU", "memory"):
        assert word in out


def test_out_of_memory_gets_a_post_mortem(tmp_path: Path, speed: list[float], cli: Cli) -> None:
    words = [*RUN, *CPU, "--micro-batch", "8", "--runs", str(tmp_path)]
    data = cli.json(*words, status=1)
    assert data["failure"]["rank"] == 1
    changes = [fix["change"] for fix in data["post_mortem"]["fixes"]]
    assert {"micro_batch = 4", "recompute = full", "layout = pp1 dp1 cp1 tp2"} <= set(changes)


def test_auto_finds_the_largest_that_fits(tmp_path: Path, speed: list[float], cli: Cli) -> None:
    words = [*RUN, *CPU, "--micro-batch", "0", "--runs", str(tmp_path)]
    data = cli.json(*words)
    assert data["micro_batch"] == 4
    assert {"micro_batch": 8, "fits": False} in data["micro_batch_trials"]
    assert len(data["micro_batch_trials"]) <= bench.MOST_TRIALS


def test_the_search_for_auto_is_bounded_and_right() -> None:
    for count in (1, 2, 7, 30):
        for truth in range(count + 1):
            for guess in range(count):
                sizes = list(range(1, count + 1))
                found, trials = bench.largest_fitting(sizes, guess, lambda n, t=truth: n <= t)
                assert len(trials) <= bench.MOST_TRIALS
                assert found is None or found <= truth
                if len(trials) < bench.MOST_TRIALS:
                    assert (found or 0) == truth


def test_an_illegal_run_fails_with_its_reason(tmp_path: Path, speed: list[float], cli: Cli) -> None:
    words = [*RUN, *CPU, "--micro-batch", "1", "--pp", "2", "--schedule", "interleaved"]
    cli(*words, "--runs", tmp_path, status=1)
    assert "illegal:" in cli.err


def test_diff_needs_repeats_to_decide(tmp_path: Path, speed: list[float], cli: Cli) -> None:
    def measure(micro: str, step_s: float) -> None:
        speed[:] = [step_s]
        cli(*RUN, *CPU, "--micro-batch", micro, "--runs", tmp_path)

    measure("1", 0.5)
    measure("2", 0.6)
    runs = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    words = ["diff", runs[0][:16], runs[1][:16], "--runs", str(tmp_path)]
    first = cli.json(*words)
    assert first["verdict"] == "can't tell"
    assert first["settings"][0]["name"] == "batch.micro_batch"
    measure("1", 0.501)
    assert cli.json(*words)["verdict"] == "different"
    again = next(name for name in runs if f"{name[:8]}#1" in cli("runs", "--runs", tmp_path))[:8]
    assert f"\n{again}#0 " in cli("runs", "--runs", tmp_path), "an id alone names all repeats"
    apart = cli("diff", f"{again}#0", f"{again}#1", "--runs", tmp_path)
    assert f"A ({again}#0)" in apart
    assert f"B ({again}#1)" in apart
    cli("diff", "zz", runs[0], "--runs", tmp_path, status=2)


@pytest.mark.parametrize("command", ["bench", "train"])
def test_a_gpu_that_is_not_there_is_missed_before_a_rank_starts(
    command: str, tmp_path, monkeypatch, cli
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    place = (
        ["--runs", str(tmp_path / "r")] if command == "bench" else ["--out", str(tmp_path / "t")]
    )
    words = [command, "--model", "llama-tiny", "--gpus", "2", "--steps", "1", *place]
    said = cli(*words, "--set", "device=cuda", status=2)
    assert "device cuda needs 2 GPUs, one per rank, but this machine has 1" in said
    assert not list(tmp_path.glob("**/*.json"))


def test_engines_run_the_same_run_into_one_table(tmp_path, speed, cli) -> None:
    fake = Path(__file__).parents[1] / "samples" / "engine" / "fake.py"
    template = tmp_path / "mine.toml"
    command = ["python3", str(fake), "{settings}", "{iterations}", "0.25", "plain"]
    template.write_text(f'export = "megatron"\nreader = "megatron"\ncommand = {command!r}\n')
    runs = str(tmp_path / "runs")
    words = [*RUN, *CPU, "--micro-batch", "2", "--runs", runs, "--engine", f"{template}, fourfold"]
    data = cli.json(*words)["runs"]
    assert [run["engine"] for run in data] == ["mine", "fourfold"]
    assert [run["step_s"] for run in data] == [0.25, 0.5]
    assert data[0]["run_id"] == data[1]["run_id"], "the same run"
    table = cli(*words).rpartition("\n\n")[2].splitlines()
    assert "of fourfold" in table[0]
    assert [line.split()[0] for line in table[2:]] == ["mine", "fourfold"]
    assert "2.000" in table[2]
    assert "1.000" in table[3]


TABLE: dict[str, Any] = {"model": "llama-tiny", "gpus": 2}


def decided(monkeypatch: pytest.MonkeyPatch, gpus: int, **more: Any) -> RunSpec:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    return described(TABLE | more)


def test_a_run_on_gpus_is_compiled_and_its_name_says_so(monkeypatch):
    found = decided(monkeypatch, 2)
    assert found.policy.compile
    assert found.run_id == codec.load(RunSpec, TABLE | {"policy": {"compile": True}}).run_id
    assert found.run_id != codec.load(RunSpec, TABLE).run_id


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (1, {}),
        (0, {}),
        (2, {"device": "cpu"}),
        (2, {"policy": {"compile": False}}),
        (2, {"policy": {"schedule": "zero-bubble"}, "layout": "pp2"}),
    ],
)
def test_elsewhere_it_stays_as_it_is(monkeypatch, gpus, more):
    assert not decided(monkeypatch, gpus, **more).policy.compile


def test_what_a_table_says_stands(monkeypatch):
    assert decided(monkeypatch, 0, policy={"compile": True}).policy.compile
