"""What does a cell mean? Numbers with units and gaps, and the many ways to write 'no value'."""

from __future__ import annotations

import re
from typing import Literal

State = Literal["value", "empty", "dash", "unknown", "oom", "fail", "hang"]

_NUMBER = re.compile(
    r"[~<>]?\s*([+-]?[0-9][0-9,_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z%/]*)\s*\Z",
    re.IGNORECASE,
)
_LAYOUT = re.compile(r"\(?\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*\)?\Z")
_SIZE = re.compile(r"(?:^|[^0-9.])([0-9]+(?:\.[0-9]+)?)([mMbBtT])(?![A-Za-z0-9])")
_SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}
_WORDS: dict[str, State] = {
    "oom": "oom", "out of memory": "oom", "cuda oom": "oom",
    "fail": "fail", "failed": "fail", "crash": "fail", "crashed": "fail", "error": "fail",
    "hang": "hang", "hangs": "hang", "hung": "hang", "nonfinite": "fail",
    "gb": "unknown", "gib": "unknown", "n/a": "unknown", "na": "unknown", "none": "unknown",
    "nan": "unknown", "?": "unknown", "tbd": "unknown",
}  # fmt: skip


def state(text: str) -> State:
    """Why a cell holds no number, or 'value'. A unit alone ('GB') and 'xxxx' are unknown values."""
    text = text.strip()
    if not text:
        return "empty"
    if _is_dash(text):
        return "dash"
    word = text.strip("`*_ ").lower()
    if word in _WORDS:
        return _WORDS[word]
    if re.fullmatch(r"x{2,}", word):
        return "unknown"
    return "value"


def _is_dash(text: str) -> bool:
    """'-', its full-width and typographic sisters, and what a wrong encoding makes of them
    (two to six odd characters, no letter or digit of ASCII)."""
    if set(text) == {"-"}:
        return True
    if text.isascii() or len(text) > 6:
        return False
    return not any(character.isascii() and character.isalnum() for character in text)


def number(text: str) -> float | None:
    """'67GB' -> 67.0, '1,024' -> 1024.0; None where there is no number."""
    if state(text) != "value":
        return None
    match = _NUMBER.match(text.strip().strip("`*"))
    return float(match.group(1).replace(",", "").replace("_", "")) if match else None


def whole(text: str) -> int | None:
    value = number(text)
    return int(value) if value is not None and value == int(value) else None


def decimals(text: str) -> int:
    """Digits after the point, as printed."""
    match = _NUMBER.match(text.strip())
    digits = match.group(1).lower() if match else ""
    return len(digits.partition("e")[0].partition(".")[2])


def half_unit(text: str) -> float:
    """Half of the last printed digit: how far a rounded value may be from the true one."""
    return 0.5 * 10.0 ** -decimals(text)


def layout(text: str) -> tuple[int, int, int, int] | None:
    """'(4, 1, 2, 1)' -> tp, cp, pp, micro batch."""
    match = _LAYOUT.match(text.strip())
    return tuple(map(int, match.groups())) if match else None  # type: ignore[return-value]


def size_label(text: str) -> tuple[float, float] | None:
    """'200B' -> (199.5e9, 200.5e9): the parameters that print as this label."""
    found = _SIZE.findall(text)
    if not found:
        return None
    digits, unit = found[-1]
    half = half_unit(digits)
    scale = _SCALE[unit.lower()]
    return (float(digits) - half) * scale, (float(digits) + half) * scale
