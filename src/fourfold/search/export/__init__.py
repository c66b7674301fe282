"""Settings for other engines: a chosen layout written in their words, for a named release of each.

What an engine cannot do is refused by name, so that what was priced is what will run.
"""

from __future__ import annotations

import importlib
from typing import Any

from fourfold.errors import UserError
from fourfold.search.export.package import folder, script
from fourfold.search.export.setup import Setup
from fourfold.spec.model import ModelShape

# engine -> (module, stack whose rules and habits it stands for)
_WRITERS = {
    "megatron": ("megatron", "megatron"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "torchtitan-0.2": ("torchtitan_02", "torchtitan"),
    "nanotron": ("nanotron", "nanotron"),
    "torchrun": ("torchrun", "fourfold"),
}
ENGINES = tuple(_WRITERS)


def stack_of(engine: str) -> str:
    """Whose engine the numbers must be for, so that they are the exported run's."""
    return _entry(engine)[1]


def check(engine: str, model: ModelShape) -> None:
    """Refuse a model that the engine cannot express."""
    _module(engine).check(model)


def write(engine: str, setup: Setup) -> str:
    """One file: a run file for our own engine, else a script that brings its parts along."""
    if engine == "torchrun":
        return _module(engine).write(setup)
    return script(_module(engine).package(setup), setup)


def write_folder(engine: str, setup: Setup) -> dict[str, str]:
    """File name -> text: environment, launcher's and engine's arguments, and a script over them."""
    return folder(_module(engine).package(setup), setup)


def _entry(engine: str) -> tuple[str, str]:
    if engine not in _WRITERS:
        hint = f"use one of {', '.join(ENGINES)}"
        raise UserError("unknown engine", field="export", value=engine, hint=hint)
    return _WRITERS[engine]


def _module(engine: str) -> Any:
    return importlib.import_module(f"fourfold.search.export.{_entry(engine)[0]}")
