"""Model types of Hugging Face with experts: the keys of each config.json, with their defaults.

Reader of config.json: MPT, as llm-foundry reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.codec import decode_value
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.parts import Fields, ModelType, qwen_windows, rope, sizes, windows


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


_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_ATTENTION = ("attention_bias", False)


def _routed(config: Config, fields: Fields, experts: int, top_k: int, **moe: Any) -> Fields:
    """Puts the experts into the fields of a shape; the table that says more of them."""
    fields["experts"] = config.whole("experts", *_COUNT, default=experts)
    fields["top_k"] = config.whole("top_k", *_TOP_K, default=top_k)
    fields["moe"] = moe
    if config.find("router_jitter_noise")[1]:
        config.variants.add("router-noise")
    names = ("router_aux_loss_coef", "aux_loss_alpha")
    moe["balance_weight"] = config.number("moe.balance_weight", *names, default=0.001)
    config.ignore("router_aux_loss_coef", "output_router_logits", "ep_size")
    return moe


def _same_width(config: Config, fields: Fields, *, experts: int, top_k: int) -> None:
    """Every layer has experts, as wide as the file's MLPs."""
    _routed(config, fields, experts, top_k, ffn=fields["ffn"])


def _olmoe(config: Config, fields: Fields) -> None:
    moe = _routed(config, fields, 64, 8, ffn=fields["ffn"])
    moe["normalised"] = config.flag("norm_topk_prob", default=False)


def _qwen(
    config: Config, fields: Fields, *, experts: int, top_k: int, ffn: int, shared: int
) -> None:
    width = config.whole("moe.ffn", "moe_intermediate_size", default=ffn)
    moe = _routed(config, fields, experts, top_k, ffn=width)
    moe["normalised"] = config.flag("norm_topk_prob", default=False)
    moe["every"] = config.whole("moe.every", "decoder_sparse_step", default=1)
    moe["dense_first"] = _leading(config, "mlp_only_layers")
    if shared:
        name = "shared_expert_intermediate_size"
        moe |= {"shared_ffn": config.whole("moe.shared_ffn", name, default=shared)}
        moe["shared_gate"] = True


def _leading(config: Config, name: str) -> int:
    """How many layers a list of dense ones names; only the first ones can be said."""
    _, listed = config.find(name)
    if not listed:
        return 0
    rule = "must name the first layers, or none"
    check.that(isinstance(listed, list), config.path(name), listed, rule)
    first = sorted(map(str, listed)) == sorted(map(str, range(len(listed))))
    check.that(first, config.path(name), listed, rule)
    return len(listed)


def _zero_or(config: Config, ours: str, name: str, default: int) -> int:
    """A whole number that null or 0 switches off; where the file is silent, the default."""
    config.ignore(name)
    if not config.data.get(name, default):
        return 0
    return config.whole(ours, name, default=default)


def _latent(config: Config, fields: Fields) -> None:
    config.ignore("head_dim", "qk_head_dim", "num_key_value_heads")
    config.require(True, "rope_interleave")
    fields["kv_heads"] = fields["heads"]
    del fields["head_dim"]
    fields["latent"] = {
        "q_rank": _zero_or(config, "latent.q_rank", "q_lora_rank", 1536),
        "kv_rank": config.whole("latent.kv_rank", "kv_lora_rank", default=512),
        "nope": config.whole("latent.nope", "qk_nope_head_dim", default=128),
        "rope": config.whole("latent.rope", "qk_rope_head_dim", default=64),
        "v": config.whole("latent.v", "v_head_dim", default=128),
    }


# Defaults where the file is silent: experts, top-k, an expert's width, shared experts, first dense
# layers, scale, groups and how many of them.
_V2 = {"experts": 64, "top_k": 6, "ffn": 1407, "shared": 2, "first": 0, "scale": 1.0}
_V3 = {"experts": 256, "top_k": 8, "ffn": 2048, "shared": 1, "first": 3, "scale": 2.5}
_GLM = {"experts": 128, "top_k": 8, "ffn": 1408, "shared": 1, "first": 1, "scale": 1.0}


def _deepseek(config: Config, fields: Fields, usual: dict[str, Any]) -> None:
    """Of the line that V2 began; V3 and its kin choose by sigmoid and a bias."""
    config.require(1, "moe_layer_freq")
    width = config.whole("moe.ffn", "moe_intermediate_size", default=usual["ffn"])
    moe = _routed(config, fields, usual["experts"], usual["top_k"], ffn=width)
    moe["shared_ffn"] = width * _zero_or(
        config, "moe.shared_ffn", "n_shared_experts", usual["shared"]
    )
    first = _zero_or(config, "moe.dense_first", "first_k_dense_replace", usual["first"])
    moe["dense_first"] = first
    moe["scale"] = config.number("moe.scale", "routed_scaling_factor", default=usual["scale"])
    fields["mtp"] = _zero_or(config, "mtp", "num_nextn_predict_layers", 0) or None
    moe["balance"] = "sequence" if config.flag("seq_aux", default=True) else "batch"
    if usual is _V2:
        _v2_choice(config, moe)
        return
    config.require("sigmoid", "scoring_func")
    config.require("noaux_tc", "topk_method")
    moe |= {"score": "sigmoid", "choice_bias": True, **_groups(config, "best-two", usual)}
    moe["normalised"] = config.flag("norm_topk_prob", default=True)


def _v2_choice(config: Config, moe: Fields) -> None:
    config.require("softmax", "scoring_func")
    methods = ("greedy", "group_limited_greedy")
    moe["normalised"] = config.flag("norm_topk_prob", default=False)
    groups = _groups(config, "best", _V2)
    if config.choice("greedy", methods, "topk_method") != "greedy":
        moe |= groups


