"""JSON and TOML texts of users -> plain data; what no file of ours can be is refused. Files of the
package's own data."""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from typing import Any, TypeVar

from fourfold import door, files
from fourfold.errors import UserError, inside, shorten

# A plain path: importlib.resources takes 15 ms to import, and the package is never a zip.
DATA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data")
T = TypeVar("T")
# The largest spec we know has 40 kB, a sweep of 10,000 listed runs 3 MB; Python's TOML reader takes
# a second and 150 bytes of memory for each MB and each key. JSON is read 20 times faster.
MAX_TOML_LETTERS = 4 * 2**20
MAX_JSON_LETTERS = 64 * 2**20
# Ours reach 8: a report's spec's model's rope scaling.
MAX_DEPTH = 32
# A part of a key is bare or quoted. None begins inside of another, so each is looked at few times.
_KEY_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"(?<![\w\"'\\-])(?:{_KEY_PART}){{{MAX_DEPTH + 1}}}")
_HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # escapes of JSON that may be half of a pair
_HALF = re.compile("[\ud800-\udfff]")


def parse_json(text: str, *, halves: bool = False) -> object:
    """JSON text -> plain data; NaN and Infinity are no JSON and refused, as is a name given twice
    (readers differ in which of the two they take). `halves`: half of a character is not refused,
    but becomes the letters of its escape."""

    def refuse(word: str) -> None:
        raise UserError(f"contains {word}, which is not JSON", hint="write a finite number")

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_name = dict(pairs)
        if len(by_name) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise UserError(f"has {shorten(twice)} twice in one object", hint="keep one of them")
        return by_name

    if len(text) > MAX_JSON_LETTERS:
        raise UserError(f"is over {MAX_JSON_LETTERS >> 20} MiB", hint="is this the right file?")
    try:
        data = _shallow(json.loads(text, parse_constant=refuse, object_pairs_hook=table))
        if _HALVES.search(text):
            whole = json.dumps(data, ensure_ascii=False)
            if halves:
                return json.loads(_HALF.sub(lambda half: rf"\\u{ord(half[0]):04x}", whole))
            door.check_text(whole)
        return data
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON ({error})", hint="check the file's syntax") from None


def read(path: str, *, field: str) -> dict[str, Any]:
    """A user's file; what is wrong with it names it."""
    text = files.read_text(path, field=field)
    with inside(path):
        return parse(text, path)


def parse(text: str, path: str = "") -> dict[str, Any]:
    """A user's file: TOML, or JSON by the ending of its name; without an ending, by its look."""
    if path.endswith((".yaml", ".yml")):
        raise UserError("is YAML, which is not read", hint="write it as TOML or JSON")
    looks_so = text.lstrip().startswith("{") and not path.endswith(".toml")
    if not path.endswith(".json") and not looks_so:
        return parse_toml(text)
    if not text.strip():
        raise UserError("is empty", hint="write a JSON object")
    data = parse_json(text)
    if not isinstance(data, dict):
        raise UserError("must be a JSON object", value=data)
    return data


def parse_toml(text: str) -> dict[str, Any]:
    if len(text) > MAX_TOML_LETTERS:
        raise UserError(f"is over {MAX_TOML_LETTERS >> 20} MiB", hint="is this the right file?")
    if _LONG_KEY.search(text):  # the reader takes time with the square of its parts
        raise UserError(f"has a key of more than {MAX_DEPTH} parts", hint="check its dots")
    try:
        return _shallow(tomllib.loads(text))
    except UserError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:
        raise UserError(f"is not TOML ({error})", hint="check the file's syntax") from None


@functools.cache
def data(name: str) -> dict[str, Any]:
    """A file of the package's data."""
    return parse_toml(text(name))


def text(name: str) -> str:
    """The same as it is written."""
    with open(os.path.join(DATA, name), encoding="utf-8") as stream:
        return stream.read()


def _shallow(data: T) -> T:
    """The data, unless it is nested deeper than any of ours: what walks it need not be careful."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return data
    raise UserError(f"is nested more than {MAX_DEPTH} deep", hint="check the file's syntax")


def toml_value(text: str) -> Any:
    """What --set's value means: a TOML value if it is one, else plain text."""
    text = text.strip()
    try:
        table = parse_toml(f"value = {text}\n")
    except UserError:
        return text
    return table["value"] if set(table) == {"value"} else text
