"""The memory of torchtitan's ranks: against bytes worked out by hand, against the same steps on
real tensors, and against an H200."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.cost.memory.allocator import rounded
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec.engine import FOLDER, engine_of
from fourfold.spec.run import run_of
from tests.engines.sampled import environment

NAME, GIB = "torchtitan-0.2", 2**30
ADAPTER = Path(FOLDER) / "torchtitan" / "adapter_memory_02.py"
HIDDEN, FFN, VOCAB, KV, LAYERS, TOKENS = 64, 176, 512, 32, 4, 64


def settings(folder: Path, layout: str, **batch: int) -> list[str]:
    """Arguments of torchtitan for llama-tiny, as they are exported; `folder` gets their files."""
    spec = run_of(
        {
            "model": "llama-tiny",
            "layout": layout,
            "batch": {"seq_len": TOKENS, **batch},
            "policy": {"sharding": "zero3"},
        }
    )
    setup = Setup(
        model=spec.model,
        layout=spec.layout,
        batch=spec.batch,
        policy=spec.policy,
        host_gpus=8,
        engine=engine_of("torchtitan"),
    )
    folder.mkdir()
    for name, text in export.write_folder(NAME, setup).items():
        (folder / name).write_text(text)
    return (folder / "engine.args").read_text().splitlines()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By case: one process imports the engine once."""
    root = tmp_path_factory.mktemp("memory")
    dp, tp, pp = (
        settings(root / "dp", "dp4", global_batch=4),
        settings(root / "tp", "dp2 tp2", global_batch=2),
        settings(root / "pp", "pp2 dp2", global_batch=8),
    )
    plain = {"is_fake": True, "operators": "cuda", "world": 4}
    cases = {
        "dp": {**plain, "rank": 0, "folder": str(root / "dp"), "arguments": dp},
        "tp": {**plain, "rank": 0, "folder": str(root / "tp"), "arguments": tp},
        "first": {**plain, "rank": 0, "folder": str(root / "pp"), "arguments": pp},
        "last": {**plain, "rank": 3, "folder": str(root / "pp"), "arguments": pp},
    }
    cases["cpu"] = cases["dp"] | {"operators": "cpu"}
    cases["real"] = cases["dp"] | {"operators": "cpu", "is_fake": False}
    done = subprocess.run(
        [
            environment(NAME),
            Path(__file__).with_name("rank_memory.py"),
            ADAPTER,
            "torchtitan.train",
        ],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


LAYER = {
    "wq": (HIDDEN, HIDDEN),
    "wk": (KV, HIDDEN),
    "wv": (KV, HIDDEN),
    "wo": (HIDDEN, HIDDEN),
    "w1": (FFN, HIDDEN),
    "w2": (HIDDEN, FFN),
    "w3": (FFN, HIDDEN),
}
ENDS = {"embeddings": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN)}


