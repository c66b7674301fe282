"""Settings for other engines: a chosen layout written in their words, for a named release of each.

What an engine cannot do is refused by name, so that what was priced is what will run.
"""

from __future__ import annotations

from typing import Any

from fourfold.errors import UserError
from fourfold.search.export import megatron, nanotron, torchtitan, torchtitan_02
from fourfold.search.export.setup import Package, Setup, check_setup, folder, run_file, script
from fourfold.spec.model import ModelShape

# engine -> its writer (None: our own, whose run file can hold any run), and the stack whose rules
# and habits it stands for
_WRITERS: dict[str, tuple[Any, str]] = {
    "megatron": (megatron, "megatron"),
    "torchtitan": (torchtitan, "torchtitan"),
    "torchtitan-0.2": (torchtitan_02, "torchtitan"),
    "nanotron": (nanotron, "nanotron"),
    "torchrun": (None, "fourfold"),
}
ENGINES = tuple(_WRITERS)


def stack_of(engine: str) -> str:
    """Whose engine the numbers must be for, so that they are the exported run's."""
    return _entry(engine)[1]


def check(engine: str, model: ModelShape) -> None:
    writer, _ = _entry(engine)
    if writer:
        writer.check(model)


def write(engine: str, setup: Setup) -> str:
    """One file: a run file for our own engine, else a script that brings its parts along."""
    if _entry(engine)[0] is None:
        return run_file(setup)
    return script(_package(engine, setup), setup)


def write_folder(engine: str, setup: Setup) -> dict[str, str]:
    """File name -> text: environment, launcher's and engine's arguments, and a script over them."""
    return folder(_package(engine, setup), setup)


def _package(engine: str, setup: Setup) -> Package:
    writer, _ = _entry(engine)
    writer.check(setup.model)
    check_setup(engine, setup, writer.CHOICES)
    return writer.package(setup)


def _entry(engine: str) -> tuple[Any, str]:
    if engine not in _WRITERS:
        hint = f"use one of {', '.join(ENGINES)}"
        raise UserError("unknown engine", field="export", value=engine, hint=hint)
    return _WRITERS[engine]
