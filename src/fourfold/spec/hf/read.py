"""What shape does a local Hugging Face config.json describe? Exact, or refused with the reason.

Absent fields take the model type's own default, except dropout, and windows where the type can do
without: those are off unless the file names them (a shape does not imply them).
"""

from __future__ import annotations

from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.hf.config import Config
from fourfold.spec.hf.refuse import refuse_experts, refuse_unknown, refuse_unmodelled
from fourfold.spec.hf.types import TYPES
from fourfold.spec.model import ModelShape


def shape_from_config(data: object, name: str = "custom") -> ModelShape:
    """The shape of a parsed config.json; `name` is what the result is called."""
    if not isinstance(data, dict):
        raise UserError(
            "is not the JSON object of a config.json", value=data, hint="check the file"
        )
    kind = data.get("model_type")
    refuse_experts(data, kind)
    config = Config(data, used={"model_type"})
    refuse_unmodelled(data, config)
    if not isinstance(kind, str) or kind not in TYPES:
        raise UserError(
            "is missing" if kind is None else "is not a supported model type",
            field="model_type",
            value=kind,
            hint=f"supported: {', '.join(sorted(TYPES))}; for any other decoder write a TOML "
            "file with the fields of 'fourfold models llama-3.1-8b --format json'",
        )
    fields = {"name": name, **TYPES[kind](config), "variants": sorted(config.variants)}
    refuse_unknown(data, config)
    try:
        return codec.decode(ModelShape, fields)
    except UserError as error:
        theirs = config.keys.get(error.field.removeprefix("positions.scaling."), error.field)
        raise UserError(error.rule, field=theirs, value=error.value, hint=error.hint) from None
