"""Reader of config.json: MPT, as llm-foundry reads it."""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.parts import sizes


def mpt(config: Config) -> dict[str, Any]:
    """As llm-foundry reads it: no_bias takes the norms' too, ALiBi replaces the table."""
    attention, size = config.table("attn_config"), sizes(config)
    no_bias = config.flag("no_bias", default=True)
    attention.ignore("attn_impl", "attn_uses_sequence_id", "attn_pdrop", "rope_impl")
    name = "sliding_window_size"
    window = decode_value(int, attention.data.get(name, -1), attention.path(name))
    attention.find(name)
    norms = ("low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm")
    norm = config.choice(norms[0], norms, "norm_type").removeprefix("low_precision_")
    config.table("ffn_config").choice("mptmlp", ("mptmlp",), "ffn_type")
    ratio = config.number("ffn", "expansion_ratio", default=4.0)
    if not 0 < ratio <= 2**20 or not (size["hidden"] * ratio).is_integer():
        raise UserError("times d_model is not a whole number", field="expansion_ratio", value=ratio)
    return {
        **size,
        **({"window": window} if window > 0 else {}),
        "family": "mpt",
        "kv_heads": _mpt_kv_heads(attention, size["heads"]),
        "ffn": int(size["hidden"] * ratio),
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
            config.variants.add("alibi-slopes")
        return {"kind": "alibi"}
    if attention.flag("rope", default=False):
        return {"kind": "rope", "theta": attention.number("theta", "rope_theta", default=10000.0)}
    if not config.flag("learned_pos_emb", default=True):
        rule = "leaves the model without positions, which is not modelled"
        hint = "set alibi, rope or learned_pos_emb"
        raise UserError(rule, field="learned_pos_emb", value=False, hint=hint)
    return {"kind": "learned", "length": config.whole("positions.length", "max_seq_len")}
