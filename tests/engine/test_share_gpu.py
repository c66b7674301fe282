"""Ranks that share a GPU: what they send goes through host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold.cli import main
from fourfold.engine.process.task import Place, Task
from fourfold.launch import permit
from fourfold.result.job import Job
from fourfold.spec.run import RunSpec
from tests.engine.verified import verified
from tests.specs import run_spec


def spec(layout: str, family: str = "llama", **policy) -> RunSpec:
    fields = {"seq_len": 32, "global_batch": 8, "micro_batch": 2, "precision": "fp32", **policy}
    return run_spec(f"{family}-tiny", layout, device="cpu", steps=3, warmup=0, **fields)


SOME = [spec("pp2 tp2"), spec("dp2 cp2", sharding="zero3", cp_kind="ring")]
MORE = [
    spec("dp2 tp2", sharding="zero3", sequence_parallel=False),
    spec("dp2 cp2", sharding="zero0", cp_kind="ulysses", family="mpt"),
    spec("cp4", cp_kind="allgather", sharding="zero1"),
]
FOUR_AXES = [
    spec("pp2 dp2 cp2 tp2", sharding=zero, schedule=schedule, precision=precision)
    for zero, schedule, precision in (
        ("zero1", "1f1b", "fp32"),
        ("zero3", "zero-bubble", "fp64"),
        ("zero2", "gpipe", "bf16-mixed"),
    )
]


@pytest.mark.parametrize(
    "specs", [SOME, *(pytest.param(some, marks=pytest.mark.slow) for some in (MORE, FOUR_AXES))]
)
def test_every_axis_equals_one_process_through_host_memory(specs, tmp_path):
    """On a CPU, where the copies are no copies: the group itself is tried."""
    rows = verified(specs, tmp_path, share_gpu="true")
    assert [row for row in rows if not row["pass"] or "failure" in row] == []


def test_ranks_that_share_take_turns_on_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = []
    for rank in range(5):
        job = Job(job="verify", options=(("share_gpu", "true"),))
        place = Place(rank=rank, world=5, local_rank=rank, local_world=5)
        found.append(Task(job, 0, place, Path(), None, 0.0).device("cuda").index)
    assert found == [0, 1, 0, 1, 0]


def test_a_gpu_is_shared_only_where_that_is_asked_for(monkeypatch, cli):
    monkeypatch.setattr(permit, "gpu_count", lambda: 1)
    words = ["verify", "--world", "4", "--device", "cuda"]
    said = cli(*words, status=2)
    assert "needs 4 GPUs, one per rank" in said
    assert "--share-gpu" in said
    monkeypatch.setattr(permit, "gpu_count", lambda: 0)
    assert "needs a GPU, but this machine has 0" in cli(*words, "--share-gpu", status=2)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_axes_on_one_gpu_equal_one_process(precision, capsys):
    words = ["verify", "--layout", "pp2 dp2 cp2 tp2", "--device", "cuda", "--share-gpu"]
    assert main([*words, "--sample", "3", "--precision", precision]) == 0, capsys.readouterr().out
