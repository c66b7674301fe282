"""Model shapes from config.json of Hugging Face: exactly, or refused with the reason.

Absent fields take the model type's own default, except dropout, and windows where the type can do
without. Of unknown fields only those whose name speaks of the shape are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check, codec
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.experts import EXPERT_TYPES, UNKNOWN
from fourfold.spec.hf.types import TYPES
from fourfold.spec.model import ModelShape, Variant

_EXPERTS = re.compile(r".*expert.*|(.*_)?moe(_.*)?")
# What files of several kinds of input leave to transformers' own defaults.
_LEFT_OUT: dict[str, dict[str, int]] = {
    "gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8},
}
# Of types with experts: what their readers look at themselves. How a release stores its weights
# changes no shape, and formats are the policy's.
_READ_WITH_EXPERTS = re.compile(r"(q|kv)_lora_rank|num_nextn_predict_layers|quantization_config")
# Pattern of the whole key -> reason, hint; at the top and one table deep.
_REFUSED = {
    r"(vision|audio|image|text|speech|video|thinker|llm)_(config|tower)|mm_.*":
        ("only text is modelled, not several kinds of input",
         "save the language model's own table as a config.json, with its model_type"),
    r"is_encoder_decoder|add_cross_attention|cross_attention.*":
        ("only decoders without cross attention are modelled", "use a decoder-only model"),
    r"(q|kv)_lora_rank": ("latent attention is not modelled", "only plain or grouped heads"),
    r"num_nextn_predict_layers|num_mtp_layers|mtp_.*":
        ("multi-token prediction is not modelled", "set it to 0"),
    r"quantization(_config)?|compression_config":
        ("quantised weights are not modelled: formats are the policy's",
         "remove it and choose --precision"),
    r"use_bidirectional_attention|prefix_lm":
        ("attention that is not causal is not modelled", "set it to false"),
}  # fmt: skip
_VARIANTS: dict[str, Variant] = {
    r".*drop(out|path)?(_.*)?|.*_pdrop": "dropout",
    r".*soft_?cap.*": "soft-caps",
    r"clip_qkv": "clipped-qkv",
    r"logit_scale|logits_scaling|(embedding|residual|attention)_multiplier|softmax_scale"
    r"|scale_attn_by_inverse_layer_idx": "multipliers",
    r"apply_residual_connection_post_layernorm": "residual-after-norm",
    r"rope_local_base_freq": "two-ropes",
}
# Dropout of heads that pretraining does not have (GPT-2's summary head, classifiers); names of
# kernels that experts or dropout would use.
_NOT_MEANT = re.compile(
    r"summary_.*|classifier_.*|experts_implementation|.*_fusion|output_router_logits|router_.*"
    r"|use_sliding_window|max_window_layers"
)
# Words in the name of a field that may change sizes or the number of tensors.
_SHAPE_WORD = re.compile(
    r"sizes?|dims?|widths?|layers?|heads?|rank|ratio|expansion|experts?|moe|(layer|rms)?norms?|ln"
    r"|bias(es)?|proj(ection)?|depth|groups?|hidden|ffn|intermediate|inner|embd|embed(dings?)?"
    r"|lora|adapters?|conv|kernel|mamba|ssm|state|mtp|nextn|kv|qk|query|key|value|mlp|gated?|glu"
    r"|vocab|positions|attn|attention|cross|latent|blocks?|channels|window|sparse|parallel|residual"
    r"|n|num|tower|memory|shared"
)
_HARMLESS = re.compile(
    r"_.*|.*_token_ids?|.*_ids?|.*token.*|init_.*|initializer_.*|.*_(std|range|init|dtype|device)"
    r"|.*eps(ilon)?|(max_)?(position_embeddings|sequence_length|seq_len(gth)?|length)"
    r"|max_position_embeddings|original_max_position_embeddings|n_positions|n_ctx|model_max_length"
    r"|seq_length|(text_)?max_.*(len|length)|.*_in_fp32|.*_in_32bit|.*upcast.*|pretraining_tp"
    r"|tensor_parallel.*|num_(beams|beam_groups|return_sequences|labels|logits_to_keep)"
    r"|chunk_size_feed_forward|(encoder_)?no_repeat_ngram_size|skip_bias_add(_qkv)?|slow_but_exact"
    r"|.*act(ivation)?|activation_.*|act_fn|scale_attn_weights|embedding_fraction|pad_key_length"
    r"|offset_alibi|.*(flash|sdpa|implementation|fused|fusion|cache).*|id2label|label2id|auto_map"
    r"|task_specific_params|pruned_heads|tie_encoder_decoder|tf_.*|torch.*|use_bfloat16"
    r"|layer_norm_implementation|query_pre_attn_scalar|.*_multiple_of|gradient_checkpointing.*"
)


def _keys(data: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(path of its table, name, value) of every key, at the top and one table deep."""
    inner = [(f"{name}.", value) for name, value in data.items() if isinstance(value, dict)]
    for path, table in (("", data), *inner):
        yield from ((path, name, value) for name, value in table.items())


