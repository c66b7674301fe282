"""The memory of Megatron's ranks: against bytes worked out by hand and against the same steps on
real tensors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec.engine import FOLDER, engine_of
from fourfold.spec.run import run_of
from tests.engines.sampled import environment

NAME, TOKENS = "megatron", 128
ADAPTER = Path(FOLDER) / "megatron" / "adapter_memory.py"
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
# Layout, sequences of a step, policy.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp": ("dp4", 4, {}),
    "tp": ("dp2 tp2", 2, {}),
    "pp": ("pp2 dp2", 8, {}),
    "full": ("dp4", 4, {"recompute": "full"}),
    "interleaved": ("pp2 dp2", 8, INTERLEAVED),
}


def arguments(layout: str, global_batch: int, policy: dict[str, Any]) -> list[str]:
    """Arguments of Megatron for llama-tiny, as they are exported."""
    spec = run_of(
        {
            "model": "llama-tiny",
            "layout": layout,
            "batch": {"seq_len": TOKENS, "global_batch": global_batch},
            "policy": {"sharding": "zero1", **policy},
        }
    )
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=4,
        engine=engine_of("megatron"),
    )
    return export.write_folder(NAME, setup)["engine.args"].splitlines()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """By case, for 'cpu' and 'real'."""
    folder = tmp_path_factory.mktemp("megatron")
    requests = {}
    for name, case in CASES.items():
        plain = {"rank": 0, "world": 4, "folder": str(folder), "arguments": arguments(*case)}
        plain |= {"operators": "cpu", "is_fake": True}
        requests[name, "cpu"] = plain
        requests[name, "real"] = plain | {"is_fake": False}
    done = subprocess.run(
        [environment(NAME), Path(__file__).with_name("rank_memory.py"), ADAPTER],
        input=json.dumps(list(requests.values())),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_count_as_real_ones(name, counts) -> None:
    fake, real = counts[name, "cpu"], counts[name, "real"]
    for field in ("allocated_bytes", "reserved_bytes", "kinds", "peak_phase", "params"):
        assert fake[field] == real[field], field


@pytest.mark.parametrize(("name", "dp"), [("dp", 4), ("tp", 2), ("pp", 2)])
def test_state_is_bf16_weights_fp32_gradients_and_a_share(name, dp, counts) -> None:
    """2 bytes of weights, 4 of gradients, and 12 of a share of each, buffers padded by less than
    512 elements."""
    count = counts[name, "cpu"]
    kinds, params = {kind["name"]: kind["bytes"] for kind in count["kinds"]}, count["params"]
    assert 0 <= kinds["parameters"] - 2 * params < 2 * 512
    assert 0 <= kinds["gradients"] - 4 * params < 4 * 512
    assert kinds["optimizer"] == pytest.approx(12 * params / dp, rel=0.02)
