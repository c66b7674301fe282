"""Sizes as a trace prints them, read from the text alone."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import prod


def value(text: str, sizes: Mapping[str, int]) -> Fraction:
    """Return the number of a printed size, such as 2*ffn/tp."""
    above, *below = text.split("/")
    parts = [Fraction(_number(part, sizes)) for part in above.split("*")]
    return prod(parts, start=Fraction(1)) / prod(_number(part, sizes) for part in below)


def _number(part: str, sizes: Mapping[str, int]) -> int:
    return int(part) if part.isdecimal() else sizes[part]


def dims(shape: str) -> list[str]:
    """Return the sizes of a printed shape, such as [tokens/cp, hidden]."""
    return [dim for dim in shape.strip("[]").split(", ") if dim]
