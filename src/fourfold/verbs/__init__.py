"""The verbs: a typed request in, a frozen dataclass out; events go to the caller's `on_event`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.escape import html_table
from fourfold.spec import codec


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
