"""Settings for other engines: a chosen layout written in their words, and read back from them."""

from __future__ import annotations

import importlib
from typing import Any

from fourfold.errors import UserError
from fourfold.search.export.setup import Setup

ENGINES = ("megatron", "torchtitan", "nanotron", "torchrun")


def write(engine: str, setup: Setup) -> str:
    """The text of a settings file for the engine; what it cannot say is refused by name."""
    return _module(engine).write(setup)


def read(engine: str, text: str, *, layers: int) -> Setup:
    """The setup a settings file describes; not every file says how many layers the model has."""
    return _module(engine).read(text, layers=layers)


def _module(engine: str) -> Any:
    if engine not in ENGINES:
        raise UserError(
            "unknown engine", field="export", value=engine, way_out=f"one of {', '.join(ENGINES)}"
        )
    return importlib.import_module(f"fourfold.search.export.{engine}")
