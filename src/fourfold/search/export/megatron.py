"""Megatron-LM's command line: names as in its arguments.py of 2026; dp is what the world leaves."""

from __future__ import annotations

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
from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.layout import Layout
from fourfold.spec.policy import Policy

_CP = {"ring": "p2p", "allgather": "allgather", "ulysses": "a2a"}
_SIZES = {
    "layers": "--num-layers",
    "hidden": "--hidden-size",
    "ffn": "--ffn-hidden-size",
    "heads": "--num-attention-heads",
    "kv_heads": "--num-query-groups",
}
_SHARDING = {"zero2": "optim_grads", "zero3": "optim_grads_params"}


def write(setup: Setup) -> str:
    check_plain("megatron", setup)
    flags: dict[str, str | None] = {
        "--nnodes": str(setup.hosts),
        "--nproc-per-node": str(setup.per_host),
    }
    flags |= {_SIZES[name]: str(size) for name, size in setup.shape}
    if dict(setup.shape).get("kv_heads") != dict(setup.shape).get("heads"):
        flags["--group-query-attention"] = None
    flags |= _axes(setup) | _batch(setup.batch) | _precision(setup.policy)
    flags |= _recompute(setup.policy)
    head = [comment("megatron", setup), "# the first two belong to torchrun, the rest to Megatron"]
    return "\n".join([*head, *flag_lines(flags), ""])


def _axes(setup: Setup) -> dict[str, str | None]:
    layout, policy = setup.layout, setup.policy
    flags: dict[str, str | None] = {
        "--tensor-model-parallel-size": str(layout.tp),
        "--context-parallel-size": str(layout.cp),
        "--pipeline-model-parallel-size": str(layout.pp),
    }
    if policy.schedule not in ("1f1b", "interleaved"):
        raise no_setting("megatron", "policy.schedule", policy.schedule, "1f1b or interleaved")
    if layout.cp > 1:
        flags["--cp-comm-type"] = _CP[policy.cp_kind]
    if policy.virtual_stages > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = str(policy.virtual_stages)
    if policy.sequence_parallel and layout.tp > 1:
        flags["--sequence-parallel"] = None
    if policy.zero >= 2:
        flags |= {"--use-megatron-fsdp": None}
        flags["--data-parallel-sharding-strategy"] = _SHARDING[policy.sharding]
    if policy.zero >= 1:
        flags["--use-distributed-optimizer"] = None
        if layout.replicate > 1:
            flags["--num-distributed-optimizer-instances"] = str(layout.replicate)
    if policy.zero >= 1 and policy.overlap_grad_reduce:
        flags["--overlap-grad-reduce"] = None
        if policy.overlap_param_gather:
            flags["--overlap-param-gather"] = None
    return flags


def _batch(batch: Batch) -> dict[str, str | None]:
    flags: dict[str, str | None] = {
        "--seq-length": str(batch.seq_len),
        "--max-position-embeddings": str(batch.seq_len),
        "--micro-batch-size": str(batch.micro_batch),
        "--global-batch-size": str(batch.global_batch),
    }
    if batch.ramp:
        flags["--rampup-batch-size"] = (
            f"{batch.ramp.start} {batch.ramp.increment} {batch.ramp.samples}"
        )
    return flags


def _precision(policy: Policy) -> dict[str, str | None]:
    known: dict[str, dict[str, str | None]] = {
        "fp32": {},
        "bf16-mixed": {"--bf16": None},
        "fp16": {"--fp16": None},
        "fp8": {"--bf16": None, "--fp8-format": "hybrid"},
        "fp4": {"--bf16": None, "--fp4-format": "e2m1"},
    }
    if policy.precision not in known:
        raise no_setting("megatron", "policy.precision", policy.precision, "bf16-mixed")
    return known[policy.precision]


def _recompute(policy: Policy) -> dict[str, str | None]:
    if policy.recompute == "none":
        return {}
    if policy.recompute == "selective":
        return {"--recompute-granularity": "selective"}
    if policy.recompute != "full":
        way_out = "full, selective or none (its 'block' method counts layers of a stage)"
        raise no_setting("megatron", "policy.recompute", policy.recompute, way_out)
    return {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": "1",
    }


def read(text: str, *, layers: int) -> Setup:
    assert layers > 0
    found = flags_in(text)
    world = number(found, "--nnodes", 1) * number(found, "--nproc-per-node", 1)
    sizes = {
        "tp": number(found, "--tensor-model-parallel-size", 1),
        "cp": number(found, "--context-parallel-size", 1),
        "pp": number(found, "--pipeline-model-parallel-size", 1),
    }
    dp = max(1, world // (sizes["tp"] * sizes["cp"] * sizes["pp"]))
    copies = number(found, "--num-distributed-optimizer-instances", 1)
    ramp = [int(word) for word in found.get("--rampup-batch-size", "").split()]
    return Setup(
        layout=Layout.from_plain({**sizes, "replicate": copies, "shard": dp // copies}),
        batch=Batch(
            seq_len=number(found, "--seq-length"),
            micro_batch=number(found, "--micro-batch-size"),
            global_batch=number(found, "--global-batch-size"),
            ramp=Ramp(start=ramp[0], increment=ramp[1], samples=ramp[2]) if ramp else None,
        ),
        policy=_policy(found),
        host_gpus=number(found, "--nproc-per-node", 1),
        shape=tuple((name, number(found, flag)) for name, flag in _SIZES.items() if flag in found),
    )


def _policy(found: dict[str, str]) -> Policy:
    precision = "fp16" if "--fp16" in found else "bf16-mixed" if "--bf16" in found else "fp32"
    precision = "fp8" if "--fp8-format" in found else precision
    precision = "fp4" if "--fp4-format" in found else precision
    virtual = number(found, "--num-virtual-stages-per-pipeline-rank", 1)
    sharding = "zero1" if "--use-distributed-optimizer" in found else "zero0"
    strategy = found.get("--data-parallel-sharding-strategy", "")
    sharding = {word: name for name, word in _SHARDING.items()}.get(strategy, sharding)
    kinds = {word: name for name, word in _CP.items()}
    comm = found.get("--cp-comm-type", "p2p")
    return codec.decode(
        Policy,
        {
            "precision": precision,
            "sharding": sharding,
            "sequence_parallel": "--sequence-parallel" in found,
            "cp_kind": kinds.get(comm, comm),
            "schedule": "interleaved" if virtual > 1 else "1f1b",
            "virtual_stages": virtual,
            "recompute": found.get("--recompute-granularity", "none"),
            "overlap_grad_reduce": "--overlap-grad-reduce" in found,
            "overlap_param_gather": "--overlap-param-gather" in found,
        },
        "policy",
    )
