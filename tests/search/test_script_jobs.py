"""Jobs of scripts around a model of transformers, as `dryrun --engine` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import UserError
from fourfold.result.one_rank import EngineJob
from fourfold.spec import catalog
from fourfold.spec.engine import ADAPTERS
from fourfold.verbs.engine_memory_models import MODEL_FILE, write_model_job

# A hybrid with attention without softmax: no plan has it.
HYBRID = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 512}


def job_of(run: dict[str, Any], folder: Path, layout: str | None = None) -> EngineJob:
    adapter = ADAPTERS["deepspeed"][1].memory["deepspeed"]
    return write_model_job(run, layout, adapter, "deepspeed 0.19.8", str(folder))


def test_model_that_no_plan_has_is_taken_as_it_is(tmp_path) -> None:
    own = tmp_path / "next-80b" / "config.json"
    own.parent.mkdir()
    own.write_text(json.dumps(HYBRID))
    with pytest.raises(UserError):
        catalog.model(str(own))
    for name in (own, own.parent):
        job = job_of({"model": str(name), "seq_len": 4096}, tmp_path, "dp16 zero2")
        assert (tmp_path / MODEL_FILE).read_text() == own.read_text()
        assert (job.model, job.layout.world, job.sharding) == ("next-80b", 16, "zero2")


def test_preset_is_written_as_a_config_json(tmp_path) -> None:
    job = job_of({"model": "llama-3.1-8b", "gpus": 8, "dp": 8, "seq_len": 2048}, tmp_path)
    written = json.loads((tmp_path / MODEL_FILE).read_text())
    assert (written["model_type"], written["num_hidden_layers"]) == ("llama", 32)
    assert (job.sharding, job.micro_batch, job.global_batch) == ("zero3", 0, 8)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"recompute": "selective"}, "recompute=selective is not counted yet .*use none or full"),
        ({"compile": True}, "policy.compile"),
        ({"optimizer": "adamw-plain"}, "policy.optimizer"),
    ],
)
def test_policy_that_no_script_here_has_is_refused(fields, error, tmp_path) -> None:
    run = {"model": "llama-tiny", "layout": "dp2", "seq_len": 64, **fields}
    with pytest.raises(UserError, match=error):
        job_of(run, tmp_path)