def weights(layers: int, *ends: str, ranks: int, norm_ranks: int, norms: int) -> list[int]:
    """Elements of each weight on a rank: matrices over all `ranks`, norms over those of dp."""
    shapes = [*(ENDS[end] for end in ends), *(layers * list(LAYER.values()))]
    return [*(m * n // ranks for m, n in shapes), *(norms * [HIDDEN // norm_ranks])]


CASES = {
    "dp": weights(LAYERS, "embeddings", "output", ranks=4, norm_ranks=4, norms=2 * LAYERS + 1),
    "tp": weights(LAYERS, "embeddings", "output", ranks=4, norm_ranks=2, norms=2 * LAYERS + 1),
    "first": weights(2, "embeddings", ranks=2, norm_ranks=2, norms=4),
    "last": weights(2, "output", ranks=2, norm_ranks=2, norms=5),
}


@pytest.mark.parametrize("case", CASES)
def test_state_is_what_the_shards_take_by_hand(case, counts) -> None:
    """fp32 weights and two moments of each shard, and a counter of steps beside."""
    sizes = CASES[case]
    kinds = {kind["name"]: kind["bytes"] for kind in counts[case]["kinds"]}
    assert kinds["parameters"] == 4 * sum(sizes)
    assert kinds["optimizer"] == 2 * 4 * sum(sizes) + 4 * len(sizes)


@pytest.mark.parametrize("case", CASES)
def test_update_holds_state_and_gradients(case, counts) -> None:
    """Weights, gradients and two moments as the allocator rounds them, cuBLAS's workspace, angles
    of positions, what 4 micro batches of a pipeline receive, and few single numbers."""
    sizes = CASES[case]
    state = sum(4 * rounded(4 * size) + 512 for size in sizes) + 64 * 2**20
    angles = rounded(2 * TOKENS * (HIDDEN // 4 // 2) * 4)
    received = 4 * TOKENS * HIDDEN * 2 if case in ("first", "last") else 0
    phases = {phase["name"]: phase["bytes"] for phase in counts[case]["phases"]}
    assert 0 <= phases["optimizer"] - state - angles - received <= 32 * 512


def test_stages_are_told_apart(counts) -> None:
    assert [counts[case]["stage"] for case in ("first", "last")] == [0, 1]


def test_fake_tensors_count_as_real_ones(counts) -> None:
    """The same steps of the same engine, where every storage has memory."""
    fake, real = counts["cpu"], counts["real"]
    assert fake["num_unknown_values"] > 0 == real["num_unknown_values"]
    for field in ("allocated_bytes", "reserved_bytes", "kinds", "peak_phase", "peak"):
        assert fake[field] == real[field], field
    for counted, held in zip(fake["phases"], real["phases"], strict=True):
        assert counted["name"] == held["name"]
        assert counted["bytes"] == pytest.approx(held["bytes"], abs=512)  # a number that was read


def test_peak_names_modules_and_lines_of_the_engine(counts) -> None:
    tensors = counts["dp"]["peak"]
    assert any(tensor["module"].startswith("layers.") for tensor in tensors)
    assert any(tensor["line"].startswith("torchtitan/models/llama3/") for tensor in tensors)
    assert not any("fourfold" in tensor["line"] for tensor in tensors)


# As torchtitan's own examples are written, with tables that change no memory.
OWN_SETTINGS = """
# torchtitan Config.toml

[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"

[metrics]
log_freq = 1
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "debugmodel"
# test folder with tokenizer.json, for debug purpose only
hf_assets_path = "./tests/assets/tokenizer"
# converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 8e-4

[lr_scheduler]
warmup_steps = 2  # lr scheduler warm up, normally 20% of the train steps

[training]
local_batch_size = 8
seq_len = 512
max_norm = 1.0  # grad norm clipping
steps = 10
dataset = "c4_test"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default" # default / never / always
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = true
folder = "checkpoint"
interval = 500
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "2"

[compile]
enable = false
components = ["model", "loss"]
"""
DEBUG_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture
def engines(tmp_path: Path) -> str:
    """A folder of installed engines with this environment's torchtitan."""
    home = tmp_path / "engines" / "torchtitan-0.2.2"
    (home / "bin").mkdir(parents=True)
    (home / ".ready").write_text("torchtitan==0.2.2")
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{environment(NAME)}" "$@"\n')
    python.chmod(0o755)
    return str(tmp_path / "engines")


def test_config_counts_as_the_same_run_by_flags(engines, tmp_path) -> None:
    own, model = tmp_path / "debug_model.toml", tmp_path / "config.json"
    own.write_text(OWN_SETTINGS)
    model.write_text(json.dumps(DEBUG_MODEL))
    request = fourfold.EngineMemoryRequest(engine="torchtitan==0.2.2", engines=engines)
    by_config = fourfold.engine_memory({"gpus": 4}, replace(request, config=str(own)))
    run = {"model": str(model), "layout": "dp4", "seq_len": 512, "micro_batch": 8}
    by_flags = fourfold.engine_memory(run | {"recompute": "every-2"}, request)
    assert by_config.model == "llama3 debugmodel"
    same = {"model": by_flags.model, "seconds": 0.0, "host_bytes": 0}
    assert replace(by_config, **same) == replace(by_flags, **same)

    wrong = tmp_path / "wrong.toml"
    wrong.write_text(OWN_SETTINGS.replace("seq_len", "seq_length"))
    with pytest.raises(fourfold.UserError, match=r"refused by .*Invalid field names .*seq_length"):
        fourfold.engine_memory({"gpus": 4}, replace(request, config=str(wrong)))


# On one H200 (torch 2.11, torchtitan 0.2.2's own Trainer with its own defaults, a fake process
# group, expandable segments): layout, other fields, rank, GiB allocated and reserved.
MEASURED = [
    ("dp64", {}, "0", 55.35, 59.70),
    ("dp64", {"recompute": "full"}, "0", 16.32, 20.59),
    ("dp64", {"recompute": "selective"}, "0", 29.85, 34.15),
    ("dp8 tp8", {}, "0", 12.25, 13.23),
    ("pp4 dp2 tp8", {"global_batch": 16}, "0", 13.81, 15.68),
    ("pp4 dp2 tp8", {"global_batch": 16}, "63", 7.16, 8.46),
    ("pp4 dp4 tp4", {"global_batch": 32, "recompute": "selective"}, "0", 13.30, 15.02),
]


@pytest.mark.parametrize(
    ("layout", "fields", "rank", "allocated", "reserved"),
    [
        case if number == 0 else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(MEASURED)
    ],
)
def test_llama_8b_is_as_measured(layout, fields, rank, allocated, reserved, engines) -> None:
    request = fourfold.EngineMemoryRequest(
        engine="torchtitan==0.2.2", rank=rank, gpu="h200", engines=engines
    )
    run = {"model": "llama-3.1-8b", "layout": layout, "seq_len": 8192, **fields}
    answer = fourfold.engine_memory(run, request)
    assert answer.allocated_bytes / GIB == pytest.approx(allocated, rel=0.002)
    assert answer.reserved_bytes.expandable / GIB == pytest.approx(reserved, rel=0.01)
    assert answer.fits is not None
    assert answer.fits.segments == answer.fits.expandable == "fits"
    assert answer.host_bytes < 2 * GIB
