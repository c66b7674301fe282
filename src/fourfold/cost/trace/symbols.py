"""Symbolic sizes ('2*ffn/tp') as numbers, and numbers as symbols: a layer is counted twice, with
other sizes the second time, and a dimension is the symbol that gives both of its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from fourfold.spec.run import RunSpec

_WORD = re.compile(r"([*/]?)([a-z_]+|[0-9]+)")
# By what the sizes of the second count are larger: primes that no layout divides by.
_STRETCH = {"tokens": 11, "hidden": 13, "ffn": 17, "head_size": 19}
_HEADS = 23
_BETWEEN = "tokens/cp/tp"
# What is divided over which axes: weights over all ranks that hold the same; half of a head is
# turned, a rank's tokens are two chunks, gate and up are side by side.
_CUTS = {
    "head_size": ("", "/2"),
    "tokens": ("", "/cp", "/cp/tp", "/cp/2"),
    "hidden": ("", "/dp/cp"),
    "ffn": ("", "/tp", "/tp/dp/cp"),
    "2*ffn": ("", "/tp", "/tp/dp/cp"),
    "heads*head_size": ("", "/tp"),
    "kv_heads*head_size": ("", "/tp"),
    "qkv_width": ("", "/dp/cp"),
    "cp": ("",),
    "tp": ("",),
    "heads": ("", "/tp", "/tp/cp"),
    "kv_heads": ("", "/tp", "/tp/cp"),
    "kv_heads*kv_copies": ("", "/tp", "/tp/cp"),
    "weights": ("", "/dp/cp"),
}


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
    pairs = _WORD.findall(size)
    assert "".join(sign + word for sign, word in pairs) == size, size
    return pairs


def shape(dims: Iterable[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(whole(dim, sizes) for dim in dims)


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
        self.by_numbers: dict[tuple[Any, Any], list[str]] = {}
        for text in _expressions(sizes):
            both = ratio(text, sizes), ratio(text, other)
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


def _expressions(sizes: Mapping[str, int]) -> Iterator[str]:
    for name, cuts in _CUTS.items():
        known = all(word in sizes or word.isdecimal() for word in name.split("*"))
        # A pair of tensors is more often 2 than a group of two ranks is.
        if known and not (name in ("cp", "tp") and sizes[name] == 2):
            yield from (f"{name}{cut}" for cut in cuts)
    # All-gathered keys up to one of a rank's two chunks.
    yield from (f"{chunks}*tokens/cp/2" for chunks in range(3, 2 * sizes["cp"]))
