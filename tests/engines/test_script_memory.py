"""The memory of scripts around a model of transformers, under FSDP2, accelerate and DeepSpeed:
against bytes worked out by hand and against the same steps on real tensors."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.result.one_rank import EngineJob, RankMemoryRequest
from fourfold.spec import codec
from fourfold.spec.engine import FOLDER
from fourfold.spec.layout import Layout
from tests.engines.sampled import environment

MODELS = tomllib.loads(Path(__file__).with_name("script_models.toml").read_text())
IMPORTS = {
    "transformers": ("transformers.models.llama.modeling_llama",),
    "accelerate": ("accelerate", "transformers.models.llama.modeling_llama"),
    "deepspeed": ("deepspeed", "transformers.models.llama.modeling_llama"),
}
TOKENS, RANKS = 64, 4


def job(**fields: Any) -> EngineJob:
    plain: dict[str, Any] = {
        "model": "tiny",
        "has_experts": False,
        "layout": Layout(shard=RANKS),
        "sharding": "zero3",
        "recompute": "none",
        "precision": "bf16-mixed",
        "precision_name": "bf16-mixed",
        "is_compiled": False,
        "seq_len": TOKENS,
        "micro_batch": 2,
        "global_batch": 2 * RANKS,
    }
    return EngineJob(**{**plain, **fields})


# By engine: model and fields of the job.
CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "transformers": {
        "plain": ("llama", {}),
        "biases": ("gpt2", {"sharding": "zero2"}),
        "experts": ("experts", {"recompute": "full"}),
        "hybrid": ("hybrid", {"precision": "bf16-pure"}),
    },
    "accelerate": {
        "plain": ("llama", {}),
        "recomputed": ("llama", {"recompute": "full", "global_batch": 8 * RANKS}),
    },
    "deepspeed": {f"zero{stage}": ("llama", {"sharding": f"zero{stage}"}) for stage in (1, 2, 3)},
}
NAMES = [(engine, name) for engine, cases in CASES.items() for name in cases]
Counts = Callable[[str], dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Of an engine: by the name of a case and how it was counted, for 'gpu', 'cpu' or 'real'."""

    @functools.cache
    def of_engine(engine: str) -> dict[tuple[str, str], dict[str, Any]]:
        root = tmp_path_factory.mktemp(engine)
        requests: dict[tuple[str, str], dict[str, Any]] = {}
        for name, (model, fields) in CASES[engine].items():
            folder = root / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(MODELS[model]))
            request = RankMemoryRequest(
                rank=0, world=RANKS, folder=str(folder), arguments=(), job=job(**fields)
            )
            plain = codec.encode(request) | {"operators": "cpu", "is_fake": True}
            requests[name, "cpu"] = plain
            requests[name, "real"] = plain | {"is_fake": False}
            if name in BY_HAND:
                requests[name, "gpu"] = plain | {"operators": "cuda"}
        adapter = Path(FOLDER) / engine / "adapter_memory.py"
        script = Path(__file__).with_name("rank_memory.py")
        done = subprocess.run(
            [environment("ecosystem"), script, adapter, *IMPORTS[engine]],
            input=json.dumps(list(requests.values())),
            capture_output=True,
            text=True,
            check=False,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True))

    return of_engine


@pytest.mark.parametrize(("engine", "name"), NAMES)
def test_fake_tensors_count_as_real_ones(engine, name, counts) -> None:
    """The same steps of the same engine, where every storage has memory."""
    fake, real = counts(engine)[name, "cpu"], counts(engine)[name, "real"]
    for field in ("allocated_bytes", "reserved_bytes", "peak_phase", "params"):
        assert fake[field] == real[field], field
    assert _tensors(fake) == _tensors(real)


def _tensors(count: dict[str, Any]) -> set[tuple[int, str, str]]:
    return {(tensor["bytes"], tensor["op"], tensor["line"]) for tensor in count["peak"]}


# Cases whose state is counted by hand: all sizes divide.
BY_HAND = ("plain", "zero1", "zero2")