def _refuse_experts(data: dict[str, Any], kind: object) -> None:
    """Before anything else is said of the model type: experts where the type has none, and types
    whose layers are not understood."""
    if isinstance(kind, str) and kind in UNKNOWN:
        field, asked = UNKNOWN[kind]
        given = data.get(field)
        rule, hint = f"asks for {asked}, which is not modelled", f"model_type {kind} is not read"
        if given is None:
            field, given, rule = "model_type", kind, f"has {asked}, which is not modelled"
        raise UserError(rule, field=field, value=given, hint=hint)
    is_without = isinstance(kind, str) and kind in TYPES and kind not in EXPERT_TYPES
    for path, name, value in _keys(data) if is_without else ():
        if value and _EXPERTS.fullmatch(name) and not _NOT_MEANT.fullmatch(name):
            rule = "gives experts to a model type that is read without them"
            hint = f"types with experts: {', '.join(sorted(EXPERT_TYPES))}"
            raise UserError(rule, field=f"{path}{name}", value=value, hint=hint)


def _refuse_unmodelled(data: dict[str, Any], config: Config) -> None:
    """Refuse what changes the count, note as a variant what changes only the function."""
    kind = data.get("model_type")
    has_experts = isinstance(kind, str) and kind in EXPERT_TYPES
    for path, name, value in _keys(data):
        if not value or _NOT_MEANT.fullmatch(name):
            continue
        if has_experts and _READ_WITH_EXPERTS.fullmatch(name):
            continue
        for pattern, (reason, hint) in _REFUSED.items():
            check.that(not re.fullmatch(pattern, name), f"{path}{name}", value, reason, hint)
        for pattern, variant in _VARIANTS.items():
            if re.fullmatch(pattern, name):
                config.used.add(f"{path}{name}")
                if value != 1 or isinstance(value, bool):
                    config.variants.add(variant)


def _refuse_unknown(data: dict[str, Any], config: Config) -> None:
    """Refuse what the reader of its type did not look at, if its name speaks of the shape."""
    for path, name, value in _keys(data):
        if value in (None, False, 0, "", [], {}) or f"{path}{name}" in config.used:
            continue
        if path and path.removesuffix(".") not in config.used:
            continue
        if name == "quantization_config" and data["model_type"] in EXPERT_TYPES:
            continue
        if _NOT_MEANT.fullmatch(name) or _HARMLESS.fullmatch(name):
            continue
        if any(map(_SHAPE_WORD.fullmatch, name.lower().split("_"))):
            rule = "is unknown for this model type and may change its shape"
            hint = "remove it if it does not"
            raise UserError(rule, field=f"{path}{name}", value=value, hint=hint)


def shape_from_config(data: object, name: str = "custom") -> ModelShape:
    """The shape of a parsed config.json; `name` is what the result is called."""
    if not isinstance(data, dict):
        rule = "is not the JSON object of a config.json"
        raise UserError(rule, value=data, hint="check the file")
    if isinstance(data.get("text_config"), dict):
        data, name = _language_model(data), f"{name}-text"
    kind = data.get("model_type")
    _refuse_experts(data, kind)
    config = Config(data, used={"model_type"})
    _refuse_unmodelled(data, config)
    if not isinstance(kind, str) or kind not in TYPES:
        rule = "is missing" if kind is None else "is not a supported model type"
        hint = (
            f"supported: {', '.join(sorted(TYPES))}; for any other decoder write a file with a "
            "family and sizes, as 'fourfold models llama-3.1-8b --format json' prints them"
        )
        raise UserError(rule, field="model_type", value=kind, hint=hint)
    fields = {"name": name, **TYPES[kind](config), "variants": sorted(config.variants)}
    _refuse_unknown(data, config)
    try:
        return codec.decode(ModelShape, fields)
    except UserError as error:
        theirs = config.keys.get(error.field.removeprefix("positions.scaling."), error.field)
        raise UserError(error.rule, field=theirs, value=error.value, hint=error.hint) from None


def _language_model(data: dict[str, Any]) -> dict[str, Any]:
    """Of a model that also sees or hears: the table of its decoder, which is what is modelled."""
    inner = data["text_config"]
    ties = {name: data[name] for name in ("tie_word_embeddings",) if name in data}
    return ties | _LEFT_OUT.get(str(inner.get("model_type")), {}) | inner
