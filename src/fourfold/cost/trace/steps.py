"""What is asked of a trace (a layer's sizes, a layout, how attention runs) and its steps, symbolic.
A tensor is held as long as its name; a step that writes a name in use holds both meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from fourfold.cost.ops.op import Op
from fourfold.errors import UserError
from fourfold.spec import catalog, check, words
from fourfold.spec.cluster import Cluster, stretched
from fourfold.spec.layout import Layout
from fourfold.spec.words import Dtype

Kind = words.CpKind | Literal["mlp", "mlp2d", "layer"]
CP_KINDS: tuple[Kind, ...] = words.CP_KINDS[::-1]
KINDS: tuple[Kind, ...] = (*CP_KINDS, "mlp", "mlp2d", "layer")

# Scratch of the matrix library, held from the first product on; 42 MB in the published trace of
# 60,000 tokens on 16 GPUs whose peaks this reproduces.
WORKSPACE_BYTES = 42_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Sizes of one layer; `layers` only multiplies the weights held, `rank` is the one shown.
    `gated`: the MLP has a gate, such as SwiGLU's."""

    tokens: int
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    ffn: int = 1
    gated: bool = False
    layers: int = 1
    layout: Layout
    dtype: Dtype = "bf16"
    attention: Literal["flash", "naive"] = "flash"
    rank: int = 0

    def __post_init__(self) -> None:
        check.whole(0, self.ranks - 1, rank=self.rank)
        check.whole(1, 2**40, tokens=self.tokens)
        sizes = {name: getattr(self, name) for name in ("hidden", "heads", "kv_heads", "ffn")}
        check.whole(1, 2**32, **sizes)
        check.whole(1, 100_000, layers=self.layers)

    @property
    def ranks(self) -> int:
        return self.layout.world


@dataclass(frozen=True, slots=True)
class Step:
    """`frees` and `moves` end names by hand; `times` repeats the step and leaves memory alone."""

    name: str
    operations: tuple[Op, ...]
    note: str = ""
    frees: tuple[str, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()
    times: int = 1

    @property
    def formula(self) -> str:
        done = "; ".join(filter(None, map(formula, self.operations)))
        return f"{done} ({self.note})" if done and self.note else done or self.note


def formula(op: Op) -> str:
    """Return an operation as it is printed; nothing of what exists from the start."""
    inputs, outputs = [str(tensor) for tensor in op.reads], [tensor.name for tensor in op.writes]
    if op.function == "hold":
        return ""
    if op.function in ("+=", "*="):
        return f"{inputs[0]} {op.function} {inputs[1]}"
    if op.kind.endswith("product"):
        result = f"{inputs[0]} x {inputs[1]}"
        result = f"{op.function}({result})" if op.function else result
    else:
        result = f"{op.function.replace('-', '_')}({', '.join(inputs)})"
    return f"{', '.join(outputs)} = {result}"


@dataclass(frozen=True, slots=True)
class AxisGroups:
    """Ranks that exchange something; `members` lists every such group of the world."""

    name: str
    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.members[0])

    def of(self, rank: int) -> tuple[int, ...]:
        return next(ranks for ranks in self.members if rank in ranks)

    @property
    def span(self) -> int:
        """Neighbouring ranks from the group's first to its last."""
        return self.members[0][-1] - self.members[0][0] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole list of steps with the sizes its symbols stand for; `notes` say what is assumed."""

    kind: Kind
    ranks: int
    sizes: dict[str, int]
    dtype: Dtype
    groups: tuple[AxisGroups, ...]
    steps: tuple[Step, ...]
    per_rank: dict[str, int]
    rank: int = 0
    notes: tuple[str, ...] = ()

    def group(self, name: str) -> AxisGroups:
        return next(group for group in self.groups if group.name == name)


def check_heads(ask: Ask) -> None:
    """Rules of the shape alone."""
    for divisor, number in (("heads", "hidden"), ("kv_heads", "heads")):
        value, whole = getattr(ask, divisor), getattr(ask, number)
        if whole % value:
            rule = f"must divide {number}={whole}"
            hint = f"use a divisor, such as {gcd(whole, value)}"
            raise UserError(rule, field=divisor.replace("_", "-"), value=value, hint=hint)


def divided(field: str, value: int, parts: int, why: str) -> None:
    """Refuse a size that does not split evenly: a shard of its own shape has no one symbol."""
    if value % parts:
        below = value - value % parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        raise UserError(
            f"must be a multiple of {parts} ({why})", field=field, value=value, hint=f"use {near}"
        )


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


def _alike(layout: Layout, name: str, fact: Callable[[int], object]) -> AxisGroups:
    """Ranks of which the same is true."""
    members: dict[object, list[int]] = {}
    for rank in range(layout.world):
        members.setdefault(fact(rank), []).append(rank)
    return AxisGroups(name, tuple(map(tuple, members.values())))


def axis_groups(layout: Layout, axes: Sequence[str], name: str = "") -> AxisGroups:
    """Groups that differ only on `axes`: ('dp', 'cp') shard the same weights."""

    def others(rank: int) -> tuple[int, ...]:
        return tuple(at for axis, at in layout.coordinates(rank).items() if axis not in axes)

    return _alike(layout, name or "x".join(axes), others)


def expert_axis_groups(layout: Layout) -> tuple[AxisGroups, ...]:
    """Ranks that exchange tokens of experts, that hold the same experts, and that hold parts of the
    same sequences."""

    def replica(rank: int) -> tuple[int, int]:
        place = layout.coordinates(rank)
        return place["pp"], place["dp"] // layout.shard

    return (
        _alike(layout, "ep", lambda rank: (replica(rank), layout.expert_place(rank)[0])),
        _alike(layout, "edp", lambda rank: (replica(rank)[0], layout.expert_place(rank)[1:])),
        axis_groups(layout, ("cp", "tp"), "sequence"),
    )


def generic_cluster(ranks: int) -> Cluster:
    """Hosts of 8 with NVLink, a network port for every GPU."""
    return stretched(catalog.cluster("nvidia-h100"), ranks)


def spans(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 8] -> '0-2 8'; an even stride over more than two -> '0-56 by 8'."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ranks[0]}-{ranks[-1]} by {steps.pop()}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
