"""nanotron's YAML, whole: its Config class takes the file as it is. Of 0.4, the newest release."""

from __future__ import annotations

import json

import numpy as np

from fourfold.cost.count.stages import passing_unit
from fourfold.cost.step.pipeline import passing_edges
from fourfold.search.export.package import MARK, Package
from fourfold.search.export.setup import (
    LLAMA_SHAPE,
    Setup,
    check_choice,
    check_model,
    check_policy,
    no_setting,
)
from fourfold.spec.model import ModelShape

RELEASE = "nanotron 0.4"
_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
_DTYPES = {"bf16-mixed": "bfloat16", "fp16": "float16", "fp32": "float32"}
_THETA = 10000.0  # built in


def check(model: ModelShape) -> None:
    check_model("nanotron", model, LLAMA_SHAPE)
    place = model.positions
    if place.kind != "rope":
        raise no_setting("nanotron", "model.positions.kind", place.kind, "rope")
    if place.theta != _THETA or place.scaling is not None:
        value = f"theta {place.theta:g}" + (", scaled" if place.scaling else "")
        hint = "rope with theta 10000 and no scaling, as in Llama 2 (release 0.4)"
        raise no_setting("nanotron", "model.positions", value, hint)
    if model.head_size * model.heads != model.hidden:
        raise no_setting("nanotron", "model.head_dim", model.head_dim, "hidden / heads")


def package(setup: Setup) -> Package:
    check(setup.model)
    check_policy("nanotron", setup)
    policy, layout = setup.policy, setup.layout
    check_choice("nanotron", "policy.schedule", policy.schedule, tuple(_ENGINES))
    check_choice("nanotron", "policy.precision", policy.precision, tuple(_DTYPES))
    check_choice("nanotron", "policy.sharding", policy.sharding, ("zero0", "zero1"))
    check_choice("nanotron", "policy.recompute", policy.recompute, ("none",))
    check_choice("nanotron", "policy.attention", policy.attention, ("auto", "flash"))
    check_choice("nanotron", "policy.compile", policy.compile, (False,))
    check_choice("nanotron", "policy.reduce_dtype", policy.reduce_dtype, (None, "fp32"))
    check_choice("nanotron", "layout.cp", layout.cp, (1,))
    if layout.replicate > 1:
        raise no_setting("nanotron", "layout.dp", str(layout), "plain dp")
    if setup.batch.ramp is not None:
        raise no_setting("nanotron", "batch.ramp", setup.batch.ramp.start, "a fixed global batch")
    own = "data, tokenizer, optimizer's numbers, train_steps and checkpoints, all in config.yaml"
    return Package(
        engine="nanotron",
        release=RELEASE,
        entry='"${RUN_TRAIN:-run_train.py}" --config-file "$here/config.yaml"',
        env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"} | dict(policy.env),
        files={"config.yaml": _yaml(_config(setup))},
        own=own,
        about=_about(setup.model, layout.pp),
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


def _config(setup: Setup) -> dict[str, object]:
    layout, batch, policy, model = setup.layout, setup.batch, setup.policy, setup.model
    return {
        "general": {"project": "fourfold", "run": "run", "seed": 42},
        "parallelism": {
            "dp": layout.dp,
            "pp": layout.pp,
            "tp": layout.tp,
            "expert_parallel_size": 1,
            "pp_engine": _ENGINES[policy.schedule],
            "tp_mode": "REDUCE_SCATTER" if policy.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": setup.overlaps_tp,
        },
        "tokens": {
            "sequence_length": batch.seq_len,
            "train_steps": 100,
            "micro_batch_size": batch.micro_batch,
            "batch_accumulation_per_replica": setup.micro_batches,
        },
        "optimizer": {
            "zero_stage": policy.zero,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "accumulate_grad_in_fp32": policy.precision != "fp32",
            "adam_eps": 1.0e-8,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "torch_adam_is_fused": True,
            "learning_rate_scheduler": {
                "learning_rate": 3.0e-4,
                "lr_warmup_steps": 10,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "min_decay_lr": 3.0e-5,
            },
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "data": {"dataset": None, "seed": 42, "num_loading_workers": 1},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"log_level": "info", "iteration_step_info_interval": 1},
        "model": {
            "dtype": _DTYPES[policy.precision],
            "make_vocab_size_divisible_by": 1,
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "hidden_act": "silu",
                "hidden_size": model.hidden,
                "intermediate_size": model.ffn,
                "max_position_embeddings": max(batch.seq_len, model.positions.length or 0),
                "num_attention_heads": model.heads,
                "num_hidden_layers": model.layers,
                "num_key_value_heads": model.kv_heads,
                "rms_norm_eps": model.norm_eps,
                "tie_word_embeddings": model.tied,
                "vocab_size": model.vocab,
            },
        },
    }


def _yaml(config: dict[str, object]) -> str:
    """Nested tables as block YAML; a scalar in JSON is a scalar in YAML, but for exponents, which
    YAML 1.1 wants with a point."""
    lines = [f"{MARK} nanotron, for {RELEASE}"]

    def put(table: dict[str, object], depth: int) -> None:
        for name, value in table.items():
            indent = "  " * depth
            if isinstance(value, dict):
                lines.append(f"{indent}{name}:")
                put(value, depth + 1)
            elif isinstance(value, float):
                number, e, power = repr(value).partition("e")
                point = ".0" if e and "." not in number else ""
                lines.append(f"{indent}{name}: {number}{point}{e}{power}")
            else:
                lines.append(f"{indent}{name}: {json.dumps(value)}")

    put(config, 0)
    return "\n".join([*lines, ""])
