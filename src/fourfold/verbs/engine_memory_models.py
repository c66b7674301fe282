"""The jobs of scripts around a model of transformers: `dryrun --engine` builds it from a
config.json, whatever it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.one_rank import EngineJob
from fourfold.spec import RunSpec, catalog, check, codec
from fourfold.spec.engine import MemoryAdapter
from fourfold.spec.hf.written import config_of
from fourfold.spec.policy import Policy
from fourfold.spec.run import AnyRun, nested, put_layout, run_of

MODEL_FILE = "config.json"
_SHARDING = "zero3"  # of a script that says nothing
_COUNTED = ("sharding", "precision", "recompute")  # fields of a policy that a script can have
# Where a model is in transformers' words alone, the run beside it is read with this one.
_READ_WITH = "llama-tiny"


def write_model_job(
    run: AnyRun, layout: str | None, adapter: MemoryAdapter, engine: str, folder: str
) -> EngineJob:
    """Return the job of a run whose model's config.json is written to `folder`. A `layout` is put
    into the run; a micro batch that it does not state is 0."""
    table = nested(codec.encode(run) if isinstance(run, RunSpec) else run)
    if layout is not None:
        table = put_layout(table, layout)
    check.given(table.get("model"), "model", "pass a config.json or its folder")
    model = table["model"]
    config = catalog.hub_config(model) if isinstance(model, str) else None
    policy = dict(table.get("policy") or {})
    policy.setdefault("sharding", _SHARDING)
    table |= {"policy": policy}
    spec = run_of(table if config is None else {**table, "model": _READ_WITH})
    _require_counted(spec.policy, adapter, engine)
    check.that(spec.batch.ramp is None, "ramp", "given", f"is not counted by {engine}", "omit it")
    name, text = config or (spec.model.name, _written(spec))
    files.write_text(Path(folder) / MODEL_FILE, text)
    batch: Mapping[str, Any] = table.get("batch") or {}
    dp, rows = spec.layout.dp, spec.batch.micro_batch
    return EngineJob(
        model=name,
        has_experts=False,
        layout=spec.layout,
        sharding=spec.policy.sharding,
        recompute=spec.policy.recompute,
        precision=spec.policy.precision,
        precision_name=spec.policy.precision_name,
        is_compiled=spec.policy.compile,
        seq_len=spec.batch.seq_len,
        micro_batch=rows if "micro_batch" in batch else 0,
        global_batch=spec.batch.global_batch if "global_batch" in batch else dp * rows,
    )


def _written(spec: RunSpec) -> str:
    dtype = "bfloat16" if spec.policy.precision == "bf16-pure" else "float32"
    config = config_of(spec.model, seq_len=spec.batch.seq_len, dtype=dtype)
    return json.dumps(config, indent=2) + "\n"


def _require_counted(policy: Policy, adapter: MemoryAdapter, engine: str) -> None:
    rule = f"is not counted yet by the dry run of {engine}"
    recompute = policy.recompute
    hint = f"use {' or '.join(adapter.recompute)}"
    check.that(recompute in adapter.recompute, "policy.recompute", recompute, rule, hint)
    default = Policy()
    for field in fields(Policy):
        value = getattr(policy, field.name)
        if field.name not in _COUNTED and value != getattr(default, field.name):
            raise UserError(rule, field=f"policy.{field.name}", value=value, hint="omit it")
