"""What a configuration says in an engine's own words, as columns of the reference schema: by the
log_words.toml of its folder and of `data`, where each is one to one.

What it says of the tokens and of routing, in the words by which `report` tells a training from a
benchmark (tables/derive.py).
"""

from __future__ import annotations

import re
from typing import Any

from fourfold.logs.nested import Flat, is_none, number, whole, yes
from fourfold.spec import catalog
from fourfold.spec.engine import tables_of


def _merged(*tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables in one: lists one after the other, tables in tables likewise."""
    found: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            if isinstance(value, dict):
                value = _merged(found.get(name, {}), value)
            elif isinstance(value, list):
                value = [*found.get(name, ()), *value]
            found[name] = value
    return found


WORDS = _merged(catalog.data("log_words.toml"), *tables_of("log_words.toml").values())
_COLUMNS = catalog.data("columns.toml")
COUNTS, NUMBERS = (tuple(_COLUMNS[kind].split()) for kind in ("counts", "numbers"))


def columns(part: str, said: Flat) -> Flat:
    """Those of one part of an engine that it says something of: numbers above 0 where the column
    is one, else as it is printed."""
    found = {name: _cell(name, of, said) for name, of in WORDS["columns"][part].items()}
    return {name: value for name, value in found.items() if value}


def _cell(name: str, of: Any, said: Flat) -> str:
    table = of if isinstance(of, dict) else {"of": of}
    keys, words = table.get("of", ()), table.get("words")
    for key in [keys] if isinstance(keys, str) else keys:
        text = said.get(key, "").strip()
        if words:
            text = words.get(text.lower(), "")
        elif name in COUNTS:
            text = str(max(0, whole(text) or 0) or "")
        elif name in NUMBERS:
            text = text if number(text) is not None else ""
        if text:
            return text
    return table.get("usual", "")


def renamed(part: str, said: Flat) -> Flat:
    """With today's names for those of old releases, or of an engine on top."""
    found = dict(said)
    for name, olds in WORDS["old"][part].items():
        known = [said[old] for old in (name, *olds) if not is_none(said.get(old))]
        found |= {name: known[0]} if known else {}
    return found


_NAMED = re.compile("|".join(WORDS["data"]["named"]))


def words_of(flat: Flat) -> str:
    """'random tokens, forced routing'; 'real tokens' where data are named and not replaced."""
    found = set()
    for path, value in flat.items():
        found |= {word for end, word in WORDS["on"].items() if path.endswith(end) and yes(value)}
        none = WORDS["data"]["none"].items()
        if any(path.endswith(end) and value.lower() in words for end, words in none):
            found.add("random tokens")
        elif _NAMED.fullmatch(path) and not is_none(value):
            found.add("real tokens")
    if "random tokens" in found:
        found.discard("real tokens")
    return ", ".join(sorted(found, reverse=True))
