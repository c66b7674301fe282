"""Configurations that engines print -> one flat table: 'parallelism.tp' -> '8'.

JSON, Python's dicts and dataclasses (also pretty-printed), block YAML, and Megatron's list of
arguments with dots. Values stay texts. Nothing is evaluated; what does not fit is passed over.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fourfold.units import plain_float

Flat = dict[str, str]
OFFLOADED, ADAPTERS = "states or activations on the host", "adapters"
# Far beyond any printed configuration: a log must not fill the memory.
MOST_ENTRIES, _MOST_CHARS, _MOST_DEPTH, _MOST_LINE = 20_000, 4_000, 64, 200_000
_MOST_KEY, _MOST_PATH = 120, 500
_TOKEN = re.compile(
    r"\s+|(?P<string>[bBrRuUfF]{0,2}(?:\"(?:[^\"\\]|\\.){0,1000}\"?|'(?:[^'\\]|\\.){0,1000}'?))"
    r"|(?P<enum><[^<>\n]{0,200}>)|(?P<open>[\[({])|(?P<close>[\])}])|(?P<comma>,)|(?P<colon>[:=])"
    r"|(?P<word>[^\s\[\](){},:=\"'<>]+)|(?P<other>.)"
)
_ARGUMENT = re.compile(r"(?:^|[\s:\]])([A-Za-z_]\w{0,120}) \.+ ?(.*)$")
# GPT-NeoX writes behind a value whether it was given: '8..........updated'.
_ORIGINS = ("updated", "default")
_YAML = re.compile(r"( *)((?:- )*)([\w./-]{1,120}|'[^']{1,120}'|\"[^\"]{1,120}\"):(?: (.*))?$")
_YAML_ITEM = re.compile(r"( *)- (.*)$")


class Nested:
    """A bracketed text, taken line by line; `is_done` once its first bracket is closed."""

    def __init__(self) -> None:
        self.flat: Flat = {}
        self.is_done = False
        self._path: list[str] = []
        self._index: list[int] = []
        self._key = self._value = ""
        self._has_key = False

    def feed(self, text: str) -> None:
        if self.is_done:
            return
        for token in _TOKEN.finditer(text[:_MOST_LINE]):
            kind = token.lastgroup
            if kind == "open":
                self._open()
            elif kind == "close":
                self._store()
                self._close()
                self.is_done = self.is_done or not self._index
            elif not self._index:
                continue  # what stands before the first bracket
            elif kind == "comma":
                self._store()
                self._index[-1] += 1
            elif kind == "colon":
                if self._has_key:
                    self._value += token.group()  # 'a: b: c', a time or an address
                else:
                    self._key, self._value, self._has_key = self._value[:_MOST_KEY], "", True
            elif kind is not None:
                self._value = (self._value + _plain(token.group(), kind))[:_MOST_CHARS]
            if self.is_done:
                return

    def _open(self) -> None:
        # A name right before a bracket is a class; the field it is the value of names the path.
        if self._index:
            own = self._key if self._has_key else str(self._index[-1])
            self._path.append(own)
        self._index.append(0)
        self._key, self._value, self._has_key = "", "", False
        if len(self._index) > _MOST_DEPTH:
            self.is_done = True

    def _close(self) -> None:
        if self._index:
            self._index.pop()
        if self._path and len(self._path) >= len(self._index) and self._index:
            self._path.pop()
        self._key, self._value, self._has_key = "", "", False

    def _store(self) -> None:
        key = self._key if self._has_key else str(self._index[-1]) if self._index else ""
        if self._has_key or self._value:
            _keep(self.flat, ".".join([*self._path, key]).lower(), self._value)
            self.is_done = len(self.flat) >= MOST_ENTRIES
        self._key, self._value, self._has_key = "", "", False


def _keep(flat: Flat, path: str, value: str) -> None:
    if len(path) <= _MOST_PATH and len(flat) < MOST_ENTRIES:
        flat[path] = value


def _plain(text: str, kind: str) -> str:
    if kind == "string":
        return text.lstrip("bBrRuUfF")[1:-1]
    if kind == "enum":  # <TensorParallelLinearMode.REDUCE_SCATTER: 2>
        return text[1:-1].partition(":")[0].rpartition(".")[2]
    return text


def bracketed(text: str) -> Flat:
    nested = Nested()
    nested.feed(text)
    return nested.flat


def argument(text: str) -> tuple[str, str] | None:
    """Name and value of a line of Megatron's list: '  micro_batch_size ....... 1'."""
    found = _ARGUMENT.search(text[:_MOST_CHARS])
    return (found.group(1), _value(found.group(2).strip())) if found else None


