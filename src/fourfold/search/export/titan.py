"""What do torchtitan's releases share? Words for axes, schedules and formats, and its limits."""

from __future__ import annotations

from typing import Any

from fourfold.search.export.setup import (
    LLAMA_SHAPE,
    Setup,
    check_choice,
    check_model,
    check_policy,
    no_setting,
)
from fourfold.spec.model import ModelShape

SCHEDULES = {
    ("1f1b", False): "1F1B",
    ("gpipe", False): "GPipe",
    ("interleaved", True): "Interleaved1F1B",
    ("zero-bubble", True): "InterleavedZeroBubble",
}
OWN = "tokenizer (hf_assets_path), data, learning rate and number of steps"
# Beside products in fp8 everything else is bf16.
DTYPES = {"bf16-mixed": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
# Its Llama 3, and its Qwen 3, which has norms of queries and keys and a head size of its own.
_SHAPES = LLAMA_SHAPE | {"family": ("llama", "qwen"), "qk_norm": ("none", "head")}


def is_qwen3(model: ModelShape) -> bool:
    return model.qk_norm == "head"


def check_shape(engine: str, model: ModelShape) -> None:
    check_model(engine, model, _SHAPES)
    place = model.positions
    if place.kind != "rope":
        raise no_setting(engine, "model.positions.kind", place.kind, "rope")
    if place.scaling and (place.scaling.kind != "llama3" or is_qwen3(model)):
        hint = "none" if is_qwen3(model) else "llama3, or none"
        raise no_setting(engine, "model.positions.scaling", place.scaling.kind, hint)


def check_titan(engine: str, setup: Setup) -> None:
    policy, layout = setup.policy, setup.layout
    check_policy(engine, setup)
    if setup.batch.ramp is not None:
        raise no_setting(engine, "batch.ramp", setup.batch.ramp.start, "a fixed global batch")
    check_choice(engine, "policy.precision", policy.precision, tuple(DTYPES))
    check_choice(engine, "policy.reduce_dtype", policy.reduce_dtype, (None, "fp32"))
    check_choice(engine, "policy.attention", policy.attention, ("auto", "flash"))
    if layout.cp > 1:
        check_choice(engine, "policy.cp_kind", policy.cp_kind, ("allgather",))
    if policy.zero == 0 and layout.dp > 1 and layout.tp * layout.cp * layout.pp > 1:
        raise no_setting(engine, "policy.sharding", "zero0", "zero2 or zero3 beside another axis")
    if layout.dp > 1:
        check_choice(engine, "policy.sharding", policy.sharding, ("zero0", "zero2", "zero3"))
    if layout.pp > 1 and setup.model.tied:
        raise no_setting(engine, "model.tied", True, "pp = 1")
    if policy.async_tp and not policy.compile:
        raise no_setting(engine, "policy.async_tp", True, "compile = true, which it needs")


def parallelism(engine: str, setup: Setup) -> dict[str, Any]:
    """Fields of its parallelism section; both releases have them."""
    layout, policy = setup.layout, setup.policy
    plain = policy.zero == 0
    fields: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp if plain else layout.replicate,
        "data_parallel_shard_degree": 1 if plain else layout.shard,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if not plain:
        fields["fsdp_reshard_after_forward"] = "always" if policy.zero == 3 else "never"
    if layout.pp == 1:
        return fields
    key = (policy.schedule, policy.virtual_stages > 1)
    if key not in SCHEDULES:
        value = f"{policy.schedule} with {policy.virtual_stages} virtual stages"
        hint = "1f1b or gpipe with 1, interleaved or zero-bubble with more"
        raise no_setting(engine, "policy.schedule", value, hint)
    chunks, layers = layout.pp * policy.virtual_stages, setup.model.layers
    each = -(-layers // chunks)
    if -(-layers // each) != chunks:
        hint = "a number of stages that its layers per stage can give"
        raise no_setting(engine, "layout.pp", f"{chunks} stages of {layers} layers", hint)
    return fields | {
        "pipeline_parallel_schedule": SCHEDULES[key],
        "pipeline_parallel_layers_per_stage": each,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_microbatch_size": setup.batch.micro_batch,
    }


def training(setup: Setup) -> dict[str, Any]:
    """A pipeline takes a rank's whole share and cuts it; else micro batches are accumulated."""
    batch = setup.batch
    share = batch.global_batch // setup.layout.dp
    return {
        "seq_len": batch.seq_len,
        "local_batch_size": batch.micro_batch if setup.layout.pp == 1 else share,
        "global_batch_size": batch.global_batch,
        "dtype": "float32",
        "mixed_precision_param": DTYPES[setup.policy.precision],
        "mixed_precision_reduce": "float32",
    }


def environment(setup: Setup) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1"} | dict(setup.policy.env)
