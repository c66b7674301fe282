"""Structured logs: CloudAI's training_report.json, torchtitan's events of each rank. The files
are as their writers make them: cloudai's report_generator/training/models.py (schema 1.0),
torchtitan's observability/structured_logger/jsonl_handler.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.logs import written
from tests.logs.reading import collected, says

EVENT: dict[str, Any] = json.loads(written.printed("torchtitan-event.json"))
CONFIG: dict[str, Any] = json.loads(written.printed("cloudai.json"))
GIVEN = {"vocab": "128256", "hardware": "h100-80gb", "precision": "bf16", "sharding": "zero1",
         "act_ckpt": "none"}  # fmt: skip


def report(**config: Any) -> dict[str, Any]:
    """Steps of 5 s; the first longer, and those under the profiler."""
    seconds = {1: 60.0, 10: 9.0, 11: 9.0, 12: 9.0}
    steps = [
        {"iteration": at, "step_time_sec": seconds.get(at, 5.0), "loss": 12.0 - at / 10,
         "memory_reserved_bytes": 60 * 2.0**30, "memory_allocated_bytes": 55 * 2.0**30,
         "tflops_per_gpu": 640.0}
        for at in range(1, 17)
    ]  # fmt: skip
    whole = {"schema_version": "1.0", "config": CONFIG | config, "steps": steps}
    return whole | {"aggregation": {"step_time_sec": {"mean": 5.0, "min": 5.0}}}


def event(kind: str, *, rank: int = 0, step: int = 1, **more: Any) -> str:
    ranks = dict.fromkeys(("rank", "global_rank", "local_rank"), rank)
    steps = {"step": step, "relative_step": step, "log_type_name": kind, "message": kind}
    return json.dumps(EVENT | ranks | steps | more) + "\n"


def rank_log(rank: int, milliseconds: float, steps: int = 12) -> str:
    lines = [event("training_start", rank=rank, step=0)]
    for at in range(1, steps + 1):
        tags = {5: {"step_tags": ["checkpoint_save"]}, 6: {"step_tags": ["gc"]}}.get(at, {})
        slow = {1: 40.0, 5: 20.0}.get(at, 1.0)
        lines += [
            event("step_start", rank=rank, step=at),
            event("fwd_bwd_end", rank=rank, step=at, value=0.8 * milliseconds),
            event("metric_value", rank=rank, step=at, value=8192.0),
            event("step_end", rank=rank, step=at, value=slow * milliseconds, **tags),
        ]
    return "".join(lines)


@pytest.mark.parametrize("indent", [None, 4])
def test_a_report_of_cloudai_is_a_row(indent: int | None, tmp_path: Path) -> None:
    path = tmp_path / "training_report.json"
    path.write_text(json.dumps(report(), indent=indent))
    answer = collected(path, out=tmp_path / "rows.csv", **GIVEN)
    (row,) = answer.rows_read
    assert answer.files[0].kind == "CloudAI"
    assert [float(row[name]) for name in ("step_s", "mem_gb", "tflops_gpu")] == [5.0, 60.0, 640.0]
    says(row, "steps=10")  # neither the first, nor under the profiler, nor right after it
    says(row, "status=ok missing= stack=megatron-bridge n_gpus=16 gpus_per_node=8 tp=2 cp=1 pp=1")
    says(row, "dp=8 vpp=1 family=llama row_id=llama3_8b.1 sequence_parallel=1")


def test_what_a_report_does_not_say_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "training_report.json"
    path.write_text(json.dumps(report(fp8="hybrid", num_experts=8, world_size=None), indent=2))
    (row,) = collected(path, out=tmp_path / "rows.csv").rows_read
    assert row["precision"] == "fp8"
    assert row.missing == (
        *("hardware", "vocab", "sharding", "act_ckpt"),
        *("experts_per_token", "expert_ffn"),
    )
    assert (row["experts"], row["unmodelled"]) == ("8", "")


@pytest.mark.parametrize("broken", [
    {"steps": [{"iteration": 3, "step_time_sec": "x"}, 7, {"iteration": -1, "step_time_sec": 2.0}]},
    {"steps": []},
])  # fmt: skip
def test_a_report_without_steps_has_no_seconds(broken: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "training_report.json"
    path.write_text(json.dumps(report() | broken))
    answer = collected(path, out=tmp_path / "rows.csv", **GIVEN)
    assert all(row["step_s"] == "" for row in answer.rows_read)
    assert answer.files[0].book.unread == len(broken["steps"])


def test_events_of_all_ranks_are_one_row(tmp_path: Path) -> None:
    folder = tmp_path / "structured_logs"
    folder.mkdir()
    for rank, milliseconds in enumerate((320.0, 330.0, 321.0, 322.0)):
        name = f"training.global_rank_{rank}.20260820-101500-ABC{rank}9Z.jsonl"
        (folder / name).write_text(rank_log(rank, milliseconds))
    answer = collected(folder, out=tmp_path / "rows.csv")
    (row,) = answer.rows_read
    assert (answer.files[0].kind, row["stack"], row["n_gpus"]) == ("torchtitan", "torchtitan", "4")
    assert float(row["step_s"]) == pytest.approx(0.33)  # of the slowest
    assert row["steps"] == "10"  # neither the first nor the one with a checkpoint
    assert answer.files[0].book.unread == 0


def test_half_an_event_is_not_a_step(tmp_path: Path) -> None:
    path = tmp_path / "training.global_rank_0.20260820-101500-ABCDEF.jsonl"
    text = rank_log(0, 320.0)
    bad = event("step_end", step=13, value=320.0)[:-40] + "\n" + event("step_end", step=14)
    path.write_text(text + bad)
    answer = collected(path, out=tmp_path / "rows.csv")
    assert answer.files[0].book.unread == 2
    assert answer.rows_read[0]["steps"] == "10"
