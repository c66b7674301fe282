"""What shape does a local Hugging Face config.json describe? Exact, or refused with the reason.

Absent fields take the model type's own default, except dropout and sliding windows: those are off
unless the file names them (a pretraining run asks for them, a shape does not imply them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fourfold.errors import UserError, nearest
from fourfold.spec import codec
from fourfold.spec.hf_config import Config, refuse_unmodelled
from fourfold.spec.hf_rope import rope
from fourfold.spec.model import ModelShape

# The forms of GELU (erf, tanh) cost the same and have no weights: one name here.
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_POSITIONS = ("max_position_embeddings", "n_positions")


def shape_from_config(data: object, name: str = "custom") -> ModelShape:
    """The shape of a parsed config.json; `name` is what the result is called."""
    if not isinstance(data, dict):
        raise UserError("a config.json must hold an object", value=data, way_out="check the file")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise UserError(
            "is missing" if kind is None else "is not a model type that is modelled",
            field="model_type",
            value=kind,
            way_out=_way_out(kind),
        )
    refuse_unmodelled(data)
    config = Config(data)
    fields = {"name": name, **_TYPES[kind](config)}
    try:
        return codec.decode(ModelShape, fields)
    except UserError as error:
        theirs = config.keys.get(error.field.removeprefix("positions.scaling."), error.field)
        raise UserError(
            error.rule, field=theirs, value=error.value, way_out=error.way_out
        ) from None


def _way_out(kind: object) -> str:
    known = f"known: {', '.join(sorted(_TYPES))}"
    close = nearest(kind, _TYPES) if isinstance(kind, str) else known
    return close if close == known else f"{close} {known}"


def _sizes(config: Config) -> dict[str, Any]:
    return {
        "layers": config.whole("layers", *_LAYERS),
        "hidden": config.whole("hidden", *_HIDDEN),
        "heads": config.whole("heads", *_HEADS),
        "vocab": config.whole("vocab", "vocab_size"),
    }


def _head_dim(config: Config) -> int | None:
    return config.whole("head_dim", "head_dim") if config.data.get("head_dim") is not None else None


def _one_bias(config: Config, attention: bool, mlp: bool) -> bool:
    """Our shapes have biases on every linear of a layer or on none."""
    attention = config.flag("attention_bias", default=attention)
    mlp = config.flag("mlp_bias", default=mlp)
    if attention != mlp:
        raise UserError(
            "biases on a part of the linears are not modelled",
            field="attention_bias" if attention else "mlp_bias",
            value=True,
            way_out="set attention_bias and mlp_bias alike",
        )
    return attention


def _llama(
    config: Config, *, kv_heads: int | None = None, norm_eps: float = 1e-6
) -> dict[str, Any]:
    """Llama and what is built like it: RMSNorm, gated SiLU, rotary positions."""
    sizes = _sizes(config)
    config.choice("silu", ("silu", "swish"), "hidden_act")
    return {
        **sizes,
        "family": "llama",
        "kv_heads": config.whole(
            "kv_heads", "num_key_value_heads", default=kv_heads or sizes["heads"]
        ),
        "ffn": config.whole("ffn", "intermediate_size"),
        "head_dim": _head_dim(config),
        "positions": rope(config),
        "norm": "rmsnorm",
        "norm_eps": config.number("norm_eps", "rms_norm_eps", default=norm_eps),
        "activation": "swiglu",
        "bias": _one_bias(config, False, False),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _mistral(config: Config) -> dict[str, Any]:
    return _llama(config, kv_heads=8)


def _phi3(config: Config) -> dict[str, Any]:
    return _llama(config, norm_eps=1e-5)


def _squared_relu(config: Config, *, norm: str, eps: str, partial: float) -> dict[str, Any]:
    sizes = _sizes(config)
    config.choice("relu2", ("relu2",), "hidden_act")
    return {
        **sizes,
        "family": "nemotron",
        "kv_heads": config.whole("kv_heads", "num_key_value_heads", default=sizes["heads"]),
        "ffn": config.whole("ffn", "intermediate_size"),
        "head_dim": _head_dim(config),
        # Rotating a part of a head changes no count, and this family is never run.
        "positions": rope(config, partial=partial, partial_ok=partial < 1),
        "norm": norm,
        "norm_eps": config.number("norm_eps", eps, default=1e-5),
        "activation": "relu2",
        "bias": _one_bias(config, False, False),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _nemotron(config: Config) -> dict[str, Any]:
    return _squared_relu(config, norm="layernorm", eps="norm_eps", partial=0.5)


def _arcee(config: Config) -> dict[str, Any]:
    return _squared_relu(config, norm="rmsnorm", eps="rms_norm_eps", partial=1.0)


def _gpt(config: Config, *, ffn_key: str = "n_inner", act: str = "activation_function") -> dict:
    """GPT-2 and kin: LayerNorm, GELU, biases everywhere."""
    sizes = _sizes(config)
    config.choice("gelu", _GELU, act)
    return {
        **sizes,
        "family": "gpt",
        "kv_heads": sizes["heads"],
        "ffn": config.whole("ffn", ffn_key, default=4 * sizes["hidden"]),
        "norm": "layernorm",
        "norm_eps": config.number(
            "norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", default=1e-5
        ),
        "activation": "gelu",
        "bias": True,
        "tied": config.flag("tie_word_embeddings", default=True),
    }


def _learned(config: Config) -> dict[str, Any]:
    return {"kind": "learned", "length": config.whole("positions.length", *_POSITIONS)}


def _gpt2(config: Config) -> dict[str, Any]:
    if not config.flag("scale_attn_weights", default=True):
        raise UserError(
            "unscaled attention is not modelled", field="scale_attn_weights", value=False
        )
    return {**_gpt(config), "positions": _learned(config)}


def _gpt_bigcode(config: Config) -> dict[str, Any]:
    one_kv_head = {"kv_heads": 1} if config.flag("multi_query", default=True) else {}
    return {**_gpt2(config), **one_kv_head}


def _gpt_neox(config: Config) -> dict[str, Any]:
    if config.flag("use_parallel_residual", default=True):
        raise UserError(
            "attention and MLP side by side are not modelled",
            field="use_parallel_residual",
            value=True,
            way_out="this type's default is true; only false can be expressed",
        )
    fields = _gpt(config, ffn_key="intermediate_size", act="hidden_act")
    return {
        **fields,
        "positions": rope(config, partial=0.25),
        "bias": _one_bias(config, True, True),
        "tied": config.flag("tie_word_embeddings", default=False),
    }


def _starcoder2(config: Config) -> dict[str, Any]:
    fields = _gpt(config, ffn_key="intermediate_size", act="hidden_act")
    return {
        **fields,
        "kv_heads": config.whole("kv_heads", "num_key_value_heads", default=2),
        "head_dim": _head_dim(config),
        "positions": rope(config),
        "bias": config.flag("use_bias", default=True),
    }


def _bloom(config: Config) -> dict[str, Any]:
    """Its MLP is 4 x hidden by construction; the type has no field for another width."""
    fields = _gpt(config)
    if fields["ffn"] != 4 * fields["hidden"]:
        raise UserError(
            "BLOOM's MLP is always 4 x hidden",
            field="n_inner",
            value=fields["ffn"],
            way_out="leave n_inner out",
        )
    return {**fields, "positions": {"kind": "alibi"}, "embedding_norm": True}


def _mpt(config: Config) -> dict[str, Any]:
    """As llm-foundry reads it: no_bias takes the norms' too, ALiBi replaces the table."""
    attention, sizes = config.table("attn_config"), _sizes(config)
    no_bias = config.flag("no_bias", default=True)
    norms = ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm")
    norm = config.choice(norms[0], norms, "norm_type").removeprefix("low_precision_")
    config.table("ffn_config").choice("mptmlp", ("mptmlp",), "ffn_type")
    ratio = config.number("ffn", "expansion_ratio", default=4.0)
    if not 0 < ratio <= 2**20 or not (sizes["hidden"] * ratio).is_integer():
        raise UserError(
            "times d_model must be a whole number", field="expansion_ratio", value=ratio
        )
    return {
        **sizes,
        "family": "mpt",
        "kv_heads": _mpt_kv_heads(attention, sizes["heads"]),
        "ffn": int(sizes["hidden"] * ratio),
        "positions": _mpt_positions(config, attention),
        "norm": "layernorm-nobias" if norm == "layernorm" and no_bias else norm,
        "norm_eps": config.number("norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-5),
        "activation": "gelu",
        "bias": not no_bias,
        "tied": config.flag("tie_word_embeddings", default=True),
    }


def _mpt_kv_heads(attention: Config, heads: int) -> int:
    kinds = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
    kind = attention.choice(kinds[0], kinds, "attn_type")
    if kind == "grouped_query_attention":
        return attention.whole("kv_heads", "kv_n_heads")
    return heads if kind == "multihead_attention" else 1


def _mpt_positions(config: Config, attention: Config) -> dict[str, Any]:
    if attention.flag("alibi", default=True):
        if attention.number("", "alibi_bias_max", default=8.0) != 8:
            raise UserError("only 8 is modelled", field="attn_config.alibi_bias_max")
        return {"kind": "alibi"}
    if attention.flag("rope", default=False):
        return {"kind": "rope", "theta": attention.number("theta", "rope_theta", default=10000.0)}
    if not config.flag("learned_pos_emb", default=True):
        raise UserError(
            "a model without positions is not modelled",
            field="learned_pos_emb",
            value=False,
            way_out="alibi, rope or learned_pos_emb must be true",
        )
    return {"kind": "learned", "length": config.whole("positions.length", "max_seq_len")}


_TYPES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "arcee": _arcee,
    "bloom": _bloom,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mpt": _mpt,
    "nemotron": _nemotron,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
}