@pytest.mark.parametrize("engine", ["transformers", "accelerate"])
def test_fsdp_holds_fp32_shards_and_two_moments(engine, counts) -> None:
    """4 bytes of weights and 8 of moments a parameter, over the ranks."""
    count = counts(engine)["plain", "gpu"]
    params, held = count["params"], kinds(count)
    assert held["parameters"] == 4 * params // RANKS
    assert 0 <= held["optimizer"] - 8 * params // RANKS <= 4 * 64  # counters of steps


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_zero_holds_bf16_weights_and_a_share_of_state(name, counts) -> None:
    """2 bytes of all weights, 4 of a rank's share and 8 of its moments."""
    count = counts("deepspeed")[name, "gpu"]
    params, held = count["params"], kinds(count)
    assert held["parameters"] == 2 * params + 4 * params // RANKS
    assert 0 <= held["optimizer"] - 8 * params // RANKS <= 4


def kinds(count: dict[str, Any]) -> dict[str, int]:
    return {kind["name"]: kind["bytes"] for kind in count["kinds"]}


# As accelerate's own `config` writes it for eight GPUs.
YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
# As transformers' documentation has it for ZeRO 2.
JSON = """
{
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""
RELEASES = {"accelerate": "1.15.0", "deepspeed": "0.19.8"}


@pytest.fixture
def engines(tmp_path: Path) -> str:
    """A folder of installed engines with those of this environment."""
    for engine, version in RELEASES.items():
        home = tmp_path / "engines" / f"{engine}-{version}"
        (home / "bin").mkdir(parents=True)
        (home / ".ready").write_text(f"{engine}=={version}")
        python = home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{environment("ecosystem")}" "$@"\n')
        python.chmod(0o755)
    return str(tmp_path / "engines")


def test_accelerate_yaml_counts_as_the_same_flags(engines, tmp_path) -> None:
    own, model = tmp_path / "fsdp.yaml", tmp_path / "config.json"
    own.write_text(YAML)
    model.write_text(json.dumps(MODELS["llama"]))
    request = fourfold.EngineMemoryRequest(engine="accelerate==1.15.0", engines=engines)
    run = {"model": str(model), "layout": "dp4", "seq_len": TOKENS}
    by_file = fourfold.engine_memory(run, replace(request, config=str(own)))
    by_flags = fourfold.engine_memory(run | {"recompute": "full"}, request)
    same = {"seconds": 0.0, "host_bytes": 0}
    assert replace(by_file, **same) == replace(by_flags, **same)

    own.write_text(YAML.replace("fsdp_version: 2", "fsdp_version: 1"))
    refused = r"fsdp_version = 1 in .* is not counted yet .* use 2"
    with pytest.raises(fourfold.UserError, match=refused):
        fourfold.engine_memory(run, replace(request, config=str(own)))


def test_deepspeed_json_is_filled_in_as_a_trainer_does(engines, tmp_path) -> None:
    """Buckets of the square of the hidden size instead of half a billion elements."""
    own, model = tmp_path / "zero2.json", tmp_path / "config.json"
    own.write_text(JSON)
    model.write_text(json.dumps(MODELS["llama"]))
    request = fourfold.EngineMemoryRequest(engine="deepspeed==0.19.8", engines=engines)
    run = {"model": str(model), "layout": "dp4", "seq_len": TOKENS, "micro_batch": 2}
    by_file = fourfold.engine_memory(run, replace(request, config=str(own)))
    assert (by_file.sharding, by_file.micro_batch, by_file.global_batch) == ("zero2", 2, 8)
    assert by_file.by_phase["optimizer"] < 100 * 2**20

    own.write_text(JSON.replace('"stage": 2', '"stage": 2, "offload_optimizer": {"device": "cpu"}'))
    with pytest.raises(fourfold.UserError, match=r"offload_optimizer.* is not counted yet"):
        fourfold.engine_memory(run, replace(request, config=str(own)))
