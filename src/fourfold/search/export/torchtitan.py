"""torchtitan's --section.option flags (parallelism, training, activation checkpoint) of 2026.

Its flags are frozen and may one day go; the names are also the fields of its Python configurations.
"""

from __future__ import annotations

from fourfold.errors import UserError
from fourfold.search.export.setup import (
    Setup,
    check_plain,
    comment,
    flag_lines,
    flags_in,
    no_setting,
    number,
)
from fourfold.spec import codec
from fourfold.spec.batch import Batch
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

_SCHEDULES = {
    ("1f1b", False): "1F1B",
    ("gpipe", False): "GPipe",
    ("interleaved", True): "Interleaved1F1B",
    ("zero-bubble", True): "InterleavedZeroBubble",
}
_PARALLEL = "--parallelism."
_DEGREES = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def write(setup: Setup) -> str:
    check_plain("torchtitan", setup)
    layout, batch, policy = setup.layout, setup.batch, setup.policy
    if batch.ramp is not None:
        raise no_setting("torchtitan", "batch.ramp", batch.ramp.start, "a fixed global batch")
    degrees = {name: getattr(layout, name) for name in _DEGREES}
    if policy.zero == 0:
        degrees |= {"replicate": layout.dp, "shard": 1}
    flags: dict[str, str | None] = {"--nnodes": str(setup.hosts)}
    flags["--nproc-per-node"] = str(setup.per_host)
    flags |= {f"{_PARALLEL}{_DEGREES[name]}": str(size) for name, size in degrees.items()}
    flags |= _pipeline(setup) | _policy_flags(setup)
    local = batch.micro_batch if layout.pp == 1 else batch.global_batch // layout.dp
    flags |= {
        "--training.seq_len": str(batch.seq_len),
        "--training.local_batch_size": str(local),
        "--training.global_batch_size": str(batch.global_batch),
    }
    head = [
        comment("torchtitan", setup),
        "# the first two belong to torchrun; the model is chosen by --module and --config",
    ]
    return "\n".join([*head, *flag_lines(flags), ""])


def _pipeline(setup: Setup) -> dict[str, str | None]:
    if setup.layout.pp == 1:
        return {}
    policy = setup.policy
    key = (policy.schedule, policy.virtual_stages > 1)
    if key not in _SCHEDULES:
        raise no_setting(
            "torchtitan",
            "policy.schedule",
            f"{policy.schedule} with {policy.virtual_stages} virtual stages",
            "1f1b or gpipe with 1, interleaved or zero-bubble with more",
        )
    micros = setup.batch.global_batch // (setup.layout.dp * setup.batch.micro_batch)
    layers = dict(setup.shape)["layers"]
    chunks = setup.layout.pp * policy.virtual_stages
    each = -(-layers // chunks)
    if -(-layers // each) != chunks:
        way_out = "a number of stages that its layers_per_stage can give"
        raise no_setting("torchtitan", "layout.pp", f"{chunks} stages of {layers} layers", way_out)
    return {
        f"{_PARALLEL}pipeline_parallel_schedule": _SCHEDULES[key],
        f"{_PARALLEL}pipeline_parallel_layers_per_stage": str(each),
        f"{_PARALLEL}pipeline_parallel_first_stage_less_layers": "0",
        f"{_PARALLEL}pipeline_parallel_last_stage_less_layers": "0",
        f"{_PARALLEL}num_pp_microbatches": str(micros),
    }


def _policy_flags(setup: Setup) -> dict[str, str | None]:
    policy, layout = setup.policy, setup.layout
    flags: dict[str, str | None] = {}
    if policy.zero == 1:
        raise no_setting("torchtitan", "policy.sharding", "zero1", "zero0, zero2 or zero3")
    if policy.zero >= 2:
        reshard = "always" if policy.zero == 3 else "never"
        flags[f"{_PARALLEL}fsdp_reshard_after_forward"] = reshard
    if layout.cp > 1:
        if policy.cp_kind != "allgather":
            way_out = "cp_kind = allgather (Ulysses is chosen in its Python configuration)"
            raise no_setting("torchtitan", "policy.cp_kind", policy.cp_kind, way_out)
        flags[f"{_PARALLEL}context_parallel_rotate_method"] = "allgather"
    if layout.tp > 1 and not policy.sequence_parallel:
        flags[f"{_PARALLEL}enable_sequence_parallel"] = "False"
    if policy.recompute not in ("none", "full", "selective"):
        raise no_setting(
            "torchtitan", "policy.recompute", policy.recompute, "none, full, selective"
        )
    flags["--activation_checkpoint.mode"] = policy.recompute
    if policy.precision not in ("fp32", "bf16-mixed"):
        way_out = "bf16-mixed or fp32; low precision is a converter of its Python configuration"
        raise no_setting("torchtitan", "policy.precision", policy.precision, way_out)
    wide = {"bf16-mixed": "bfloat16", "fp32": "float32"}
    flags["--training.mixed_precision_param"] = wide[policy.precision]
    if policy.compile:
        flags["--compile.enable"] = None
    return flags


def read(text: str, *, layers: int) -> Setup:
    found = flags_in(text)
    sizes = {name: number(found, f"{_PARALLEL}{flag}", 1) for name, flag in _DEGREES.items()}
    replicated = sizes["shard"] == 1 and sizes["replicate"] > 1
    if replicated:
        sizes |= {"shard": sizes["replicate"], "replicate": 1}
    layout = Layout.from_plain(sizes)
    size = number(found, "--training.global_batch_size")
    local = number(found, "--training.local_batch_size")
    micros = number(found, f"{_PARALLEL}num_pp_microbatches", 1) if layout.pp > 1 else 1
    return Setup(
        layout=layout,
        batch=Batch(
            seq_len=number(found, "--training.seq_len"),
            micro_batch=local // micros,
            global_batch=size,
        ),
        policy=_policy(found, layout, is_plain=replicated or layout.dp == 1, layers=layers),
        host_gpus=number(found, "--nproc-per-node", 1),
        shape=(),
    )


def _policy(found: dict[str, str], layout: Layout, *, is_plain: bool, layers: int) -> Policy:
    names = {word: key for key, word in _SCHEDULES.items()}
    word = found.get(f"{_PARALLEL}pipeline_parallel_schedule", "1F1B")
    if word not in names:
        raise UserError("is a schedule fourfold does not know", field="schedule", value=word)
    schedule, _ = names[word]
    reshard = found.get(f"{_PARALLEL}fsdp_reshard_after_forward")
    sharding = "zero0" if reshard is None and is_plain else "zero3"
    each = number(found, f"{_PARALLEL}pipeline_parallel_layers_per_stage", layers)
    bf16 = found.get("--training.mixed_precision_param", "bfloat16") == "bfloat16"
    return codec.decode(
        Policy,
        {
            "precision": "bf16-mixed" if bf16 else "fp32",
            "sharding": "zero2" if reshard == "never" else sharding,
            "sequence_parallel": found.get(f"{_PARALLEL}enable_sequence_parallel") != "False",
            "cp_kind": "allgather" if layout.cp > 1 else "ring",
            "schedule": schedule,
            "virtual_stages": -(-layers // each) // layout.pp if layout.pp > 1 else 1,
            "recompute": found.get("--activation_checkpoint.mode", "selective"),
            "compile": "--compile.enable" in found,
        },
        "policy",
    )
