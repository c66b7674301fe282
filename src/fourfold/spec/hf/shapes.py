"""Model shapes from config.json of Hugging Face: exactly, or refused with the reason.

Absent fields take the model type's own default, except dropout, and windows where the type can do
without. Of unknown fields only those whose name speaks of the shape are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check, codec, texts
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.types import TYPES, UNKNOWN, WITH_EXPERTS
from fourfold.spec.model import ModelShape, Variant

_EXPERTS = re.compile(r".*expert.*|(.*_)?moe(_.*)?")
# What files of several kinds of input leave to transformers' own defaults.
_LEFT_OUT: dict[str, dict[str, int]] = {
    "gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8},
}
# Of types with experts: what their readers look at themselves. How a release stores its weights
# changes no shape, and formats are the policy's.
_READ_WITH_EXPERTS = re.compile(r"(q|kv)_lora_rank|num_nextn_predict_layers|quantization_config")


def _any(patterns: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


_DECODERS: dict[str, str] = texts.data("hf_types.toml")["decoders"]
_OTHER_INPUT = re.compile(r"(vision|audio)_config")
_KEYS = texts.data("hf_types.toml")["keys"]
_NOT_MEANT, _SHAPE_WORD, _HARMLESS = (
    _any(_KEYS[name]) for name in ("not_meant", "of_shape", "harmless")
)
_REFUSED = [(_any(one["names"]), one["rule"], one["hint"]) for one in _KEYS["refused"]]
_VARIANTS: list[tuple[re.Pattern[str], Variant]] = [
    (_any(patterns), variant) for variant, patterns in _KEYS["variants"].items()
]


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
    is_without = isinstance(kind, str) and kind in TYPES and kind not in WITH_EXPERTS
    for path, name, value in _keys(data) if is_without else ():
        if value and _EXPERTS.fullmatch(name) and not _NOT_MEANT.fullmatch(name):
            rule = "gives experts to a model type that is read without them"
            hint = f"types with experts: {', '.join(sorted(WITH_EXPERTS))}"
            raise UserError(rule, field=f"{path}{name}", value=value, hint=hint)


def _refuse_unmodelled(data: dict[str, Any], config: Config) -> None:
    """Refuse what changes the count, note as a variant what changes only the function."""
    kind = data.get("model_type")
    has_experts = isinstance(kind, str) and kind in WITH_EXPERTS
    for path, name, value in _keys(data):
        if not value or _NOT_MEANT.fullmatch(name):
            continue
        if has_experts and _READ_WITH_EXPERTS.fullmatch(name):
            continue
        for pattern, reason, hint in _REFUSED:
            check.that(not pattern.fullmatch(name), f"{path}{name}", value, reason, hint)
        for pattern, variant in _VARIANTS:
            if pattern.fullmatch(name):
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
        if name == "quantization_config" and data["model_type"] in WITH_EXPERTS:
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
    if isinstance(data.get("text_config"), dict) or str(data.get("model_type")) in _DECODERS:
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
    """Return the decoder's fields of a model that also sees or hears: a table of their own, or what
    stands beside the tables of other inputs."""
    inner = data.get("text_config", data)
    ties = {name: data[name] for name in ("tie_word_embeddings",) if name in data}
    kind = str(inner.get("model_type"))
    fields = ties | _LEFT_OUT.get(kind, {}) | inner
    if kind not in _DECODERS:
        return fields
    scaling = fields.get("rope_scaling")
    # Sections of a head turn by time, height and width, which are one position in text.
    is_plain = isinstance(scaling, dict) and "mrope_section" in scaling
    left_out = {name for name in fields if _OTHER_INPUT.fullmatch(name)}
    left_out |= {"rope_scaling"} if is_plain else set()
    fields = {name: value for name, value in fields.items() if name not in left_out}
    return fields | {"model_type": _DECODERS[kind]}
