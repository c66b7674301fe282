"""Plain data -> TOML text (the standard library only reads TOML)."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")


def toml_text(data: dict[str, Any]) -> str:
    return "\n".join(_lines(data, ())).lstrip("\n") + "\n"


def _lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """Plain values first: in TOML whatever follows a [header] belongs to it."""
    lines = [
        f"{_key(key)} = {_value(item)}"
        for key, item in table.items()
        if item is not None and not _is_section(item)
    ]
    for key, item in table.items():
        header = ".".join(_key(part) for part in (*path, key))
        if isinstance(item, dict):
            lines += ["", f"[{header}]", *_lines(item, (*path, key))]
        elif _is_section(item):
            for entry in item:
                lines += ["", f"[[{header}]]", *_lines(entry, (*path, key))]
    return lines


def _is_section(item: object) -> bool:
    if isinstance(item, dict):
        return True
    return isinstance(item, list) and bool(item) and all(isinstance(entry, dict) for entry in item)


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _text(key)


def _text(text: str) -> str:
    """JSON's escapes are TOML's too; what steers a terminal or hides is written out as well."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isprintable() else "".join(map(_letter, quoted))


def _letter(one: str) -> str:
    if one.isprintable():
        return one
    return f"\\u{ord(one):04X}" if ord(one) < 0x10000 else f"\\U{ord(one):08X}"


def _value(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        return str(item)
    if isinstance(item, float):
        assert math.isfinite(item), "validated types hold finite numbers only"
        text = repr(item)
        return text if any(mark in text for mark in ".e") else f"{text}.0"
    if isinstance(item, str):
        return _text(item)
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(_value(entry) for entry in item)}]"
    raise TypeError(f"no TOML form for {type(item).__name__}")
