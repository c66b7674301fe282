"""Messages between ranks: in place, and by copies in host memory for ranks that share a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fourfold.cli import main
from fourfold.engine.parallel import messages
from fourfold.engine.process.task import Place, Task
from fourfold.launch import devices
from fourfold.spec.job import Job

HERE = Path(__file__).parent


def test_copies_in_host_memory_carry_what_messages_in_place_do(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    script = [sys.executable, str(HERE / "messages_ranks.py"), str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        before = 10 * ((rank - 1) % 3)
        wanted = [before + i for i in range(4)]
        assert len(found) == 4
        assert all(values == wanted for values in found.values()), found


@pytest.mark.parametrize(
    ("on_gpu", "backend", "by_host"),
    [(True, "gloo", True), (True, "nccl", False), (False, "gloo", False)],
)
def test_only_gloo_needs_copies_of_what_lies_on_a_gpu(monkeypatch, on_gpu, backend, by_host):
    posted = []
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(messages, "start_by_host", lambda ops: posted.append("host") or [])
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: posted.append("place") or ["work"])
    messages.start([SimpleNamespace(tensor=SimpleNamespace(is_cuda=on_gpu), group=None)])
    assert posted == ["host" if by_host else "place"]


def test_ranks_that_share_take_turns_on_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = []
    for rank in range(5):
        job = Job(job="verify", options=(("share_gpu", "true"),))
        place = Place(rank=rank, world=5, local_rank=rank, local_world=5)
        found.append(Task(job, 0, place, Path(), None, 0.0).device("cuda").index)
    assert found == [0, 1, 0, 1, 0]


def test_a_gpu_is_shared_only_where_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    words = ["verify", "--world", "4", "--device", "cuda"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "a GPU for each of 4 ranks" in said
    assert "--share-gpu" in said
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    assert main([*words, "--share-gpu"]) == 2
    assert "needs a GPU to share, and this machine has 0" in capsys.readouterr().err
    assert main(["verify", "--world", "4", "--share-gpu"]) == 2
    assert "belongs to --device cuda" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_axes_on_one_gpu_equal_one_process(precision, capsys):
    words = ["verify", "--layout", "pp2 dp2 cp2 tp2", "--device", "cuda", "--share-gpu"]
    assert main([*words, "--sample", "3", "--precision", precision]) == 0, capsys.readouterr().out
