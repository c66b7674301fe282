"""The verbs: a typed request in, a frozen dataclass out; events go to the caller's `on_event`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from fourfold.escape import html_table
from fourfold.spec import check, codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a verb is asked. The command line has read its flags; a program, or an agent, may write
    texts with units ('8k', '300B', '10%'), 2e12, lists, and tables in place of what they describe.
    """

    def __post_init__(self) -> None:
        hints = codec.type_hints(type(self))
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:
                continue
            read = codec.decode_value(hints[one.name], _plain(value), one.name)
            set_field(self, one.name, read)
            choices = one.metadata["flag"].choices if "flag" in one.metadata else ()
            for each in (read if isinstance(read, tuple) else (read,)) if choices else ():
                rule = f"is not one of {', '.join(choices)}"
                check.that(each in choices, one.name, each, rule)


def _plain(value: Any) -> Any:
    """Paths as texts; a number of NumPy as one of Python."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def set_field(request: Any, name: str, value: Any) -> None:
    """Of a frozen request, while it is made."""
    object.__setattr__(request, name, value)


def measured(one: Any) -> dict[str, Any]:
    """The fields of a score; what could not be scored (NaN) is None."""
    return {name: None if value != value else value for name, value in asdict(one).items()}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb returns. `plain` is its JSON, without fields that are None; `rows` are flat dicts
    in base units, one for each line of a table."""

    def plain(self) -> Any:
        return codec.encode(self)

    def rows(self) -> list[dict[str, Any]]:
        return [self.plain()]

    def _repr_html_(self) -> str:
        return html_table(self.rows())
