"""Which list of steps belongs to a kind of trace?"""

from __future__ import annotations

from collections.abc import Callable

from fourfold.cost.trace import attention, mlp, ring
from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.step import Kind, Program

PROGRAMS: dict[Kind, Callable[[Ask], Program]] = {
    "ulysses": attention.ulysses,
    "allgather": attention.allgather,
    "ring": ring.ring,
    "mlp": mlp.mlp,
    "mlp2d": mlp.mlp2d,
}


def build(kind: Kind, ask: Ask) -> Program:
    """The steps of a kind; refuses with a UserError what cannot be divided so."""
    return PROGRAMS[kind](ask)
