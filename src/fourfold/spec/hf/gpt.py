"""Readers of config.json: GPT-2 and what is built like it, with an MLP of two matrices."""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.llama import Reader
from fourfold.spec.hf.parts import (
    POSITIONS,
    activation,
    biases,
    head_dim,
    kv_heads,
    rope,
    rotary_dims,
    sizes,
    windows,
)

_EPS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")


def _gpt(
    config: Config,
    *,
    ffn: tuple[str, ...] = ("n_inner",),
    act: tuple[str, str] = ("activation_function", "gelu_new"),
    tied: bool = True,
    family: str = "gpt",
) -> dict[str, Any]:
    """LayerNorm, GELU, biases everywhere, as many key heads as heads."""
    size = sizes(config)
    return {
        **size,
        "family": family,
        "kv_heads": size["heads"],
        "ffn": config.whole("ffn", *ffn, default=4 * size["hidden"]),
        "norm": "layernorm",
        "norm_eps": config.number("norm_eps", *_EPS, default=1e-5),
        "activation": activation(config, act[1], act[0]),
        "bias": True,
        "tied": config.flag("tie_word_embeddings", default=tied),
    }


def _learned(config: Config) -> dict[str, Any]:
    return {"kind": "learned", "length": config.whole("positions.length", *POSITIONS)}


def _gpt2(config: Config) -> dict[str, Any]:
    if not config.flag("scale_attn_weights", default=True):
        config.variants.add("multipliers")
    return {**_gpt(config), "positions": _learned(config)}


def _gpt_bigcode(config: Config) -> dict[str, Any]:
    config.ignore("num_key_value_heads")  # newer files repeat what multi_query says
    one_kv_head = {"kv_heads": 1} if config.flag("multi_query", default=True) else {}
    return {**_gpt2(config), **one_kv_head}


