"""What more than a look-up reads of a config.json, by model type; MPT as llm-foundry reads it."""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.parts import (
    POSITIONS,
    Fields,
    rope,
    rotary_dims,
    sizes,
    window_fields,
    window_where,
    windows,
)


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
    rule = "leaves the model without positions, which is not modelled"
    hint = "set alibi, rope or learned_pos_emb"
    check.that(config.flag("learned_pos_emb", default=True), "learned_pos_emb", False, rule, hint)
    return {"kind": "learned", "length": config.whole("positions.length", "max_seq_len")}


def smollm3_windows(config: Config, layers: int) -> Fields:
    """Windows only in layers without rotary positions: those of a list, or every n-th."""
    name, listed = config.find("no_rope_layers")
    step = config.whole("", "no_rope_layer_interval", default=4)
    if listed is None:
        listed = [(layer + 1) % step != 0 for layer in range(min(layers, 100_000))]
    elif not isinstance(listed, list) or len(listed) != layers:
        rule = f"must be a list of {layers} values, one per layer"
        raise UserError(rule, field=name, value=listed)
    if not all(listed):
        config.variants.add("no-rope-layers")
    return windows(config, layers, local=lambda layer: not listed[layer], switched=True)


def gpt_neo_windows(config: Config, layers: int) -> Fields:
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
    return window_fields(size, window_where(kind == "local" for kind in kinds[:layers]))


def gemma2(config: Config, fields: Fields) -> None:
    if not {"final_logit_softcapping", "attn_logit_softcapping"} <= config.data.keys():
        config.variants.add("soft-caps")


def exaone4(config: Config, fields: Fields) -> None:
    if "window" in fields:  # layers that see all have no rotary positions
        config.variants.add("no-rope-layers")


def gpt2(config: Config, fields: Fields) -> None:
    if not config.flag("scale_attn_weights", default=True):
        config.variants.add("multipliers")


def gpt_bigcode(config: Config, fields: Fields) -> None:
    config.ignore("num_key_value_heads")  # newer files repeat what multi_query says
    if config.flag("multi_query", default=True):
        fields["kv_heads"] = 1
    gpt2(config, fields)


def gptj_rope(config: Config) -> Fields:
    size = sizes(config)
    config.find(*POSITIONS)
    return rope(config, share=rotary_dims(config, max(1, size["hidden"] // size["heads"]), 64))


def falcon(config: Config, fields: Fields) -> None:
    """7B: one key head and one norm; 40B: groups and two; the first ones: ALiBi and sequential."""
    newer = config.flag("new_decoder_architecture", default=False)
    one_key = config.flag("multi_query", default=True)
    parallel = config.flag("parallel_attn", default=True)
    two_norms = config.whole("", "num_ln_in_parallel_attn", default=2 if newer else 1) == 2
    block = "parallel" if two_norms or not parallel else "parallel-one-norm"
    fields["block"] = block if parallel or newer else "sequential"
    if not newer:
        fields["kv_heads"] = 1 if one_key else fields["heads"]
    if config.flag("alibi", default=False):
        fields["positions"] = {"kind": "alibi"}


def opt(config: Config, fields: Fields) -> None:
    config.require(fields["hidden"], "word_embed_proj_dim")


def bloom(config: Config, fields: Fields) -> None:
    """The type has no field for another width of the MLP."""
    if fields["ffn"] != 4 * fields["hidden"]:
        rule = "must be 4 x hidden: BLOOM's MLP always is"
        raise UserError(rule, field="n_inner", value=fields["ffn"], hint="omit n_inner")


def gpt_oss_windows(config: Config, layers: int) -> Fields:
    return windows(config, layers, default=128, local=lambda layer: layer % 2 == 0)


def first_dense(config: Config, fields: Fields) -> None:
    """A list of dense layers, of which only the first ones can be said."""
    name, listed = config.find("mlp_only_layers")
    rule = "must name the first layers, or none"
    check.that(isinstance(listed or [], list), config.path(name), listed, rule)
    first = sorted(map(str, listed or [])) == sorted(map(str, range(len(listed or []))))
    check.that(first, config.path(name), listed, rule)
    fields["moe"]["dense_first"] = len(listed or [])


def deepseek(config: Config, fields: Fields, *, shared: int, takes_best: bool = False) -> None:
    """`shared` experts where the file is silent; `takes_best`: one way to choose has no groups."""
    moe, grouped = fields["moe"], True
    moe["shared_ffn"] = moe["ffn"] * config.whole_or_0(
        "moe.shared_ffn", "n_shared_experts", default=shared
    )
    fields["mtp"] = config.whole_or_0("mtp", "num_nextn_predict_layers", default=0) or None
    if "latent" in fields:
        config.require(True, "rope_interleave")
    if takes_best:
        methods = ("greedy", "group_limited_greedy")
        grouped = config.choice("greedy", methods, "topk_method") != "greedy"
    if not grouped or moe["groups"] == 1:
        for name in ("groups", "group_top_k", "group_score"):
            del moe[name]


def llama4(config: Config, fields: Fields) -> None:
    moe = fields["moe"]
    moe["shared_ffn"] = moe["ffn"]
    fields["ffn"] = config.whole("ffn", "intermediate_size_mlp", default=16384)
    name, listed = config.find("moe_layers")
    wanted = list(range(moe["every"] - 1, fields["layers"], moe["every"]))
    if listed is not None and listed != wanted:
        rule = f"must be every interleave_moe_layer_step={moe['every']}-th layer"
        raise UserError(rule, field=config.path(name), value=listed)
    if config.flag("use_qk_norm", default=True):
        config.variants.add("unweighted-qk-norm")
