"""The verbs: a typed request in, a frozen dataclass out. Nothing is printed; events go to the
caller's `on_event`. `from fourfold import plan` finds them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """An answer as plain data: `facts` in full, `table` as rows."""

    facts: Any
    table: list[dict[str, Any]]

    def plain(self) -> Any:
        return self.facts

    def rows(self) -> list[dict[str, Any]]:
        return self.table
