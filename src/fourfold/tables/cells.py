"""Cells of published tables, read and written: numbers with units and gaps, the many ways to write
'no value', and digits and words of the published styles.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from fourfold import door
from fourfold.result.report import OUTCOMES, Outcome

State = Literal["value", "empty", "dash", "unknown"] | Outcome

_NUMBER = re.compile(
    r"[~<>]?\s*([+-]?[0-9][0-9,_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-z%/]*)\s*\Z",
    re.IGNORECASE,
)
_LAYOUT = re.compile(r"\(?\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*,\s*([0-9]+)\s*\)?\Z")
_SIZE = re.compile(r"(?:^|[^0-9.])([0-9]+(?:\.[0-9]+)?)([mMbBtT])(?![A-Za-z0-9])")
_SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}
# Our precision -> the MPT tables' Precision and MP Mode. `amp` keeps fp32 weights, DEFAULT reduces
# gradients in fp32, PURE in what is computed with.
_PRECISION = {
    "bf16-mixed": ("amp_bf16", "DEFAULT"),
    "bf16-pure": ("bf16", "PURE"),
    "fp8": ("amp_fp8", "DEFAULT"),
    "fp8-pure": ("fp8", "PURE"),
}
_WORDS: dict[str, State] = {
    **{outcome: outcome for outcome in OUTCOMES if outcome != "ok"},
    "out of memory": "oom",
    "cuda oom": "oom",
    "fail": "crashed",
    "failed": "crashed",
    "crash": "crashed",
    "error": "crashed",
    "hang": "hung",
    "hangs": "hung",
    "gb": "unknown",
    "gib": "unknown",
    "n/a": "unknown",
    "na": "unknown",
    "none": "unknown",
    "nan": "unknown",
    "?": "unknown",
    "tbd": "unknown",
}


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


def printed(text: str) -> float | None:
    """'67GB' -> 67.0, '1,024' -> 1024.0; None where there is no number."""
    if state(text) != "value":
        return None
    match = _NUMBER.match(text.strip().strip("`*"))
    return float(match.group(1).replace(",", "").replace("_", "")) if match else None


def number(text: str) -> float | None:
    """What is printed, where it can be the number of anything."""
    value = printed(text)
    return value if value is not None and (value == 0 or door.is_possible(value)) else None


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
    sizes = _SIZE.findall(text)
    if not sizes:
        return None
    digits, unit = sizes[-1]
    half = half_unit(digits)
    scale = _SCALE[unit.lower()]
    return (float(digits) - half) * scale, (float(digits) + half) * scale


def precision_cells(precision: str, mode: str = "") -> tuple[str, str]:
    """(Precision, MP Mode) of a precision, ours or already the tables' word with its own mode."""
    return _PRECISION.get(precision, (precision, mode or "DEFAULT"))


def precision_of(cell: str, mode: str) -> str:
    """Our name for a row's two cells; words that name nothing of ours stay as they are."""
    ours = {cells: name for name, cells in _PRECISION.items()}
    by_word = {word: name for name, (word, _) in _PRECISION.items() if word.startswith("amp_")}
    return ours.get((cell, mode), by_word.get(cell, cell))


def figure(value: float | None) -> str:
    """Two decimals as the tables print them, and at least four digits of a small value."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:.2f}"
    digits = max(2, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 12)}f}"


def cut(value: float | None) -> str:
    """Throughputs are whole numbers, cut off; slow ones would all read 0 and keep decimals."""
    if value is None:
        return "-"
    return str(math.floor(value)) if value >= 10 else figure(math.floor(value * 1e4) / 1e4)


def percent(value: float | None) -> str:
    return "-" if value is None else figure(value) if value < 1 else f"{value:.2f}"


def gigabytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}GB" if value >= 10 else f"{figure(value)}GB"


def size(params: int) -> str:
    """'181B', '6.7B', '125M'."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if params >= scale:
            count = params / scale
            return f"{count:.0f}{unit}" if count >= 10 else f"{count:.1f}{unit}"
    return str(params)
