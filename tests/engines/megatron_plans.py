"""What plans export for Megatron: questions drawn by a seed from a grid of models, GPUs, formats,
contexts and levers, six kinds in turn; and what Megatron should make of each answer."""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import fourfold
from fourfold import PlanRequest
from fourfold.errors import UserError
from fourfold.spec import catalog
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.verbs.export import Exported
from tests.engines.sampled import exports_of
from tests.specs import shape_of

OWN_13B: dict[str, Any] = {
    "of": "llama-2-13b", "name": "own-13b", "layers": 41, "kv_heads": 8, "vocab": 100_352,
}  # fmt: skip
DENSE = (
    ("llama-3.1-8b", (8, 16, 64)), ("qwen2.5-7b", (8, 32)), ("nemotron-4-15b", (16, 64)),
    ("own-13b", (16, 32)), ("llama-3.1-70b", (64, 128)), ("gpt-3-175b", (128, 256)),
    ("llama-3.1-405b", (512, 1024)),
)  # fmt: skip
EXPERTS = (
    ("glm-4.5-air", (64, 128)), ("mixtral-8x7b", (32, 64)), ("qwen3-30b-a3b", (16, 64)),
    ("qwen3-235b-a22b", (128, 256)), ("deepseek-v3", (512, 1024)),
)  # fmt: skip
UNEVEN = (
    ("own-13b", (16, 32), 4),
    ("llama-3.1-405b", (512, 1024), 16),
    ("deepseek-v3", (512,), 16),
)
KINDS = ("dense", "experts", "fp8", "long context", "uneven stages", "muon")


def _shape(name: str) -> ModelShape:
    return shape_of(OWN_13B) if name == "own-13b" else catalog.model(name)


def drawn_muon(dice: Random) -> dict[str, Any]:
    """Return a recipe of Muon, of those that Megatron has."""
    return {
        "placement": dice.choice(("owner", "blocks")),
        "scale": dice.choice(("match-rms", "original")),
        "coefficients": dice.choice(("simple", "quintic")),
        "nesterov": dice.random() < 0.5,
    }


def drawn(dice: Random, kind: str) -> PlanRequest:
    """Return a question of one kind."""
    policy: dict[str, Any] = {}
    layout, seq_len, cluster = "", dice.choice((2048, 4096, 8192)), "nvidia-h100"
    choices: tuple[tuple[Any, ...], ...] = dice.choice((DENSE, EXPERTS))
    if kind in ("dense", "long context"):
        choices = DENSE[:-1]
    elif kind == "experts":
        choices = EXPERTS
    elif kind == "uneven stages":
        choices = UNEVEN
    name, gpus, *stages = dice.choice(choices)
    has_experts = name in dict(EXPERTS)
    if kind == "fp8":
        cluster = dice.choice(("nvidia-h100", "nvidia-gb200"))
        policy["precision"] = dice.choice(("fp8", "fp8", "fp4")) if "gb" in cluster else "fp8"
        if policy["precision"] == "fp8":
            policy["scaling"] = dice.choice(
                ("tensor", "block", "delayed", *(("mx",) if "gb" in cluster else ()))
            )
    elif kind == "long context":
        seq_len = dice.choice((32768, 131072))
        policy["cp_kind"] = dice.choice(("ring", "allgather", "ulysses"))
    elif kind == "muon":
        policy |= {"optimizer": "muon", "muon": drawn_muon(dice)}
    elif stages:
        layout = f"pp{stages[0]}"
    if has_experts:
        if dice.random() < 0.5:
            policy["dispatcher"] = dice.choice(("alltoall", "deepep", "hybridep"))
        policy["overlap_exchange"] = dice.random() < 0.4
        policy["routing"] = dice.choice(("natural", "forced"))
    policy["cuda_graph"] = dice.random() < (0.8 if policy.get("scaling") == "mx" else 0.2)
    if dice.random() < 0.3:
        policy["recompute"] = dice.choice(("selective", "full", "block-1", "norm+mlp"))
    if dice.random() < 0.3 and kind != "uneven stages":
        policy["sharding"] = dice.choice(("zero0", "zero2", "zero3"))
    if dice.random() < 0.3:
        policy["grad_dtype"] = dice.choice(("bf16", "fp32"))
    world = dice.choice(gpus)
    return PlanRequest(
        model=_shape(name),
        cluster=cluster,
        gpus=world,
        seq_len=seq_len,
        global_batch=dice.choice((2, 4)) * world,
        export="megatron",
        layout=layout,
        policy=policy,
    )


