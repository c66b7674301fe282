"""What in a config.json do we not model? What changes the count is refused, by name; what changes
only the function is noted as a variant of the shape.

Config files carry dozens of harmless fields: tokens, formats, initial values, generation. A field
that no reader of the model type looked at is refused if its name speaks of the shape.
"""

from __future__ import annotations

import re
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.hf.config import Config
from fourfold.spec.model import Variant

_EXPERTS = re.compile(r".*expert.*|(.*_)?moe(_.*)?")
# Types whose files may not say it in a key.
_EXPERT_TYPES = re.compile(
    r".*moe.*|mixtral|dbrx|deepseek_v[234].*|gpt_oss|llama4.*|jamba|grok.*|arctic|olmoe|nllb_moe"
)
# (pattern of the whole key, reason, way out), here and one table deep.
_REFUSED = tuple(
    (re.compile(pattern), reason, hint)
    for pattern, reason, hint in (
        (
            r"(vision|audio|image|text|speech|video|thinker|llm)_(config|tower)|mm_.*",
            "only text is modelled, not several kinds of input",
            "save the language model's own table as a config.json, with its model_type",
        ),
        (
            r"is_encoder_decoder|add_cross_attention|cross_attention.*",
            "only decoders without cross attention are modelled",
            "use a decoder-only model",
        ),
        (r"(q|kv)_lora_rank", "latent attention is not modelled", "only plain or grouped heads"),
        (
            r"num_nextn_predict_layers|num_mtp_layers|mtp_.*",
            "layers that predict further tokens are not modelled",
            "set it to 0",
        ),
        (
            r"quantization(_config)?|compression_config",
            "quantised weights are not modelled: formats are the policy's",
            "remove it and choose --precision",
        ),
        (
            r"use_bidirectional_attention|prefix_lm",
            "attention that is not causal is not modelled",
            "set it to false",
        ),
    )
)
_VARIANTS: tuple[tuple[re.Pattern[str], Variant], ...] = (
    (re.compile(r".*drop(out|path)?(_.*)?|.*_pdrop"), "dropout"),
    (re.compile(r".*soft_?cap.*"), "soft-caps"),
    (re.compile(r"clip_qkv"), "clipped-qkv"),
    (
        re.compile(
            r"logit_scale|logits_scaling|(embedding|residual|attention)_multiplier|softmax_scale"
            r"|scale_attn_by_inverse_layer_idx"
        ),
        "multipliers",
    ),
    (re.compile(r"apply_residual_connection_post_layernorm"), "residual-after-norm"),
    (re.compile(r"rope_local_base_freq"), "two-ropes"),
)
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


def refuse_experts(data: dict[str, Any], kind: object) -> None:
    """Before anything else is said of the model type: experts have one clear reason."""
    named = isinstance(kind, str) and _EXPERT_TYPES.fullmatch(kind) is not None
    field, value = "model_type", kind
    if not named:
        for table, path in _tables(data):
            for name, value in table.items():
                if value and _EXPERTS.fullmatch(name) and not _NOT_MEANT.fullmatch(name):
                    field = f"{path}{name}"
                    break
            else:
                continue
            break
        else:
            return
    raise UserError(
        "makes this a mixture of experts, which is not modelled yet",
        field=field,
        value=value,
        hint="use a dense model",
    )


def refuse_unmodelled(data: dict[str, Any], config: Config) -> None:
    """Raise for the first thing that our types cannot express; note what only the function has."""
    for table, path in _tables(data):
        for name, value in table.items():
            if not value or _NOT_MEANT.fullmatch(name):
                continue
            for pattern, reason, hint in _REFUSED:
                if pattern.fullmatch(name):
                    raise UserError(reason, field=f"{path}{name}", value=value, hint=hint)
            for pattern, variant in _VARIANTS:
                if pattern.fullmatch(name):
                    config.used.add(f"{path}{name}")
                    if value != 1 or isinstance(value, bool):
                        config.variants.add(variant)


def refuse_unknown(data: dict[str, Any], config: Config) -> None:
    """After the reader of its type: what is left over must not speak of the shape."""
    for table, path in _tables(data):
        for name, value in table.items():
            if value in (None, False, 0, "", [], {}) or f"{path}{name}" in config.used:
                continue
            if path and path.removesuffix(".") not in config.used:
                continue
            if _NOT_MEANT.fullmatch(name) or _HARMLESS.fullmatch(name):
                continue
            if any(map(_SHAPE_WORD.fullmatch, name.lower().split("_"))):
                raise UserError(
                    "is unknown for this model type and may change its shape",
                    field=f"{path}{name}",
                    value=value,
                    hint="remove it if it does not",
                )


def _tables(data: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    inner = [(value, f"{name}.") for name, value in data.items() if isinstance(value, dict)]
    return [(data, ""), *inner]
