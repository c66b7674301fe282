"""Symbolic sizes. Of the kinds of traces that are lists of operations, a size knows what it is made
of. Of a layer that a dry run counts, numbers are given symbols: it is counted twice, with other
sizes the second time, and a dimension is the symbol that gives both of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from fourfold.spec.run import RunSpec

# In the order in which they are printed.
_ORDER = (
    "tokens",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "kv_copies",
    "head_size",
    "ranks",
    "dp",
    "tp",
)


class Size(float):
    """A size that knows what it is a product of: `Size(4096, "tokens") / Size(2, "ranks")` is 2,048
    and prints as tokens/ranks. Beside arrays it is a number."""

    def __new__(cls, value: float, name: str = "") -> Size:
        size = super().__new__(cls, value)
        size.powers = {name: 1} if name else {}
        size.factor = 1.0
        return size

    powers: dict[str, int]
    factor: float

    def __mul__(self, other: Any) -> Any:
        return self._product(float(self) * other, other, 1) if _is_number(other) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return (
            self._product(float(self) / other, other, -1) if _is_number(other) else NotImplemented
        )

    def _product(self, value: float, other: float, sign: int) -> Size:
        size = Size(value)
        theirs = other if isinstance(other, Size) else Size(1.0)
        names = dict.fromkeys((*self.powers, *theirs.powers))
        powers = {n: self.powers.get(n, 0) + sign * theirs.powers.get(n, 0) for n in names}
        size.powers = {name: power for name, power in powers.items() if power}
        size.factor = self.factor * (theirs.factor if isinstance(other, Size) else other) ** sign
        return size

    def __str__(self) -> str:
        """Heads times their size are the hidden size of these layers."""
        powers = dict(self.powers)
        if powers.get("heads") == powers.get("head_size") == 1:
            powers = powers | {"heads": 0, "head_size": 0, "hidden": 1}
        above = [name for name in _ORDER if powers.get(name) == 1]
        below = [name for name in _ORDER if powers.get(name) == -1]
        if self.factor > 1 or not above:
            above.insert(0, f"{self.factor:g}")
        elif self.factor < 1:
            below.append(f"{1 / self.factor:g}")
        return "/".join(["*".join(above), *below])


def _is_number(value: object) -> bool:
    return isinstance(value, float | int)


# By what the sizes of the second count are larger: primes that no layout divides by.
_STRETCH = {"tokens": 11, "hidden": 13, "ffn": 17, "head_size": 19}
_HEADS = 23
_BETWEEN = "tokens/cp/tp"
# What is divided over which axes: weights over all ranks that hold the same; half of a head is
# turned, a rank's tokens are two chunks, gate and up are side by side.
_Cut = tuple[str | int, ...]
_OVER_TP: tuple[_Cut, ...] = ((), ("tp",))
_OVER_RANKS: tuple[_Cut, ...] = ((), ("dp", "cp"))
_HEADS_CUTS: tuple[_Cut, ...] = ((), ("tp",), ("tp", "cp"))
_CUTS: dict[_Cut, tuple[_Cut, ...]] = {
    ("head_size",): ((), (2,)),
    ("tokens",): ((), ("cp",), ("cp", "tp"), ("cp", 2)),
    ("hidden",): _OVER_RANKS,
    ("ffn",): (*_OVER_TP, ("tp", "dp", "cp")),
    (2, "ffn"): (*_OVER_TP, ("tp", "dp", "cp")),
    ("heads", "head_size"): _OVER_TP,
    ("kv_heads", "head_size"): _OVER_TP,
    ("qkv_width",): _OVER_RANKS,
    ("cp",): ((),),
    ("tp",): ((),),
    ("heads",): _HEADS_CUTS,
    ("kv_heads",): _HEADS_CUTS,
    ("kv_heads", "kv_copies"): _HEADS_CUTS,
    ("weights",): _OVER_RANKS,
}


def bracketed(items: Iterable[object]) -> str:
    """The printed form of a shape, symbolic or in numbers."""
    return f"[{', '.join(map(str, items))}]"


def stretched_sizes(spec: RunSpec) -> RunSpec:
    """The same layer with other sizes, but heads where more would be dealt out differently: a lone
    one, or one that several ranks hold."""
    model, layout = spec.model, spec.layout
    owners = layout.tp * (layout.cp if spec.policy.cp_kind == "ulysses" else 1)
    kv_more = _HEADS if model.kv_heads > owners and model.kv_heads % owners == 0 else 1
    more = kv_more if model.heads in (model.kv_heads, owners) else _HEADS
    wider = replace(
        model,
        hidden=model.hidden * _STRETCH["hidden"],
        ffn=model.ffn * _STRETCH["ffn"],
        heads=model.heads * more,
        kv_heads=model.kv_heads * kv_more,
        head_dim=model.head_size * _STRETCH["head_size"],
    )
    batch = replace(spec.batch, seq_len=spec.batch.seq_len * _STRETCH["tokens"])
    return replace(spec, model=wider, batch=batch)


class Symbols:
    """Sizes by what gives them in both counts, the simplest first."""

    def __init__(self, sizes: Mapping[str, int], other: Mapping[str, int]) -> None:
        self.by_numbers: dict[tuple[float, float], list[str]] = {}
        for above, below in _expressions(sizes):
            both = _value(above, below, sizes), _value(above, below, other)
            text = "/".join(["*".join(map(str, above)), *map(str, below)])
            self.by_numbers.setdefault(both, []).append(text)

    def of(self, dims: Sequence[tuple[int, int]]) -> list[str]:
        """From the last dimension on. A layout's sizes are the same in both counts, so two rules
        remain: tokens are cut over tp only where all of `hidden` is there, or one number a token;
        and where one size is two symbols, a second dimension has the second."""
        taken: list[str] = []
        for both in reversed(dims):
            cut_by_tp = len(dims) == 1 or "hidden" in taken
            texts = [t for t in self.by_numbers.get(both, ()) if cut_by_tp or t != _BETWEEN]
            unused = [t for t in texts if t not in taken]
            if both[0] == both[1]:  # of the model's sizes heads alone may be the same in both
                texts = []
            taken.append((unused or texts or [str(both[0])])[0])
        return taken[::-1]


def _value(above: _Cut, below: _Cut, sizes: Mapping[str, int]) -> float:
    numbers = [
        [part if isinstance(part, int) else sizes[part] for part in parts]
        for parts in (above, below)
    ]
    return prod(numbers[0]) / prod(numbers[1])


def _expressions(sizes: Mapping[str, int]) -> Iterator[tuple[_Cut, _Cut]]:
    """Yield products of sizes and what they are divided by."""
    for above, cuts in _CUTS.items():
        known = all(part in sizes or isinstance(part, int) for part in above)
        # A pair of tensors is more often 2 than a group of two ranks is.
        if known and not (above in (("cp",), ("tp",)) and sizes[str(above[0])] == 2):
            yield from ((above, cut) for cut in cuts)
    # All-gathered keys up to one of a rank's two chunks.
    yield from (((chunks, "tokens"), ("cp", 2)) for chunks in range(3, 2 * sizes["cp"]))
