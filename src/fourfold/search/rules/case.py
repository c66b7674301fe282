"""A rule: when it is broken, as arithmetic on whole numbers, and what to say then.

`broken` works on plain numbers and on NumPy columns alike: it joins comparisons by & and |, each in
parentheses, never by `and`, `or`, `not`. `words` is for one run only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import attrgetter, or_
from typing import Any, NamedTuple

from fourfold.spec.cluster import Device
from fourfold.spec.engine import EngineRules
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Dtypes, Policy
from fourfold.spec.words import CP_KINDS, SCHEDULES

ULYSSES = CP_KINDS.index("ulysses")
INTERLEAVED, ZERO_BUBBLE = SCHEDULES.index("interleaved"), SCHEDULES.index("zero-bubble")

# A whole number, or a NumPy column of them.
Whole = Any
Truth = Any
# What a broken rule says: field, value, rule, hint.
Words = tuple[str, object, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """A run as the rules see it: numbers only; choices are indices into the stacks' tuples."""

    model: ModelShape
    stack: EngineRules
    gpus: int | None
    device: Device | None
    policy: Policy
    pp: Whole
    replicate: Whole
    shard: Whole
    cp: Whole
    tp: Whole
    seq_len: Whole
    micro_batch: Whole
    batch_sizes: tuple[int, ...]  # every size of a ramp-up, the last is the full one
    zero: Whole
    cp_kind: Whole
    schedule: Whole
    virtual_stages: Whole
    recompute: Whole
    sequence_parallel: Whole
    runs: bool = True  # False: only planned, so what our engine lacks is no obstacle
    dispatcher: str = "alltoall"  # of experts on other ranks, as priced: never auto
    overlap: str = "combined-1f1b"  # of the exchange, where it is hidden: never auto
    ep: Whole = 1
    etp: Whole = 1
    dp: Whole = field(init=False)
    dtypes: Dtypes = field(init=False)
    is_looped: Truth = field(init=False)  # the schedule has several chunks a rank
    splits_backward: Truth = field(init=False)

    def __post_init__(self) -> None:
        in_halves = self.schedule == ZERO_BUBBLE
        object.__setattr__(self, "dp", self.replicate * self.shard)
        object.__setattr__(self, "dtypes", self.policy.dtypes)
        object.__setattr__(self, "is_looped", (self.schedule == INTERLEAVED) | in_halves)
        object.__setattr__(self, "splits_backward", in_halves & (self.pp > 1))

    def with_columns(self, columns: Mapping[str, Any]) -> RuleCase:
        """The same question about many runs: fields by name as columns."""
        return replace(self, **columns)


class Rule(NamedTuple):
    """`reason` names it in counts and answers."""

    reason: str
    broken: Callable[[RuleCase], Truth]
    words: Callable[[RuleCase], Words]


def any_of(truths: Collection[Truth]) -> Truth:
    """Return whether one of them holds, column by column."""
    return reduce(or_, truths, False)


def outside(index: Whole, names: Sequence[object], allowed: Sequence[object]) -> Truth:
    """Whether the choice at `index` of `names` is not among the allowed ones."""
    return any_of([index == place for place, name in enumerate(names) if name not in allowed])


def choice(c: RuleCase, field: str, value: object, allowed: tuple[object, ...]) -> Words:
    words = ", ".join(str(item) for item in allowed)
    hint = f"use {words}" if words else "omit it"
    return field, value, f"is not supported by {c.stack.name}", hint


def divides(reason: str, axis: str, size: str, why: str = "") -> Rule:
    """The ranks of an axis divide a size of the model, where it has that."""

    def number(c: RuleCase) -> int:
        has = c.model.moe is not None or not size.startswith("moe.")
        return attrgetter(size)(c.model) if has else 0

    def words(c: RuleCase) -> Words:
        ranks, whole = getattr(c, axis), number(c)
        hint = f"use {axis} {few(divisors(whole), ranks)}"
        return f"layout.{axis}", ranks, f"must divide {size}={whole}{why}", hint

    return Rule(reason, lambda c: number(c) % getattr(c, axis) != 0, words)


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def few(values: list[int], near: int, count: int = 6) -> str:
    """The values nearest to `near`, in order."""
    return ", ".join(str(v) for v in sorted(sorted(values, key=lambda v: abs(v - near))[:count]))
