"""What torchtitan 0.3 itself prints of its configuration is read with every size of the model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fourfold.logs.book import read_log
from fourfold.search import export
from fourfold.search.export.setup import Setup
from fourfold.spec import catalog
from fourfold.spec.batch import Batch
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy
from tests.engines.sampled import environment


def printed(model: str, folder: Path, layout: str = "dp4 tp2", **policy: Any) -> str:
    setup = Setup(
        model=catalog.model(model),
        layout=Layout.parse(layout),
        batch=Batch(seq_len=4096, micro_batch=2, global_batch=16),
        policy=Policy(recompute="full", sharding="zero2", **policy),
        host_gpus=8,
        engine=engine_of(export.stack_of("torchtitan")),
        device="h100-80gb",
    )
    for name, text in export.write_folder("torchtitan", setup).items():
        (folder / name).write_text(text)
    words = (folder / "engine.args").read_text().split()
    script = Path(__file__).with_name("titan_config.py")
    done = subprocess.run(
        [environment("torchtitan"), script, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def logged(config: str, folder: Path) -> Path:
    log = folder / "train.log"
    steps = "".join(
        f"step: {n:2}  loss:  7.62585  grad_norm: 26.6250  memory: 6.91GiB(8.51%)  tps: {tps:,}  "
        "tflops: 314.71  mfu: 31.00%\n"
        for n, tps in ((1, 100), (10, 5890), (20, 5890), (30, 5890))
    )
    log.write_text(config + steps)
    return log


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-405b"])
def test_its_own_print_says_the_whole_model(model: str, tmp_path: Path) -> None:
    (run,) = read_log(logged(printed(model, tmp_path), tmp_path)).runs
    known = catalog.model(model)
    said = {
        "n_layers": known.layers, "d_model": known.hidden, "n_heads": known.heads,
        "n_kv_heads": known.kv_heads, "d_ff": known.ffn, "vocab": known.vocab,
        "tied": int(known.tied), "seq_len": 4096, "gbs": 16, "pp": 1, "dp": 4, "tp": 2, "cp": 1,
        "mbs": 2, "precision": "bf16",
    }  # fmt: skip
    assert {name: run.facts.get(name) for name in said} == {n: str(v) for n, v in said.items()}
    assert "unmodelled" not in run.facts


@pytest.mark.parametrize(
    ("model", "dispatcher"), [("qwen3-30b-a3b", "alltoall"), ("deepseek-v3", "deepep")]
)
def test_its_own_print_says_the_experts(model: str, dispatcher: str, tmp_path: Path) -> None:
    text = printed(model, tmp_path, "dp4 tp2 ep8", dispatcher=dispatcher, routing="forced")
    (run,) = read_log(logged(text, tmp_path)).runs
    known = catalog.model(model)
    said = {
        "n_layers": known.layers, "experts": known.experts, "experts_per_token": known.top_k,
        "expert_ffn": known.moe.ffn, "head_dim": known.head_size, "ep": 8, "etp": 1,
        "dispatcher": dispatcher, "routing": "forced", "tp": 2, "dp": 4, "family": known.family,
    }  # fmt: skip
    if known.latent:
        said |= {"kv_lora_rank": known.latent.kv_rank, "q_lora_rank": known.latent.q_rank}
        said |= {"shared_ffn": known.moe.shared_ffn, "dense_layers": known.moe.dense_first}
    assert {name: run.facts.get(name) for name in said} == {n: str(v) for n, v in said.items()}
    assert "unmodelled" not in run.facts
