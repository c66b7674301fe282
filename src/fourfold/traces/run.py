"""The traced run as a RunSpec, from its settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import catalog, codec
from fourfold.spec.layout import AXES
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.traces.settings import Setting, preset_of

_NEEDED = ("hidden", "heads", "vocab", "layers", "seq_len", "micro_batch")


def run_of(settings: dict[str, Setting]) -> RunSpec | None:
    """None where the trace says too little of the model."""
    if any(name not in settings for name in _NEEDED):
        return None
    value = {name: one.value for name, one in settings.items()}
    try:
        shape = model_of(settings)
        sizes = {axis: value.get(axis, 1) for axis in AXES}
        accumulated = value.get("micro_batches", 1) * value["micro_batch"]
        table: dict[str, Any] = {
            "model": codec.encode(shape),
            "gpus": value.get("gpus", 1),
            "layout": sizes,
            "batch": {
                "seq_len": value["seq_len"] * sizes["cp"],
                "micro_batch": value["micro_batch"],
                "global_batch": accumulated * sizes["dp"],
            },
            "policy": _policy(value),
        }
        return codec.load(RunSpec, table)
    except UserError:
        return None


def _policy(value: dict[str, Any]) -> dict[str, Any]:
    precision = value.get("precision", "bf16")
    weights = value.get("weights", "fp32")
    word = precision if precision in ("fp32", "fp16") else "bf16"
    policy: dict[str, Any] = {"compile": bool(value.get("compile"))}
    if word == "bf16":
        policy["precision"] = "bf16-pure" if weights == "bf16" else "bf16-mixed"
    elif word == "fp32":
        policy["precision"] = "fp32"
    else:
        policy["precision"] = "fp16-mixed"
    if precision == "fp8":
        policy["compute_dtype"] = "fp8"
    recompute = value.get("recompute", "none")
    policy["recompute"] = recompute
    if value.get("sharding"):
        policy["sharding"] = value["sharding"]
    elif value.get("engine") in ("torchtitan", "fsdp2") and value.get("dp", 1) > 1:
        policy["sharding"] = "zero3"
    return policy


def model_of(settings: dict[str, Setting]) -> ModelShape:
    """The preset it resembles, cut to its layers; else a plain decoder of these sizes."""
    value = {name: one.value for name, one in settings.items()}
    tp = value.get("tp", 1)
    layers = value["layers"] * value.get("pp", 1)
    preset, _ = preset_of(settings)
    if preset:
        shape = catalog.model(preset)
        tied = value.get("tied", shape.tied)
        return replace(shape, layers=layers, tied=tied)
    sizes: dict[str, Any] = {
        "layers": layers,
        "hidden": value["hidden"],
        "heads": value["heads"] * tp,
        "kv_heads": value.get("kv_heads", value["heads"]) * tp,
        "head_dim": value.get("head_dim"),
        "vocab": value["vocab"] * tp,
        "ffn": value.get("ffn", 0) * tp or 4 * value["hidden"],
        "tied": bool(value.get("tied", False)),
        "name": "traced",
    }
    if value.get("experts"):
        experts = {"experts": value["experts"] * value.get("ep", 1), "top_k": value["top_k"]}
        moe = {"ffn": value.get("expert_ffn") or value["hidden"]}
        return catalog.shape("mixtral", **sizes | experts, moe=moe)
    family = "llama" if value.get("gated", True) else "gpt"
    return catalog.shape(family, **sizes)