def _value(text: str) -> str:
    """Without its origin, which stands behind dots or right behind a bracket."""
    rest = text[: -len(_ORIGINS[0])] if text.endswith(_ORIGINS) else ""
    bare = rest.rstrip(".")
    return bare if len(rest) - len(bare) > 1 or rest.endswith(("]", ")", "}")) else text


class Yaml:
    """Block YAML line by line: nested tables, and lists of plain words under their key. Not all of
    YAML: anchors, tags and texts over several lines are passed over."""

    def __init__(self) -> None:
        self.flat: Flat = {}
        self._levels: list[tuple[int, str]] = []

    def feed(self, text: str) -> bool:
        """Whether the line can be part of the text."""
        text = text.rstrip()[:_MOST_CHARS]
        if not text or text.lstrip().startswith("#") or len(self.flat) >= MOST_ENTRIES:
            return bool(self.flat) or not text
        found = _YAML.match(text)
        if found is None:
            item = _YAML_ITEM.match(text)
            if item is None or not self._levels:
                return False
            self._item(item.group(2))
            return True
        indent = len(found.group(1)) + len(found.group(2))
        while self._levels and self._levels[-1][0] >= indent:
            self._levels.pop()
        name, value = found.group(3).strip("'\""), found.group(4)
        if len(self._levels) >= _MOST_DEPTH:
            return False  # no configuration: the path of each key would be as long as the text
        self._levels.append((indent, name))
        path = self._path()
        value = (value or "").strip()
        if value.startswith(("{", "[")) and len(path) < _MOST_PATH:
            for key, inner in bracketed(value).items():
                _keep(self.flat, f"{path}.{key}", inner)
        _keep(self.flat, path, value.strip("'\""))
        return True

    def _path(self) -> str:
        return ".".join(name for _, name in self._levels).lower()

    def _item(self, text: str) -> None:
        path = self._path()
        before = self.flat.get(path, "")
        _keep(self.flat, path, f"{before},{text.strip()}".lstrip(",")[:_MOST_CHARS])


# --- values, read by those who know what they should be
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+),[0-9]+")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")


def json_object(text: str) -> dict[str, Any] | None:
    """None for what is no JSON, or no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def whole(text: str | None) -> int | None:
    """'8' or '8.0'; None for what is no whole number."""
    value = number(text)
    return int(value) if value is not None and value == int(value) and abs(value) < 2**53 else None


def number(text: str | None) -> float | None:
    """Finite, '4,096' too; '2,5' is none, as nobody knows whether it is 2.5."""
    if text is None or len(text) > 40:
        return None
    text = text.strip()
    if "," in text and not _THOUSANDS.fullmatch(text):
        return None
    value = plain_float(text.replace(",", ""))
    return value if value - value == 0 else None


def decimal(text: str) -> str:
    """'1.234,5' with a point: 1234.5; all else as it is."""
    is_number = _DECIMAL.fullmatch(text.strip())
    return text.replace(".", "").replace(",", ".") if is_number else text


def fsdp_sharding(text: str) -> str:
    """Of torch's ShardingStrategy, by whichever of its words the text has."""
    strategies = (  # the first names the third, too
        ("hybrid_shard_zero2", "zero2"),
        ("shard_grad_op", "zero2"),
        ("hybrid_shard", "zero3"),
        ("full_shard", "zero3"),
        ("no_shard", "zero0"),
    )
    return next((zero for word, zero in strategies if word in text.lower()), "")


def yes(text: str | None) -> bool:
    return (text or "").strip().lower() in ("true", "1", "yes", "on")


def is_none(text: str | None) -> bool:
    return (text or "").strip().lower() in ("", "none", "null", "~")


_LISTS = re.compile(r"\[([01,]{1,4000})\](?:\*([0-9]{1,3}))?")
_AGAIN = re.compile(r"\)\*([0-9]{1,3})$")


def pattern(text: str) -> list[int]:
    """Of '[0, 1, 1]', or of '([0]*3+[1]*58)' and '([0]+[1])*24' as a command line has it."""
    text = text.replace(" ", "")
    once = "".join(signs * int(times or 1) for signs, times in _LISTS.findall(text))
    again = _AGAIN.search(text)
    return [int(sign) for sign in re.findall(r"[01]", once)] * int(again[1] if again else 1)
