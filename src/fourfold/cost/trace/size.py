"""What number does a symbolic size stand for? 'tokens/ranks' with tokens 60000, ranks 16 -> 3750.

A size is a product of names and whole numbers, some of them divided: 'heads*head_size', '2*ffn/tp'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

_WORD = re.compile(r"([*/]?)([a-z_]+|[0-9]+)")


def ratio(size: str, sizes: Mapping[str, int]) -> Fraction:
    """The exact value of a size."""
    value = Fraction(1)
    for sign, word in words(size):
        number = int(word) if word.isdecimal() else sizes[word]
        value = value / number if sign == "/" else value * number
    return value


def whole(size: str, sizes: Mapping[str, int]) -> int:
    """The value of a size that must come out whole: the builders of steps refuse the rest."""
    value = ratio(size, sizes)
    assert value.denominator == 1, f"{size} = {value} is not whole"
    return value.numerator


def words(size: str) -> list[tuple[str, str]]:
    """(sign, word) in order; an assert for our own misspelt sizes."""
    found = _WORD.findall(size)
    assert "".join(sign + word for sign, word in found) == size, size
    return found


def shape(dims: Iterable[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(whole(dim, sizes) for dim in dims)


def bracketed(items: Iterable[object]) -> str:
    """The printed form of a shape, symbolic or in numbers."""
    return f"[{', '.join(map(str, items))}]"