@functools.cache
def exported(count: int) -> tuple[tuple[PlanRequest, Exported], ...]:
    """Return plans of all kinds with their files; questions that are refused are drawn again."""
    dice = Random("megatron plans 1")
    found: list[tuple[PlanRequest, Exported]] = []
    while len(found) < count:
        request = drawn(dice, KINDS[len(found) % len(KINDS)])
        try:
            found.append((request, fourfold.export(request)))
        except UserError:
            continue
    return tuple(found)


def case_of(request: PlanRequest, plan: Exported) -> dict[str, Any]:
    """Return what the files hand to Megatron."""
    return {
        "args": plan.files["engine.args"].splitlines(),
        "env": exports_of(plan.files["env.sh"]),
        "world": plan.choice.layout.world,
        "device": catalog.cluster(str(request.cluster)).device.id,
    }


_GRANULARITIES: dict[str, tuple[Any, ...]] = {
    "none": (None, None, None), "full": ("full", "uniform", 1), "block": ("full", "block", None),
}  # fmt: skip
_MODULES = {
    "selective": ["core_attn"], "norm+mlp": ["layernorm", "mlp"], "moe": ["moe"],
    "moe-act": ["moe_act"],
}  # fmt: skip
_RECIPES = {"tensor": "tensorwise", "delayed": "delayed", "block": "blockwise", "mx": "mxfp8"}
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
_KINDS_OF_CP = {"ring": "p2p", "allgather": "allgather", "ulysses": "a2a"}


def expected_values(request: PlanRequest, plan: Exported) -> dict[str, Any]:
    """Return what Megatron should hold of a plan, by its names."""
    layout, policy, model = plan.choice.layout, plan.choice.policy, request.model
    assert isinstance(model, ModelShape)
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": policy.virtual_stages
        if policy.virtual_stages > 1
        else None,
        "context_parallel_size": layout.cp,
        "data_parallel_size": layout.dp,
        "sequence_parallel": policy.sequence_parallel and layout.tp > 1,
        "micro_batch_size": plan.choice.micro_batch,
        "global_batch_size": request.global_batch,
        "seq_length": request.seq_len,
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_size,
        "num_experts": model.experts or None,
        "cross_entropy_fusion_impl": "native",
        "use_distributed_optimizer": policy.zero >= 1 and policy.optimizer != "muon",
        "use_megatron_fsdp": policy.zero >= 2,
        "num_distributed_optimizer_instances": layout.replicate,
        "overlap_moe_expert_parallel_comm": policy.overlap_exchange
        and policy.overlap_kind in ("auto", "combined-1f1b"),
        "params_dtype": _dtype(policy),
        "fp8": "hybrid" if policy.precision == "fp8" else None,
        "fp4": "e2m1" if policy.precision == "fp4" else None,
        **_recompute(policy),
    }
    if model.moe:
        values |= {
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
        }
    if policy.precision == "fp8":
        values["fp8_recipe"] = _RECIPES[policy.scaling_kind]
    if policy.zero >= 2:
        values["data_parallel_sharding_strategy"] = _STRATEGIES[policy.zero]
    if layout.cp > 1:
        values["cp_comm_type"] = _KINDS_OF_CP[policy.cp_kind]
    if policy.optimizer == "muon":
        values |= _muon(policy)
    if policy.cuda_graph:
        values |= {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}
    return values


def _muon(policy: Policy) -> dict[str, Any]:
    muon = policy.muon
    matched = muon.scale == "match-rms"
    return {
        "optimizer": "muon",
        "use_layer_wise_distributed_optimizer": policy.zero >= 1,
        "muon_momentum": muon.momentum,
        "muon_nesterov": muon.nesterov,
        "muon_scale_mode": "spectral" if matched else "shape_scaling",
        "muon_extra_scale_factor": 0.2 if matched else 1.0,
        "muon_num_ns_steps": 5,
        "muon_coefficient_type": muon.coefficients,
        "muon_tp_mode": {"owner": "duplicated", "blocks": "distributed"}[muon.placement],
    }


def _dtype(policy: Policy) -> str:
    return {"fp32": "float32", "fp16": "float16"}.get(policy.precision, "bfloat16")


def _recompute(policy: Policy) -> dict[str, Any]:
    kind = policy.recompute_kind
    if kind in _MODULES:
        return {"recompute_granularity": "selective", "recompute_modules": _MODULES[kind]}
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    values = dict(zip(names, _GRANULARITIES[kind], strict=True))
    return values | ({"recompute_num_layers": policy.recompute_number} if kind == "block" else {})
