"""The verbs: a typed request in, a frozen dataclass out; events go to the caller's `on_event`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, ClassVar

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


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a verb: its fields are its JSON, without those that are None (a field that
    stands there in another way has a `codec.JsonForm`).

    The rows of its table are those under the key `TABLE` of that JSON, as flat dicts in base units;
    without one the answer is a single row. `SHARED` are keys that every row begins with, or
    'column=key'; `NAMES` is the column of the names of a table that is a dict. The JSON of a `LIST`
    is its table alone.
    """

    TABLE: ClassVar[str] = ""
    SHARED: ClassVar[tuple[str, ...]] = ()
    NAMES: ClassVar[str] = ""
    LIST: ClassVar[bool] = False

    def plain(self) -> Any:
        plain = codec.encode(self)
        return plain[self.TABLE] if self.LIST else plain

    def rows(self) -> list[dict[str, Any]]:
        if not self.TABLE:
            return [self.plain()]
        plain = codec.encode(self)
        table = plain[self.TABLE]
        if isinstance(table, dict):
            table = [{self.NAMES: name, **row} for name, row in table.items()]
        pairs = [(text.partition("=")[0], text.rpartition("=")[2]) for text in self.SHARED]
        shared = {column: plain[key] for column, key in pairs if key in plain}
        return [shared | row for row in table]

    def _repr_html_(self) -> str:
        return html_table(self.rows())
