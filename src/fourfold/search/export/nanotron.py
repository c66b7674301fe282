"""nanotron's YAML, whole: its Config class takes the file as it is. Of 0.4, the newest release."""

from __future__ import annotations

import json

import numpy as np

from fourfold.cost.count.params import passing_unit
from fourfold.cost.stacks import ExportEngine
from fourfold.cost.step.pipeline import passing_edges
from fourfold.search.export.setup import (
    LLAMA_SHAPE,
    Package,
    Setup,
    check_model,
    filled,
    no_setting,
)
from fourfold.spec.model import ModelShape

CHOICES = {
    "layout.replicate": (1,),
    "policy.attention": ("auto", "flash"),
    "policy.compile": (False,),
    "policy.reduce_dtype": (None, "fp32"),
}
_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES = {"bf16-mixed": "bfloat16", "fp16": "float16", "fp32": "float32"}
_THETA = 10000.0  # built in
_SIZES = ("hidden", "ffn", "heads", "layers", "kv_heads", "norm_eps", "tied", "vocab")


def check(model: ModelShape, engine: ExportEngine) -> None:
    check_model(engine.name, model, LLAMA_SHAPE)
    place = model.positions
    if place.kind != "rope":
        raise no_setting(engine.name, "model.positions.kind", place.kind, "rope")
    if place.theta != _THETA or place.scaling is not None:
        value = f"theta {place.theta:g}" + (", scaled" if place.scaling else "")
        hint = "rope with theta 10000 and no scaling, as in Llama 2 (release 0.4)"
        raise no_setting(engine.name, "model.positions", value, hint)
    if model.head_size * model.heads != model.hidden:
        raise no_setting(engine.name, "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup, engine: ExportEngine) -> Package:
    if setup.policy.zero > 1:  # legal where one data rank has nothing to divide, but not written
        raise no_setting(engine.name, "policy.sharding", setup.policy.sharding, "zero0 or zero1")
    return Package(
        engine=engine,
        entry='"${RUN_TRAIN:-run_train.py}" --config-file "$here/config.yaml"',
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", **setup.env},
        files={"config.yaml": _config(setup, engine)},
        own="data, tokenizer, optimizer's numbers, train_steps and checkpoints, all in config.yaml",
        about=_about(setup.model, setup.layout.pp),
    )


def stages(model: ModelShape, pp: int) -> list[int]:
    """Layers of each stage in this release."""
    head = model.vocab / passing_unit(model.hidden, model.ffn)
    layers, stages = np.array(float(model.layers)), np.array(float(pp))
    edges = passing_edges(layers, np.array(head), stages, np.arange(pp + 1.0))
    return [int(count) for count in np.diff(edges)]


def _about(model: ModelShape, pp: int) -> tuple[str, ...]:
    if pp == 1:
        return ()
    counts = " ".join(str(count) for count in stages(model, pp))
    return (f"this release splits the layers into stages of {counts}, as timed here",)


def _config(setup: Setup, engine: ExportEngine) -> str:
    layout, batch, policy, model = setup.layout, setup.batch, setup.policy, setup.model
    values = {
        "pp_engine": _ENGINES[policy.schedule],
        "tp_mode": "REDUCE_SCATTER" if policy.sequence_parallel else "ALL_REDUCE",
        "tp_linear_async": setup.overlaps_tp,
        "seq_len": batch.seq_len,
        "micro_batch": batch.micro_batch,
        "micro_batches": batch.global_batch // (layout.dp * batch.micro_batch),
        "zero": policy.zero,
        "accumulate_in_fp32": policy.precision != "fp32",
        "dtype": _DTYPES[policy.precision],
        "positions": max(batch.seq_len, model.positions.made_for or 0),
        **layout.sizes,
        **{name: getattr(model, name) for name in _SIZES},
    }
    texts = {name: _scalar(value) for name, value in values.items()}
    return filled("nanotron-config.yaml.txt", engine, texts)


def _scalar(value: object) -> str:
    """A scalar in JSON is one in YAML, but for exponents, which YAML 1.1 wants with a point."""
    number, e, power = json.dumps(value).partition("e-" if isinstance(value, float) else "\0")
    return f"{number}{'.0' if e and '.' not in number else ''}{e}{power}"
