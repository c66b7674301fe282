"""Writes the config.json of a shape, in transformers' words: the inverse of read.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def _llama(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        **_rotary(model, seq_len),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.biased("qkv"),
        "mlp_bias": model.biased("mlp"),
    }


def _without(names: tuple[str, ...], **more: Any) -> Callable[[ModelShape, int], dict[str, Any]]:
    """Llama's words but for those that a type does not have, and its own."""

    def made(model: ModelShape, seq_len: int) -> dict[str, Any]:
        shared = {k: v for k, v in _llama(model, seq_len).items() if k not in names}
        own = {name: value(model) if callable(value) else value for name, value in more.items()}
        return shared | own

    return made


def _starcoder2(model: ModelShape, seq_len: int) -> dict[str, Any]:
    return {
        **_rotary(model, seq_len),
        "hidden_act": "gelu",
        "norm_epsilon": model.norm_eps,
        "use_bias": model.biased("mlp"),
        "sliding_window": None,
    }


def _rotary(model: ModelShape, seq_len: int) -> dict[str, Any]:
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
        "max_position_embeddings": seq_len,
        "rope_theta": model.positions.theta,
        "rope_scaling": rope_scaling,
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
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "mpt": ("MptForCausalLM", _mpt),
    "starcoder2": ("Starcoder2ForCausalLM", _starcoder2),
}
