"""Do runs and trainings write traces that other tools read, beside what they measure?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import UserError
from fourfold.launch.local import run_job
from fourfold.result.files import curve
from fourfold.result.job import Job
from fourfold.result.trace import TRACE_KEY, TracedRun, trace_path, trace_window
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings
from tests.specs import run_spec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def spec(layout: str) -> RunSpec:
    fields = {"seq_len": 32, "global_batch": 4, "precision": "fp32"}
    return run_spec("llama-tiny", layout, device="cpu", steps=1, warmup=2, **fields)


def marks(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a trace tells of its run, and the names of its steps."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    return trace, sorted(name for name in names if str(name).startswith("ProfilerStep#"))


def test_a_rank_alone_and_every_rank_of_a_run_write_one(tmp_path: Path) -> None:
    options = (("ranks", "1"), ("trace", str(tmp_path / "alone.json.gz")))
    report = run_job(Job(job="one-rank", specs=(spec("dp2 tp2"),), options=options), tmp_path / "a")
    assert report.outcome == "ok", report.failure
    options = (("trace", str(tmp_path / "run.json.gz")),)
    report = run_job(Job(job="run", specs=(spec("dp2"),), options=options), tmp_path / "b")
    assert report.outcome == "ok", report.failure
    assert len(report.runs[0].steps) == 3  # traced steps are not among them
    for name, rank in (("alone", 1), ("run.rank0", 0), ("run.rank1", 1)):
        trace, steps = marks(tmp_path / f"{name}.json.gz")
        assert len(steps) == 3
        told = codec.decode(TracedRun, trace[TRACE_KEY])
        assert (told.rank, told.stand_in) == (rank, name == "alone")
        assert told.spec.model == spec("dp2").model
        shaped = [event for event in trace["traceEvents"] if event.get("name") == "aten::mm"]
        assert any(event["args"]["Input Dims"] for event in shaped)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_training_traces_the_asked_steps_and_keeps_its_curve(tmp_path: Path) -> None:
    settings = TrainSettings(steps=5, log_every=3, save_every=0)
    options = (("out", str(tmp_path)), ("load", ""), ("trace_steps", "2:3"))
    job = Job(job="train", specs=(spec("dp1"),), options=options, train=settings)
    report = run_job(job, tmp_path / "job")
    assert report.outcome == "ok", report.failure
    _, steps = marks(tmp_path / "traces" / "steps-2-3.rank0.json.gz")
    assert steps == ["ProfilerStep#2", "ProfilerStep#3"]
    points = curve.parse(tmp_path / curve.METRICS_FILE).points
    assert [point.step for point in points] == [1, 2, 3, 4, 5]


def test_places_and_windows_are_checked_before_anything_runs(tmp_path: Path) -> None:
    assert trace_window("20:22") == (20, 22)
    for text in ("20", "3:2", "0:2", "a:b", "1:2:3", "-1:2"):
        with pytest.raises(UserError, match="two steps A:B"):
            trace_window(text)
    with pytest.raises(UserError, match=r"ends in \.json"):
        trace_path(str(tmp_path / "trace.txt"))
    with pytest.raises(UserError, match="does not exist"):
        trace_path(str(tmp_path / "missing" / "a.json"))
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    (tmp_path / "mine.rank1.json.gz").write_bytes(gzip.compress(b'{"mine": 1}'))
    for name, ranks in (("mine.json", 1), ("mine.json.gz", 2)):
        with pytest.raises(UserError, match="is not a profiler's trace; choose another name"):
            trace_path(str(tmp_path / name), ranks)
    (tmp_path / "ours.json.gz").write_bytes(gzip.compress(b'{"schemaVersion": 1}'))
    assert trace_path(str(tmp_path / "ours.json.gz")).name == "ours.json.gz"
