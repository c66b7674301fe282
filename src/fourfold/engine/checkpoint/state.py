"""What of the training state does this rank hold, and which of it does it write?

A held rectangle belongs to a named global tensor: the weights and both moments of every published
tensor. Ranks that hold the same rectangle share the writing, each rectangle once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fourfold.engine.training.trainer import Trainer

WEIGHTS = "model"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """`tensor` is the part at `offsets` of the tensor `name`, whose whole has `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def slot(self) -> Slot:
        return Slot(
            self.name, self.shape, self.offsets, tuple(self.tensor.shape), self.tensor.nbytes
        )


@dataclass(frozen=True, slots=True)
class Slot:
    """A held rectangle without its values, to tell other ranks about."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def held(trainer: Trainer, *, moments: bool = True) -> Iterator[Held]:
    """Views of the trainer's own memory, in the order of its pieces."""
    for piece in trainer.pieces:
        corner = (piece.block.rows[0], piece.block.columns[0])
        weights = Held(
            f"{WEIGHTS}.{piece.name}", piece.shape, corner[: len(piece.shape)], piece.values
        )
        yield weights
        if not moments:
            continue
        for name, moment in trainer.optimizer.moments(piece.param).items():
            part = moment[piece.rows[0] : piece.rows[1]]
            yield replace(weights, name=f"{name}.{piece.name}", tensor=part)


def divide(ranks: Sequence[Iterable[Slot]]) -> list[list[int]]:
    """For each rank, which of its slots it writes: every rectangle once, bytes balanced."""
    holders: dict[Slot, list[tuple[int, int]]] = {}
    for rank, slots in enumerate(ranks):
        for number, slot in enumerate(slots):
            holders.setdefault(slot, []).append((rank, number))
    must_cover(holders)
    load = [0] * len(ranks)
    chosen: list[list[int]] = [[] for _ in ranks]
    for slot in sorted(holders, key=lambda one: -one.nbytes):
        rank, number = min(holders[slot], key=lambda place: (load[place[0]], place))
        load[rank] += slot.nbytes
        chosen[rank].append(number)
    return [sorted(numbers) for numbers in chosen]


def must_cover(slots: Iterable[Slot]) -> None:
    """Distinct rectangles fill their tensors: pieces of one layout are equal or disjoint."""
    filled: dict[tuple[str, tuple[int, ...]], int] = {}
    for slot in slots:
        key = (slot.name, slot.shape)
        filled[key] = filled.get(key, 0) + math.prod(slot.sizes)
    for (name, shape), count in filled.items():
        assert count == math.prod(shape), f"{name}: ranks hold {count} of {math.prod(shape)} values"
