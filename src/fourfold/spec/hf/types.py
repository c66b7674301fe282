"""Model types of Hugging Face that are read: the keys of each config.json, with their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.experts import EXPERT_TYPES, mpt
from fourfold.spec.hf.parts import (
    POSITIONS,
    Fields,
    ModelType,
    Switch,
    learned,
    local_except_every,
    no_more,
    no_windows,
    qwen_windows,
    rope,
    rotary_dims,
    sizes,
    window_fields,
    windows,
)


def _some_windows(step: int) -> Callable[[Config, int], Fields]:
    """Every `step`-th layer sees all tokens, the others a window."""
    return lambda config, layers: windows(
        config, layers, default=4096, local=local_except_every(config, step)
    )


def _smollm3_windows(config: Config, layers: int) -> Fields:
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


def _gpt_neo_windows(config: Config, layers: int) -> Fields:
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
    return window_fields(size, kinds[:layers].count("local"), layers)


def _gemma2(config: Config, fields: Fields) -> None:
    if not {"final_logit_softcapping", "attn_logit_softcapping"} <= config.data.keys():
        config.variants.add("soft-caps")


def _exaone4(config: Config, fields: Fields) -> None:
    if "window" in fields:  # layers that see all have no rotary positions
        config.variants.add("no-rope-layers")


def _gpt2(config: Config, fields: Fields) -> None:
    if not config.flag("scale_attn_weights", default=True):
        config.variants.add("multipliers")


def _gpt_bigcode(config: Config, fields: Fields) -> None:
    config.ignore("num_key_value_heads")  # newer files repeat what multi_query says
    if config.flag("multi_query", default=True):
        fields["kv_heads"] = 1
    _gpt2(config, fields)


def _gptj_rope(config: Config) -> Fields:
    size = sizes(config)
    config.find(*POSITIONS)
    return rope(config, share=rotary_dims(config, max(1, size["hidden"] // size["heads"]), 64))


def _falcon(config: Config, fields: Fields) -> None:
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


def _opt(config: Config, fields: Fields) -> None:
    config.require(fields["hidden"], "word_embed_proj_dim")


def _bloom(config: Config, fields: Fields) -> None:
    """The type has no field for another width of the MLP."""
    if fields["ffn"] != 4 * fields["hidden"]:
        rule = "must be 4 x hidden: BLOOM's MLP always is"
        raise UserError(rule, field="n_inner", value=fields["ffn"], hint="omit n_inner")


_ATTENTION: Switch = ("attention_bias", False)
_MLP: Switch = ("mlp_bias", False)
_LLAMA = ModelType(bias=(_ATTENTION, _ATTENTION, _MLP), windows=windows)
_QWEN3 = ModelType(
    family="qwen", kv_heads=32, head_dim=128, bias=(_ATTENTION, _ATTENTION, False),
    windows=qwen_windows, fixed={"qk_norm": "head"},
)  # fmt: skip
# Norms multiply by 1 + weight, embeddings are scaled by the root of their width.
_GEMMA = ModelType(
    family="gemma", kv_heads=16, head_dim=256, act_keys=("hidden_activation", "hidden_act"),
    act="gelu_pytorch_tanh", tied=True, bias=(_ATTENTION, _ATTENTION, False),
    variants=("unit-offset-norm", "multipliers"),
)  # fmt: skip
_OLMO2 = ModelType(
    family="olmo", eps=1e-5, bias=(_ATTENTION, _ATTENTION, False),
    fixed={"norms": "after", "qk_norm": "width"},
)  # fmt: skip
_GLM = ModelType(
    kv_heads=2, head_dim=128, eps=1.5625e-7, bias=(("attention_bias", True), False, False),
    positions=partial(rope, share=0.5), variants=("interleaved-rope",),
)  # fmt: skip
# Attention and MLP side by side behind one norm; logits are scaled.
_COHERE = ModelType(
    family="cohere", norm="layernorm-nobias", eps_keys=("layer_norm_eps",), eps=1e-5, tied=True,
    bias=(_ATTENTION, _ATTENTION, False), positions=partial(rope, theta=5e5),
    choices=(("use_qk_norm", False, "qk_norm", "heads", "none"),),
    variants=("multipliers", "interleaved-rope"), fixed={"block": "parallel-one-norm"},
)  # fmt: skip
# LayerNorm, GELU, biases everywhere, as many key heads as heads.
_GPT2 = ModelType(
    family="gpt", kv_keys=(), ffn_keys=("n_inner",), ffn_per_hidden=4, head_keys=(),
    norm="layernorm", eps_keys=("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"), eps=1e-5,
    act_keys=("activation_function",), act="gelu_new", gated=False, bias=(True, True, True),
    tied=True, positions=learned, own=_gpt2,
)  # fmt: skip
_GPT = replace(_GPT2, ffn_keys=("intermediate_size",), act_keys=("hidden_act",), own=no_more)
_GPTJ = replace(
    _GPT2, bias=(False, False, True), tied=False, positions=_gptj_rope, own=no_more,
    variants=("interleaved-rope",), fixed={"block": "parallel-one-norm", "head_bias": True},
)  # fmt: skip
_ARCEE = ModelType(
    family="nemotron", head_keys=("head_dim", "kv_channels"), eps=1e-5, act="relu2", gated=False,
    bias=(_ATTENTION, _ATTENTION, _MLP),
)  # fmt: skip

TYPES: dict[str, Callable[[Config], Fields]] = {
    "arcee": _ARCEE,
    "bloom": replace(
        _GPT2, positions=lambda config: {"kind": "alibi"}, own=_bloom,
        fixed={"embedding_norm": True},
    ),
    "codegen": _GPTJ,
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, positions=rope, windows=_some_windows(4),
        required=dict.fromkeys(
            ("use_gated_activation", "use_parallel_block", "use_embedding_sharing"), True
        ),
        ignored=("order_of_interleaved_layers", "position_embedding_type", "layer_switch"),
        variants=(*_COHERE.variants, "no-rope-layers"), fixed={**_COHERE.fixed, "head_dim": None},
    ),
    "ernie4_5": ModelType(
        kv_heads=2, head_dim=128, eps=1e-5, tied=True, positions=partial(rope, theta=5e5),
        bias=(("use_bias", False),) * 3, variants=("interleaved-rope",),
    ),
    "exaone4": ModelType(
        kv_heads=32, eps=1e-5, windows=_some_windows(4), own=_exaone4,
        fixed={"norms": "after", "qk_norm": "head"},
    ),
    "falcon": replace(
        _GPT2, family="falcon", kv_keys=("num_kv_heads", "n_head_kv"),
        ffn_keys=("ffn_hidden_size",), act_keys=("activation",), act="gelu",
        bias=(("bias", False),) * 3, positions=rope, own=_falcon,
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA, kv_heads=4, windows=_some_windows(2), own=_gemma2, fixed={"norms": "around"},
        ignored=("sliding_window_size",),  # repeats sliding_window
    ),
    "gemma3_text": replace(
        _GEMMA, kv_heads=4, positions=partial(rope, theta=1e6), windows=_some_windows(6),
        variants=(*_GEMMA.variants, "two-ropes"), fixed={"norms": "around", "qk_norm": "head"},
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, fixed={"norms": "around"}),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, own=_gpt_bigcode),
    # Scores are not divided by the root of the head size.
    "gpt_neo": replace(
        _GPT, act_keys=("activation_function",), bias=(False, True, True),
        windows=_gpt_neo_windows, variants=("multipliers",),
    ),
    "gpt_neox": replace(
        _GPT, act="gelu", tied=False, positions=partial(rope, share=0.25),
        bias=(("attention_bias", True), ("attention_bias", True), True),
        choices=(("use_parallel_residual", True, "block", "parallel", "sequential"),),
    ),
    "gptj": _GPTJ,
    "granite": replace(_LLAMA, windows=no_windows),
    "llama": _LLAMA,
    "mistral": ModelType(kv_heads=8, windows=windows),
    "mpt": mpt,
    # Norms multiply by 1 + weight.
    "nemotron": replace(
        _ARCEE, norm="layernorm", eps_keys=("norm_eps",), positions=partial(rope, share=0.5),
        variants=("unit-offset-norm",),
    ),
    "olmo": ModelType(
        family="olmo", norm="layernorm-noweight", eps_keys=("layer_norm_eps",), eps=1e-5,
        bias=(_ATTENTION, _ATTENTION, False),
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2, positions=partial(rope, theta=5e5), windows=_some_windows(4),
        variants=("two-ropes",),
    ),
    # The table of positions has two rows more than the file says.
    "opt": replace(
        _GPT2, ffn_keys=("ffn_dim",), act="relu", bias=(("enable_bias", True),) * 3, own=_opt,
        required={
            "do_layer_norm_before": True, "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        },
        positions=partial(learned, default=2048, more=2),
    ),
    "phi": replace(
        _GPT, kv_keys=("num_key_value_heads",), ffn_keys=("intermediate_size", "n_inner"),
        head_keys=("head_dim",), tied=False, positions=partial(rope, share=0.5),
        choices=(("qk_layernorm", False, "qk_norm", "head", "none"),),
        fixed={"block": "parallel-one-norm", "head_bias": True},
    ),
    "phi3": ModelType(
        eps=1e-5, windows=windows, ignored=("full_attn_mod", "interpolation_factor")
    ),
    "qwen2": replace(_QWEN3, head_dim=None, bias=(True, False, False), fixed={}),
    "qwen3": _QWEN3,
    "seed_oss": ModelType(
        kv_heads=8, head_dim=128,
        bias=(("attention_bias", True), ("attention_out_bias", False), _MLP),
    ),
    "smollm3": replace(
        _LLAMA, kv_heads=4, tied=True, positions=partial(rope, theta=2e6), windows=_smollm3_windows
    ),
    "stablelm": ModelType(
        norm="layernorm", eps_keys=("layer_norm_eps",), eps=1e-5, kv_heads=32,
        bias=(("use_qkv_bias", False), False, False), positions=partial(rope, share=0.25),
        choices=(
            ("qk_layernorm", False, "qk_norm", "heads", "none"),
            ("use_parallel_residual", False, "block", "parallel-one-norm", "sequential"),
        ),
        fixed={"head_dim": None},
    ),
    "starcoder2": replace(
        _GPT, kv_keys=("num_key_value_heads",), kv_heads=2, head_keys=("head_dim",),
        act="gelu_pytorch_tanh", bias=(("use_bias", True),) * 3, positions=rope, windows=windows,
        eps_keys=("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps"),
        required={"mlp_type": "default", "norm_type": "layer_norm"},
    ),
    **EXPERT_TYPES,
}  # fmt: skip
