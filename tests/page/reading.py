"""Values of drawn marks, from pixels and the labels of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LETTERS = {"k": 1e3, "M": 1e6, "B": 1e9, "m": 1e-3, "μ": 1e-6}


def tick_value(text: str) -> float:
    plain = text.replace("\u2212", "-").replace(",", "")
    return float(plain[:-1]) * _LETTERS[plain[-1]] if plain[-1] in _LETTERS else float(plain)


class Axis:
    """Pixels -> values, through the first and the last tick."""

    def __init__(self, ticks: Sequence[Sequence[object]], *, log: bool = False) -> None:
        values = [(float(str(pixel)), tick_value(str(text))) for pixel, text in ticks]
        (self.p0, v0), (self.p1, v1) = min(values), max(values)
        self.log = log
        self.v0, self.v1 = (math.log10(v0), math.log10(v1)) if log else (v0, v1)

    def value(self, pixel: float) -> float:
        share = (pixel - self.p0) / (self.p1 - self.p0)
        value = self.v0 + share * (self.v1 - self.v0)
        return 10**value if self.log else value

    @property
    def pixel(self) -> float:
        """How much of the axis a pixel is."""
        return abs((self.v1 - self.v0) / (self.p1 - self.p0))


def name_at(ticks: Sequence[Sequence[object]], pixel: float) -> str:
    """The label of a category axis that is nearest."""
    return str(min(ticks, key=lambda tick: abs(float(str(tick[0])) - pixel))[1])


def same(found: Sequence[float], wanted: Sequence[float], *, within: float) -> None:
    """As many values, each where it should be to `within`."""
    assert len(found) == len(wanted)
    for one, other in zip(sorted(found), sorted(wanted), strict=True):
        assert abs(one - other) <= within, (one, other)
