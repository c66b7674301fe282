"""What is a step of a trace? Tensors written, FLOPs, messages, releases: symbols, no numbers yet.

FLOPs count 2 per multiply-add of matrix products. Liveness is read off the list by one rule,
that of a script: a tensor is held as long as its name. A step that writes a name already in use
holds both until the new one is complete; `frees` and `moves` end names by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fourfold.result.trace import How, Op
from fourfold.spec.words import Dtype

Kind = Literal["ulysses", "allgather", "ring", "mlp", "mlp2d", "layer"]
KINDS: tuple[Kind, ...] = ("ulysses", "allgather", "ring", "mlp", "mlp2d", "layer")
CP_KINDS: tuple[Kind, ...] = ("ulysses", "allgather", "ring")

# Scratch of the matrix library, held from the first product on; 42 MB in the published trace of
# 60,000 tokens on 16 GPUs whose peaks this reproduces.
WORKSPACE_BYTES = 42_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """`dims` are symbolic sizes; a view has a shape but no memory of its own."""

    name: str
    dims: tuple[str, ...]
    how: How = "new"
    dtype: Dtype | None = None  # None: the trace's own


@dataclass(frozen=True, slots=True)
class Send:
    """`dims` is the whole buffer of a collective: what is gathered, exchanged or summed."""

    op: Op
    group: str
    dims: tuple[str, ...]
    dtype: Dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`flops` are terms of one rank, added up; `times` repeats the step and leaves memory alone."""

    name: str
    formula: str
    tensors: tuple[Tensor, ...] = ()
    flops: tuple[str, ...] = ()
    sends: tuple[Send, ...] = ()
    frees: tuple[str, ...] = ()
    moves: tuple[tuple[str, str], ...] = ()
    times: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that exchange something; `members` lists every such group of the world."""

    name: str
    members: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.members[0])

    def of(self, rank: int) -> tuple[int, ...]:
        """The group that `rank` is in."""
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
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    per_rank: dict[str, int]
    rank: int = 0
    notes: tuple[str, ...] = field(default=())
