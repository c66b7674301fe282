"""What is asked of a trace? A layer's sizes, a layout and how attention runs; and what cannot be.

A refusal names what would fit: sizes of the sequence group, or other kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.spec.layout import Layout
from fourfold.spec.words import Dtype

Attention = Literal["flash", "naive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Sizes of one layer; `layers` only multiplies the weights held, `rank` is the one shown."""

    tokens: int
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    ffn: int = 1
    layers: int = 1
    layout: Layout
    dtype: Dtype = "bf16"
    attention: Attention = "flash"
    rank: int = 0

    def __post_init__(self) -> None:
        check.whole(0, self.ranks - 1, rank=self.rank)
        check.whole(1, 2**40, tokens=self.tokens)
        check.whole(
            1, 2**32, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn
        )
        check.whole(1, 100_000, layers=self.layers)

    @property
    def ranks(self) -> int:
        return self.layout.world

    @property
    def wide(self) -> Dtype:
        """What sums are kept in."""
        return "fp64" if self.dtype == "fp64" else "fp32"


def check_heads(ask: Ask) -> None:
    """Rules of the shape alone."""
    if ask.hidden % ask.heads:
        raise UserError(
            f"must divide hidden={ask.hidden}",
            field="heads",
            value=ask.heads,
            hint=f"use a divisor, such as {gcd(ask.hidden, ask.heads)}",
        )
    if ask.heads % ask.kv_heads:
        raise UserError(
            f"must divide heads={ask.heads}",
            field="kv-heads",
            value=ask.kv_heads,
            hint=f"use a divisor, such as {gcd(ask.heads, ask.kv_heads)}",
        )


def divided(field: str, value: int, parts: int, why: str) -> None:
    """Refuse a size that does not split evenly: a shard of its own shape has no one symbol."""
    if value % parts:
        below = value - value % parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        raise UserError(
            f"must be a multiple of {parts} ({why})", field=field, value=value, hint=f"use {near}"
        )


def kv_copies(heads: int, kv_heads: int, ranks: int) -> int:
    """How often a KV head is sent when they do not deal out evenly: just enough, at most to every
    query head."""
    if kv_heads % ranks == 0:
        return 1
    return ranks // kv_heads if ranks % kv_heads == 0 else heads // kv_heads


def check_ulysses(heads: int, ranks: int) -> None:
    """Whole query heads on every rank; KV heads are repeated where they do not deal out."""
    if heads % ranks == 0:
        return
    fitting = [n for n in range(1, min(heads, ranks) + 1) if heads % n == 0]
    raise UserError(
        f"must divide heads={heads} for ulysses",
        field="ranks",
        value=ranks,
        hint=f"use {', '.join(map(str, fitting[-4:]))} ranks, or allgather or ring, which split "
        "any number of heads",
    )
