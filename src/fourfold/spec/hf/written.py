"""config.json of Hugging Face, of a model that one of its types computes: the keys that the type's
reader looks for first."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from fourfold.spec.hf.tensors import export_type
from fourfold.spec.hf.types import TYPES, ModelType
from fourfold.spec.model import OF_SCALING, ModelShape


def config_of(model: ModelShape, *, seq_len: int, dtype: str) -> dict[str, Any]:
    """`seq_len` is the longest a model without a table of positions was trained on; `dtype` is
    that of the weights, in torch's words. No token means begin; which one ends a document is the
    token file's to say."""
    kind = export_type(model)
    name = "".join(map(str.capitalize, kind.split("_")))
    own = {"gpt2": _gpt2, "mpt": _mpt}.get(kind)
    return {
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{name}ForCausalLM"],
        "model_type": kind,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **(own(model, seq_len) if own else _like_llama(kind, model, seq_len)),
    }


def _like_llama(kind: str, model: ModelShape, seq_len: int) -> dict[str, Any]:
    read, scaling = TYPES[kind], model.positions.scaling
    assert isinstance(read, ModelType)
    rope_scaling: dict[str, Any] | None = None
    if scaling is not None:
        rope_scaling = {"rope_type": scaling.kind, "factor": scaling.factor}
        for name in OF_SCALING[scaling.kind]:
            theirs = "original_max_position_embeddings" if name == "original_length" else name
            rope_scaling[theirs] = getattr(scaling, name)
        if not scaling.truncate:
            rope_scaling["truncate"] = False
    words = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": max(seq_len, model.positions.made_for or 0),
        "rope_theta": model.positions.theta,
        "rope_scaling": rope_scaling,
        "hidden_act": "silu" if read.gated else "gelu",
        read.eps_keys[0]: model.norm_eps,
    }
    has_biases = (model.biased("qkv"), model.biased("out"), model.biased("mlp"))
    for switch, has_bias in zip(read.bias, has_biases, strict=True):
        if not isinstance(switch, bool):
            words |= dict.fromkeys(switch, has_bias)
    if read.windows and kind != "llama":  # Llama's own code has no windows
        words["sliding_window"] = model.window
    if read.windows == "qwen_windows":
        words["use_sliding_window"] = False
    return words | _expert_words(kind, read, model)


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


def _expert_words(kind: str, read: ModelType, model: ModelShape) -> dict[str, Any]:
    """The part of a config.json that speaks of experts and latents."""
    moe, latent = model.moe, model.latent
    if moe is None:
        return {}
    words = {keys[0]: attrgetter(name)(model) for name, keys in read.reads.items()}
    words |= {"output_router_logits": False, **read.required, **read.writes}
    if kind == "qwen3_moe":
        words["mlp_only_layers"] = list(range(moe.dense_first))
    if latent is not None:
        words["n_shared_experts"] = moe.shared_ffn // moe.ffn
        words |= {"q_lora_rank": latent.q_rank or None, "head_dim": latent.rope}
    if kind == "deepseek_v2":
        words["topk_method"] = "group_limited_greedy" if moe.groups > 1 else "greedy"
    return words
