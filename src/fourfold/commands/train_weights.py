"""'train --weights DIR': what a Hugging Face folder says before any of its weights is read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.commands.weights import must_have_safetensors
from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.hf.tensors import MODULES, approximation


def begin_from(table: dict[str, Any], settings: dict[str, Any]) -> None:
    """Complete a training's tables where it begins from a folder: the model is the folder's unless
    another is named, and the path holds wherever the ranks work."""
    if not settings.get("weights"):
        return
    folder = Path(settings["weights"]).absolute()
    settings["weights"] = str(folder)
    must_have_safetensors("train --weights")
    config = codec.parse_json(files.read_text(folder / "config.json", field="weights"))
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in MODULES:
        raise UserError(
            f"weights of type '{kind}' are not read",
            field="weights",
            value=str(folder),
            hint=f"read are {', '.join(MODULES)}",
        )
    assert isinstance(config, dict)
    said = approximation(kind, config)
    if said:
        print(f"note: {said}", file=sys.stderr)
    table.setdefault("model", str(folder / "config.json"))
