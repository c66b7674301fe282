"""Types of Hugging Face with experts that are also written: names of their tensors, what they
compute, and the words of their config.json."""

from __future__ import annotations

from typing import Any

from fourfold.spec.experts import Latent, Moe
from fourfold.spec.model import ModelShape

_LAYER = "model.layers.{}."


def _named(where: str, gate: str, up: str, down: str) -> dict[str, str]:
    """`{}` a second time is the expert."""
    base = f"{_LAYER}{where}"
    return {
        "mlp.router": f"{base}.gate",
        "mlp.experts.gate": f"{base}.experts.{{}}.{gate}",
        "mlp.experts.up": f"{base}.experts.{{}}.{up}",
        "mlp.experts.down": f"{base}.experts.{{}}.{down}",
    }


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MLP = _named("mlp", *_PROJECTIONS)
_SHARED = {
    f"mlp.shared.{ours}": f"{_LAYER}mlp.shared_experts.{theirs}"
    for ours, theirs in zip(("gate", "up", "down"), _PROJECTIONS, strict=True)
}
_LATENT = {
    "attention.q_down": f"{_LAYER}self_attn.q_a_proj",
    "attention.q_norm": f"{_LAYER}self_attn.q_a_layernorm",
    "attention.kv_down": f"{_LAYER}self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": f"{_LAYER}self_attn.kv_a_layernorm",
    "attention.kv": f"{_LAYER}self_attn.kv_b_proj",
}
# Beside the names of Llama's dense layers; those of queries with a latent are said apart.
EXPERT_MODULES: dict[str, dict[str, str]] = {
    "mixtral": _named("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _MLP,
    "olmoe": _MLP,
    "deepseek_v2": _MLP | _SHARED | _LATENT,
    "deepseek_v3": _MLP | _SHARED | _LATENT,
}
Q_FROM_LATENT = f"{_LAYER}self_attn.q_b_proj"

_ROUTED: dict[str, object] = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
    "attention biases alike": True, "experts": "yes", "shared experts": "none", "every": 1,
    "dense first": 0, "router": "softmax", "drops": "none",
}  # fmt: skip
_DEEPSEEK: dict[str, object] = {
    **_ROUTED, "latent": "yes", "shared experts": "some", "dense first": "any", "qkv bias": False,
}  # fmt: skip
EXPERTS_COMPUTED: dict[str, dict[str, object]] = {
    "mixtral": {**_ROUTED, "qkv bias": False, "normalised": True, "experts as wide as ffn": True},
    "qwen3_moe": {**_ROUTED, "qk_norm": "head", "heads divide hidden": True, "normalised": "any"},
    "olmoe": {
        **_ROUTED, "qk_norm": "width", "normalised": "any", "experts as wide as ffn": True,
    },
    "deepseek_v2": {**_DEEPSEEK, "normalised": False, "router": "softmax, groups by their best"},
    "deepseek_v3": {**_DEEPSEEK, "normalised": "any", "router": "sigmoid and bias"},
}  # fmt: skip


def expert_facts(model: ModelShape) -> dict[str, object]:
    """What a type must be able to say of experts and latent attention."""
    moe = model.moe
    facts: dict[str, object] = {
        "experts": "yes" if moe else "none", "latent": "yes" if model.latent else "none",
    }  # fmt: skip
    if moe is None:
        return facts
    return facts | {
        "shared experts": _shared(model, moe),
        "every": moe.every,
        "dense first": moe.dense_first,
        "normalised": moe.normalised,
        "drops": "some" if moe.capacity else "none",
        "router": _router(moe),
        "experts as wide as ffn": moe.ffn == model.ffn,
    }


def _shared(model: ModelShape, moe: Moe) -> str:
    if not moe.shared_ffn:
        return "none"
    return "some" if moe.shared_ffn % moe.ffn == 0 and not moe.shared_gate else "odd"


def _router(moe: Moe) -> str:
    grouped = moe.groups > 1
    if moe.score == "softmax" and not moe.choice_bias:
        if not grouped:
            return "softmax" if moe.scale == 1 else "softmax, scaled"
        return "softmax, groups by their best" if moe.group_score == "best" else "other"
    two = not grouped or moe.group_score == "best-two"
    return "sigmoid and bias" if moe.choice_bias and two and moe.score == "sigmoid" else "other"


def same(fact: str, have: object, want: object) -> bool:
    """Of a router, softmax without groups is a case of softmax with them."""
    if want == "any" or have == want:
        return True
    groups = "softmax, groups by their best"
    return fact == "router" and want == groups and have in ("softmax", "softmax, scaled")


def expert_words(kind: str, model: ModelShape) -> dict[str, Any]:
    """The part of a config.json that speaks of experts and latents."""
    moe = model.moe
    assert moe is not None
    count = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts"}
    words: dict[str, Any] = {
        count.get(kind, "n_routed_experts"): model.experts,
        "num_experts_per_tok": model.top_k,
        "router_aux_loss_coef": moe.balance_weight,
        "output_router_logits": False,
    }
    if kind != "mixtral":
        words["norm_topk_prob"] = moe.normalised
    if kind == "mixtral":
        words["sliding_window"] = None
    if kind == "qwen3_moe":
        words |= {
            "moe_intermediate_size": moe.ffn, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "use_sliding_window": False, "sliding_window": None,
        }  # fmt: skip
    if model.latent is not None:
        words |= _deepseek_words(kind, model, moe, model.latent)
    return words


def _deepseek_words(kind: str, model: ModelShape, moe: Moe, latent: Latent) -> dict[str, Any]:
    v3 = kind == "deepseek_v3"
    grouped = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return {
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "first_k_dense_replace": moe.dense_first,
        "moe_layer_freq": 1,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.group_top_k,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if v3 else grouped,
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope,
        "qk_rope_head_dim": latent.rope,
        "v_head_dim": latent.v,
        "head_dim": latent.rope,
        **({"rope_interleave": True, "num_nextn_predict_layers": 0} if v3 else {}),
    }
