"""What the Hugging Face libraries read: accelerate's configuration with its `parallelism_config`,
and DeepSpeed's JSON. The model and the loop are the user's script, which torchrun starts."""

from __future__ import annotations

import json
from typing import Any

from fourfold.search.export.setup import Package, Setup, filled
from fourfold.spec.engine import Engine
from fourfold.spec.model import ModelShape

CHOICES = {
    "policy.attention": ("auto",),
    "policy.compile": (False,),
    "policy.sequence_parallel": (False,),
    "policy.reduce_dtype": (None,),
    "policy.routing": ("natural",),
}
_MIXED = {"fp32": "no", "bf16-mixed": "bf16", "fp16": "fp16"}
_ROTATES = {"ring": "alltoall", "allgather": "allgather"}
_ENTRY = '"${TRAIN:?set TRAIN: your training script}"'
_BUCKET = 500_000_000  # elements that DeepSpeed sends at once: its default


def check(model: ModelShape, engine: Engine) -> None:
    """Any model that transformers has."""


def package(setup: Setup, engine: Engine) -> Package:
    return _accelerate(setup, engine) if engine.name == "accelerate" else _deepspeed(setup, engine)


def _steps(setup: Setup) -> int:
    return setup.batch.global_batch // (setup.layout.dp * setup.batch.micro_batch)


def _own(setup: Setup) -> str:
    """What a configuration has no place for."""
    recompute = ", gradient checkpointing" if setup.policy.recompute == "full" else ""
    return (
        f"in TRAIN: the model, data of {setup.batch.seq_len} tokens, micro batch "
        f"{setup.batch.micro_batch}, gradients of {_steps(setup)} accumulated{recompute}"
    )


def _accelerate(setup: Setup, engine: Engine) -> Package:
    layout, zero = setup.layout, setup.policy.zero
    values = {
        "distributed_type": "FSDP" if zero else "MULTI_GPU",
        "mixed_precision": _MIXED[setup.policy.precision],
        "hosts": setup.hosts,
        "world": layout.world,
        "reshard": json.dumps(zero == 3),
        "checkpointing": json.dumps(setup.policy.recompute == "full"),
        "replicate": layout.replicate if zero else 1,
        "shard": layout.shard if zero else 1,
        "tp": layout.tp,
        "cp": layout.cp,
        "cp_strategy": _ROTATES[setup.policy.cp_kind if layout.cp > 1 else "ring"],
    }
    return Package(
        engine=engine,
        entry=_ENTRY,
        env=_variables(values) | setup.env,
        files={"accelerate.yaml": filled("accelerate.yaml.txt", engine, values)},
        own=_own(setup),
    )


def _variables(values: dict[str, Any]) -> dict[str, str]:
    """What `accelerate launch` would set."""
    plain = {"ACCELERATE_MIXED_PRECISION": values["mixed_precision"]}
    if values["distributed_type"] != "FSDP":
        return plain
    axes = {"DP_REPLICATE": "replicate", "DP_SHARD": "shard", "TP": "tp", "CP": "cp"}
    strategy = {"PARALLELISM_CONFIG_CP_COMM_STRATEGY": values["cp_strategy"]}
    return {
        **plain,
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": values["reshard"],
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_ACTIVATION_CHECKPOINTING": values["checkpointing"],
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{name}_SIZE": str(values[axis]) for name, axis in axes.items()},
        **(strategy if values["cp"] > 1 else {}),
    }


def _deepspeed(setup: Setup, engine: Engine) -> Package:
    layout, policy = setup.layout, setup.policy
    config: dict[str, Any] = {
        "train_batch_size": setup.batch.global_batch,
        "train_micro_batch_size_per_gpu": setup.batch.micro_batch,
        "gradient_accumulation_steps": _steps(setup),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": policy.zero},
    }
    if policy.precision != "fp32":
        config["bf16" if policy.precision == "bf16-mixed" else "fp16"] = {"enabled": True}
    if policy.zero:
        config["zero_optimization"] |= {
            "overlap_comm": policy.overlap_grad_reduce,
            "contiguous_gradients": True,
            "reduce_bucket_size": _BUCKET,
        }
    if layout.cp > 1:
        config |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
    return Package(
        engine=engine,
        entry=f'{_ENTRY} --deepspeed "$here/ds_config.json"',
        env=setup.env,
        files={"ds_config.json": json.dumps(config, indent=2) + "\n"},
        own=_own(setup),
    )
