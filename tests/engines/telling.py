"""How a script in the environment of an engine answers: cases from standard input, a list out."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    named = getattr(value, "__name__", None)
    return named or (type(value).__name__ if callable(value) else str(value))


def whole(**configs: Any) -> dict[str, Any]:
    """Return every field of an engine's configurations, by the configuration's name and its own."""
    return {
        f"{name}.{one.name}": plain(getattr(config, one.name, None))
        for name, config in configs.items()
        for one in fields(config)
    }


def tell(answer: Callable[[dict[str, Any]], dict[str, Any]], standins: Iterable[str]) -> None:
    """`standins`: what is not there, and is stood in for."""
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(answer(case) | {"standins": [*standins]})
        except BaseException as error:  # torchtitan's parser exits
            answers.append({"error": f"{type(error).__name__}: {error}"[:600]})
    json.dump(answers, sys.stdout)