def _groups(config: Config, score: str, usual: dict[str, Any]) -> Fields:
    eight = usual is _V3
    groups = config.whole("moe.groups", "n_group", default=8 if eight else 1)
    taken = config.whole("moe.group_top_k", "topk_group", default=4 if eight else 1)
    return {"groups": groups, "group_top_k": taken, "group_score": score} if groups > 1 else {}


def _with_latent(config: Config, fields: Fields, *, usual: dict[str, Any]) -> None:
    _deepseek(config, fields, usual)
    _latent(config, fields)


def _glm(config: Config, fields: Fields) -> None:
    _deepseek(config, fields, _GLM)
    fields["moe"]["balance"] = "none"


def _gpt_oss(config: Config, fields: Fields) -> None:
    _routed(config, fields, 128, 4, ffn=fields["ffn"], router_bias=True, expert_bias=True)
    config.ignore("swiglu_limit", "swiglu_alpha", "initial_context_length")


def _gpt_oss_windows(config: Config, layers: int) -> Fields:
    return windows(config, layers, default=128, local=lambda layer: layer % 2 == 0)


def _llama4(config: Config, fields: Fields) -> None:
    expert = fields["ffn"]
    fields["ffn"] = config.whole("ffn", "intermediate_size_mlp", default=16384)
    every = config.whole("moe.every", "interleave_moe_layer_step", default=1)
    name, listed = config.find("moe_layers")
    wanted = list(range(every - 1, fields["layers"], every))
    if listed is not None and listed != wanted:
        rule = f"must be every interleave_moe_layer_step={every}-th layer"
        raise UserError(rule, field=config.path(name), value=listed)
    _routed(
        config, fields, 16, 1, ffn=expert, shared_ffn=expert, every=every, score="sigmoid",
        normalised=False,
    )  # fmt: skip
    if config.flag("use_qk_norm", default=True):
        config.variants.add("unweighted-qk-norm")
    config.ignore(
        "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "layer_types",
        "attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor",
    )  # fmt: skip


_DEEPSEEK = {"family": "deepseek", "bias": (_ATTENTION, _ATTENTION, False), "kv_heads": 0}


_V3_TYPE = ModelType(**_DEEPSEEK, own=partial(_with_latent, usual=_V3))
EXPERT_TYPES: dict[str, Callable[[Config], Fields]] = {
    "deepseek_v2": ModelType(**_DEEPSEEK, own=partial(_with_latent, usual=_V2)),
    "deepseek_v3": _V3_TYPE,
    "glm4_moe": ModelType(
        family="glm", kv_heads=8, eps=1e-5, bias=(_ATTENTION, False, False), own=_glm,
        positions=partial(rope, share=0.5),
        choices=(("use_qk_norm", False, "qk_norm", "head", "none"),),
    ),
    "gpt_oss": ModelType(
        family="gpt-oss", kv_heads=8, head_dim=64, eps=1e-5, own=_gpt_oss,
        bias=(("attention_bias", True), ("attention_bias", True), False),
        windows=_gpt_oss_windows, positions=partial(rope, theta=150000.0),
        variants=("clipped-swiglu", "other-rope"), fixed={"sinks": True},
    ),
    "granitemoe": ModelType(
        family="granite-moe", bias=(_ATTENTION, _ATTENTION, False), variants=("multipliers",),
        own=partial(_same_width, experts=8, top_k=2),
    ),
    "kimi_k2": _V3_TYPE,
    "llama4_text": ModelType(
        family="llama4", kv_heads=8, head_dim=128, eps=1e-5, own=_llama4,
        bias=(_ATTENTION, _ATTENTION, False), positions=partial(rope, theta=5e5),
        variants=("chunked-attention", "interleaved-rope", "no-rope-layers", "scored-inputs"),
    ),
    "mixtral": ModelType(
        family="mixtral", kv_heads=8, eps=1e-5, windows=windows, positions=partial(rope, theta=1e6),
        own=partial(_same_width, experts=8, top_k=2),
    ),
    "olmoe": ModelType(
        family="olmoe", eps=1e-5, bias=(_ATTENTION, _ATTENTION, False), own=_olmoe,
        fixed={"qk_norm": "width"},
    ),
    "qwen2_moe": ModelType(
        family="qwen-moe", kv_heads=16, bias=(("qkv_bias", True), False, False),
        windows=qwen_windows, own=partial(_qwen, experts=60, top_k=4, ffn=1408, shared=5632),
    ),
    "qwen3_moe": ModelType(
        family="qwen-moe", kv_heads=4, bias=(_ATTENTION, _ATTENTION, False),
        windows=qwen_windows, own=partial(_qwen, experts=128, top_k=8, ffn=768, shared=0),
        fixed={"qk_norm": "head"},
    ),
}  # fmt: skip
# Types whose layers are not understood yet: by the field that says so, and what it asks for.
UNKNOWN: dict[str, tuple[str, str]] = {
    "qwen3_next": ("linear_num_value_heads", "linear attention (gated delta rule)"),
    "qwen3_5_moe_text": ("linear_num_value_heads", "linear attention (gated delta rule)"),
    "kimi_linear": ("linear_attn_config", "linear attention"),
    "nemotron_h": ("hybrid_override_pattern", "Mamba layers"),
    "jamba": ("attn_layer_period", "Mamba layers"),
    "granitemoehybrid": ("layer_types", "Mamba layers"),
    "deepseek_v32": ("index_topk", "an indexer of sparse attention"),
    "deepseek_v4": ("compress_ratios", "compressed sparse attention and several residual streams"),
    "glm_moe_dsa": ("index_topk", "an indexer of sparse attention"),
    "minimax": ("layer_types", "linear attention"),
    "minimax_m3_vl_text": ("layer_types", "sparse attention"),
}