def _gptj(config: Config) -> dict[str, Any]:
    """One norm, attention without biases beside an MLP with; the head has a bias."""
    config.variants.add("interleaved-rope")
    fields = _gpt(config, tied=False)
    config.find(*POSITIONS)
    turned = rotary_dims(config, max(1, fields["hidden"] // fields["heads"]), 64)
    return {
        **fields,
        **biases(qkv=False, out=False, mlp=True),
        "positions": rope(config, partial=turned),
        "block": "parallel-one-norm",
        "head_bias": True,
    }


def _gpt_neo(config: Config) -> dict[str, Any]:
    fields = _gpt(config, ffn=("intermediate_size",))
    config.variants.add("multipliers")  # its scores are not divided by the root of the head size
    return {
        **fields,
        **biases(qkv=False, out=True, mlp=True),
        **_gpt_neo_windows(config, fields["layers"]),
        "positions": _learned(config),
    }


def _gpt_neo_windows(config: Config, layers: int) -> dict[str, Any]:
    """attention_types: [[["global", "local"], 12]], repeated kinds of layers."""
    name, groups = config.find("attention_types")
    config.find("attention_layers")
    size = config.whole("window", "window_size", default=256)
    kinds: list[object] = []
    try:
        for pattern, times in groups or [[["global", "local"], -(-layers // 2)]]:
            kinds += list(pattern) * min(int(times), layers)
    except (TypeError, ValueError):
        raise UserError("must be a list of [kinds, times]", field=name, value=groups) from None
    if len(kinds) < layers or any(kind not in ("global", "local") for kind in kinds):
        raise UserError(f"must mark {layers} layers as global or local", field=name, value=groups)
    local = kinds[:layers].count("local")
    if not local:
        return {}
    return {"window": size} | ({} if local == layers else {"local_layers": local})


def _gpt_neox(config: Config) -> dict[str, Any]:
    fields = _gpt(config, ffn=("intermediate_size",), act=("hidden_act", "gelu"), tied=False)
    attention = config.flag("attention_bias", default=True)
    parallel = config.flag("use_parallel_residual", default=True)
    return {
        **fields,
        **biases(qkv=attention, out=attention, mlp=True),
        "positions": rope(config, partial=0.25),
        "block": "parallel" if parallel else "sequential",
    }


def _phi(config: Config) -> dict[str, Any]:
    """Phi-1, 1.5 and 2: one norm, attention and MLP side by side, a bias in the head."""
    fields = _gpt(config, ffn=("intermediate_size", "n_inner"), act=("hidden_act", "gelu_new"),
                  tied=False)  # fmt: skip
    return {
        **fields,
        "kv_heads": kv_heads(config, fields["heads"]),
        "head_dim": head_dim(config),
        "positions": rope(config, partial=0.5),
        "qk_norm": "head" if config.flag("qk_layernorm", default=False) else "none",
        "block": "parallel-one-norm",
        "head_bias": True,
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    fields = _gpt(config, ffn=("intermediate_size",), act=("hidden_act", "gelu_pytorch_tanh"))
    config.require("default", "mlp_type")
    config.require("layer_norm", "norm_type")
    return {
        **fields,
        **windows(config, fields["layers"]),
        "kv_heads": kv_heads(config, 2),
        "head_dim": head_dim(config),
        "positions": rope(config),
        "bias": config.flag("use_bias", default=True),
    }


def _falcon(config: Config) -> dict[str, Any]:
    """7B: one key head and one norm; 40B: groups and two; the first ones: ALiBi and one after the
    other."""
    fields = _gpt(config, ffn=("ffn_hidden_size",), act=("activation", "gelu"), family="falcon")
    newer = config.flag("new_decoder_architecture", default=False)
    one_key = config.flag("multi_query", default=True)
    side_by_side = config.flag("parallel_attn", default=True)
    two = config.whole("", "num_ln_in_parallel_attn", default=2 if newer else 1) == 2
    groups = config.whole("kv_heads", "num_kv_heads", "n_head_kv", default=fields["heads"])
    every_linear = config.flag("bias", default=False)
    alibi = config.flag("alibi", default=False)
    positions = rope(config)
    block = "parallel" if two or not side_by_side else "parallel-one-norm"
    return {
        **fields,
        **biases(qkv=every_linear, out=every_linear, mlp=every_linear),
        "kv_heads": groups if newer else 1 if one_key else fields["heads"],
        "positions": {"kind": "alibi"} if alibi else positions,
        "block": block if side_by_side or newer else "sequential",
    }


def _opt(config: Config) -> dict[str, Any]:
    """Its table of positions has two rows more than the file says."""
    fields = _gpt(config, ffn=("ffn_dim",), act=("activation_function", "relu"))
    config.require(True, "do_layer_norm_before", "layer_norm_elementwise_affine")
    config.require(False, "_remove_final_layer_norm")
    config.require(fields["hidden"], "word_embed_proj_dim")
    length = config.whole("positions.length", *POSITIONS, default=2048)
    every_linear = config.flag("enable_bias", default=True)
    return {
        **fields,
        **biases(qkv=every_linear, out=every_linear, mlp=every_linear),
        "positions": {"kind": "learned", "length": length + 2},
    }


def _squared_relu(config: Config, *, norm: str, eps: str, partial: float) -> dict[str, Any]:
    size = sizes(config)
    attention = config.flag("attention_bias", default=False)
    mlp = config.flag("mlp_bias", default=False)
    return {
        **size,
        **biases(qkv=attention, out=attention, mlp=mlp),
        "family": "nemotron",
        "kv_heads": kv_heads(config, size["heads"]),
        "ffn": config.whole("ffn", "intermediate_size"),
        "head_dim": head_dim(config, also="kv_channels"),
        "positions": rope(config, partial=partial),
        "norm": norm,
        "norm_eps": config.number("norm_eps", eps, default=1e-5),
        "activation": activation(config, "relu2", "hidden_act"),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _nemotron(config: Config) -> dict[str, Any]:
    """Its norms multiply by 1 + weight."""
    config.variants.add("unit-offset-norm")
    return _squared_relu(config, norm="layernorm", eps="norm_eps", partial=0.5)


def _arcee(config: Config) -> dict[str, Any]:
    return _squared_relu(config, norm="rmsnorm", eps="rms_norm_eps", partial=1.0)


def _bloom(config: Config) -> dict[str, Any]:
    """Its MLP is 4 x hidden by construction; the type has no field for another width."""
    fields = _gpt(config)
    if fields["ffn"] != 4 * fields["hidden"]:
        raise UserError(
            "must be 4 x hidden: BLOOM's MLP always is",
            field="n_inner",
            value=fields["ffn"],
            hint="omit n_inner",
        )
    return {**fields, "positions": {"kind": "alibi"}, "embedding_norm": True}


TYPES: dict[str, Reader] = {
    "arcee": _arcee,
    "bloom": _bloom,
    "codegen": _gptj,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "nemotron": _nemotron,
    "opt": _opt,
    "phi": _phi,
    "starcoder2": _starcoder2,
}
