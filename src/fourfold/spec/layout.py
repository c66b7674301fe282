"""A layout divides the ranks into pp x dp x cp x tp, outermost first: `pp2 dp2x4 cp1 tp8`.

dp = replicate x shard: `dp2x4` has two replicas of a state sharded over four ranks, `dp8` shards
over eight. What is sharded (nothing, optimizer, gradients, weights) is the policy's `sharding`.

`ep4` divides the ranks of one stage again, for experts only: in the order of placement every `etp`
neighbours hold a slice each of the same experts, `ep` such groups hold all experts, and what is
left (edp) holds them again. Copies (`dp2x4`) stay outside: each holds all experts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from fourfold.errors import UserError, nearest
from fourfold.flag import flag
from fourfold.spec import check
from fourfold.spec.codec import decode_value
from fourfold.units import size_from

AXES = ("pp", "dp", "cp", "tp")
# Those that cut the model or a sequence; dp is what they leave of the ranks.
MODEL_AXES = ("tp", "cp", "pp")
# Those that divide the ranks of a stage again, for experts.
EXPERT_AXES = ("ep", "etp")
# Of a layout: dp is replicate x shard.
SIZES = ("pp", "replicate", "shard", "cp", "tp")
# 'tp8', 'TP=8', 'dp2x4'; between words blanks, commas or an x ('TP8xPP2').
_WORD = re.compile(
    rf"\s*({'|'.join((*AXES, *EXPERT_AXES))})\s?[=:]?\s?([0-9]{{1,9}})(?:x([0-9]{{1,9}}))?"
    r"(?:[\s,;*/]+|x(?=[a-z])|\Z)"
)
_MAX_RANKS = 2**24
_SIZE = Annotated[int, size_from]
_SPELLED = f"{', '.join(AXES[:-1])} and {AXES[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the axes; `order` is their placement, outermost (slowest link) first."""

    pp: int = flag("pipeline-parallel size", "N", default=1)
    replicate: int = 1
    shard: int = flag(
        "data-parallel size: 8, or 2x4 for 2 replicas of 4 shards (default: what is left)",
        "X",
        names=("--dp",),
        default=1,
    )
    cp: int = flag("context-parallel size", "N", default=1)
    tp: int = flag("tensor-parallel size", "N", default=1)
    ep: int = flag("expert-parallel size, within dp x cp x tp", "N", default=1)
    etp: int = flag("tensor-parallel size of experts", "N", rare=True, default=1)
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in (*SIZES, *EXPERT_AXES)}
        check.whole(1, _MAX_RANKS, **sizes)
        rule, hint = f"must name {_SPELLED} once each", f"write order = '{' '.join(AXES)}'"
        given = " ".join(self.order)
        check.that(sorted(self.order) == sorted(AXES), "order", given, rule, hint)

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        assert axis in AXES
        return getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours on an axis: product of the axes inside it."""
        inner = self.order[self.order.index(axis) + 1 :]
        return math.prod(self.size(name) for name in inner)

    def coordinates(self, rank: int) -> dict[str, int]:
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in AXES}

    @property
    def edp(self) -> int:
        """Ranks of a stage's replica that hold the same slice of the same experts."""
        return self.shard * self.cp * self.tp // (self.ep * self.etp)

    def expert_place(self, rank: int) -> tuple[int, int, int]:
        """(edp, ep, etp) of a rank among those of its stage and replica."""
        place, at = self.coordinates(rank), 0
        for axis in (axis for axis in self.order if axis != "pp"):
            size = self.shard if axis == "dp" else self.size(axis)
            at = at * size + place[axis] % size
        return at // (self.ep * self.etp), at // self.etp % self.ep, at % self.etp

    def __str__(self) -> str:
        sizes = self._written()
        return " ".join(
            f"{axis}{sizes[axis]}" for axis in (*self.order, *EXPERT_AXES) if axis in sizes
        )

    def _written(self) -> dict[str, object]:
        """{'pp': 2, 'dp': '2x4', ...}: the size of each axis as layouts are written."""
        dp = f"{self.replicate}x{self.shard}" if self.replicate > 1 else self.shard
        written = {axis: dp if axis == "dp" else self.size(axis) for axis in AXES}
        experts = {axis: getattr(self, axis) for axis in EXPERT_AXES}
        return written | {axis: size for axis, size in experts.items() if size > 1}

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in (*AXES, *EXPERT_AXES)}

    @classmethod
    def parse(cls, text: str) -> Layout:
        """`pp2 dp2x4 cp1 tp8`; axes left out are 1, the order of words is the placement. `TP8 PP2`,
        `tp=8,pp=2` and `TP8xPP2` are read too."""
        sizes: dict[str, int] = {}
        order: list[str] = []
        rest = text.lower()
        while rest.strip():
            match = _WORD.match(rest)
            rest = rest[match.end() :] if match else rest
            axis = match.group(1) if match else ""
            if match is None or axis in order or (match.group(3) and axis != "dp"):
                hint = "write it as 'pp2 dp2x4 cp1 tp8'"
                raise UserError("is not a layout", field="layout", value=text, hint=hint)
            order.append(axis)
            if axis == "dp":
                first, second = int(match.group(2)), match.group(3)
                sizes |= {"replicate": first, "shard": int(second)} if second else {"shard": first}
            else:
                sizes[axis] = int(match.group(2))
        check.that(bool(order), "layout", text, "is empty", "write 'dp8' or 'pp2 dp2 tp2'")
        return cls(**sizes, order=_whole_order([axis for axis in order if axis in AXES]))

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> Layout:
        """A text, or a table with pp, dp (a number or 'RxS'), cp, tp and order."""
        try:
            if isinstance(data, str):
                return cls.parse(data)
            if not isinstance(data, dict):
                rule, hint = "must be a string or a table", "write layout = 'dp8'"
                raise UserError(rule, value=data, hint=hint)
            return cls._from_table(data)
        except UserError as error:
            if error.field == "layout":
                raise
            if error.field == "shard" and isinstance(data, dict) and "shard" not in data:
                error = UserError(error.rule, field="dp", value=error.value)
            raise error.within(path) from None

    @classmethod
    def _from_table(cls, table: dict[str, object]) -> Layout:
        known = (*AXES, *SIZES, *EXPERT_AXES, "order")
        for key in table:
            if key not in known:
                raise UserError("unknown field", field=str(key), hint=nearest(str(key), known))
        sizes: dict[str, int] = {}
        dp = table.get("dp")
        if isinstance(dp, str):
            parsed = cls.parse(dp if dp.lower().startswith("dp") else f"dp{dp}")
            sizes = {"replicate": parsed.replicate, "shard": parsed.shard}
        elif dp is not None:
            sizes = {"shard": decode_value(_SIZE, dp, "dp")}
        for axis in (*SIZES, *EXPERT_AXES):
            if axis in table:
                sizes[axis] = decode_value(_SIZE, table[axis], axis)
        order = table.get("order")
        order = list(AXES) if order is None else order
        if isinstance(order, str):
            order = order.split()
        if not isinstance(order, list) or not all(isinstance(axis, str) for axis in order):
            raise UserError("must be a list of axis names", field="order", value=order)
        return cls(**sizes, order=tuple(order))

    def to_plain(self) -> dict[str, object]:
        plain = self._written()
        return plain if self.order == AXES else plain | {"order": " ".join(self.order)}


def _whole_order(named: list[str]) -> tuple[str, ...]:
    """Axes the text left out have size 1, so where they stand changes nothing."""
    if named == [axis for axis in AXES if axis in named]:
        return AXES
    return (*(axis for axis in AXES if axis not in named), *named)
