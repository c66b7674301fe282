"""config.json of Hugging Face, of a model that one of its types computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.spec.experts import Latent, Moe
from fourfold.spec.hf.tensors import export_type
from fourfold.spec.model import ModelShape


def config_of(model: ModelShape, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """`seq_len` is the longest a model without a table of positions was trained on; `dtype` is
    that of the weights, in torch's words. No token means begin; which one ends a document is the
    token file's to say."""
    kind = export_type(model)
    architecture, made = _MAKERS[kind]
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **made(model, seq_len),
    }


def _without(names: tuple[str, ...], **more: Any) -> Callable[[ModelShape, int], dict[str, Any]]:
    """Llama's words but for those that a type does not have, and its own."""

    def made(model: ModelShape, seq_len: int) -> dict[str, Any]:
        shared = {k: v for k, v in _llama(model, seq_len).items() if k not in names}
        own = {name: value(model) if callable(value) else value for name, value in more.items()}
        return shared | own

    return made


def _llama(model: ModelShape, seq_len: int) -> dict[str, Any]:
    scaling = model.positions.scaling
    rope_scaling: dict[str, Any] | None = None
    if scaling is not None:
        rope_scaling = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope_scaling |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
    return {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": max(seq_len, model.positions.made_for or 0),
        "rope_theta": model.positions.theta,
        "rope_scaling": rope_scaling,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.biased("qkv"),
        "mlp_bias": model.biased("mlp"),
    }


def _gpt2(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        "n_embd": model.hidden,
        "n_inner": model.ffn,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.positions.length or seq_len,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu",
        # Its own defaults are 0.1.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _mpt(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        "d_model": model.hidden,
        "n_layers": model.layers,
        "n_heads": model.heads,
        "expansion_ratio": model.ffn // model.hidden,
        "max_seq_len": seq_len,
        "layer_norm_epsilon": model.norm_eps,
        "no_bias": True,
        "learned_pos_emb": False,
        "norm_type": "low_precision_layernorm",
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"},
    }


def _routed(kind: str) -> Callable[[ModelShape, int], dict[str, Any]]:
    plain = ("mlp_bias",) if kind != "mixtral" else ("mlp_bias", "attention_bias")
    shared = _without(plain)
    return lambda model, seq_len: shared(model, seq_len) | expert_words(kind, model)


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
_MAKERS: dict[str, tuple[str, Callable[[ModelShape, int], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mistral": (
        "MistralForCausalLM",
        _without(("attention_bias", "mlp_bias"), sliding_window=lambda model: model.window),
    ),
    "qwen2": ("Qwen2ForCausalLM", _without(("attention_bias", "mlp_bias"), **_NO_WINDOW)),
    "qwen3": ("Qwen3ForCausalLM", _without(("mlp_bias",), **_NO_WINDOW)),
    "olmo2": ("Olmo2ForCausalLM", _without(("mlp_bias",))),
    "mixtral": ("MixtralForCausalLM", _routed("mixtral")),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _routed("qwen3_moe")),
    "olmoe": ("OlmoeForCausalLM", _routed("olmoe")),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _routed("deepseek_v2")),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _routed("deepseek_v3")),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "mpt": ("MptForCausalLM", _mpt),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        _without(
            ("rms_norm_eps", "attention_bias", "mlp_bias"), hidden_act="gelu", sliding_window=None,
            norm_epsilon=lambda model: model.norm_eps, use_bias=lambda model: model.biased("mlp"),
        ),
    ),
}  # fmt: skip


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
