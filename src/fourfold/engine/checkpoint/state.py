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
class StateShard:
    """`tensor` is the part at `offsets` of the tensor `name`, whose whole has `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def info(self) -> ShardInfo:
        return ShardInfo(
            self.name, self.shape, self.offsets, tuple(self.tensor.shape), self.tensor.nbytes
        )


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A held rectangle without its values, to tell other ranks about."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def state_shards(trainer: Trainer, *, moments: bool = True) -> Iterator[StateShard]:
    """Views of the trainer's own memory, in the order of its pieces."""
    for shard in trainer.shards:
        corner = (shard.rect.rows[0], shard.rect.columns[0])
        weights = StateShard(
            f"{WEIGHTS}.{shard.name}", shard.shape, corner[: len(shard.shape)], shard.values
        )
        yield weights
        if not moments:
            continue
        for name, moment in trainer.optimizer.moments(shard.param).items():
            part = moment[shard.rows[0] : shard.rows[1]]
            yield replace(weights, name=f"{name}.{shard.name}", tensor=part)


def assign_writers(ranks: Sequence[Iterable[ShardInfo]]) -> list[list[int]]:
    """For each rank, which of its slots it writes: every rectangle once, bytes balanced."""
    holders: dict[ShardInfo, list[tuple[int, int]]] = {}
    for rank, infos in enumerate(ranks):
        for number, info in enumerate(infos):
            holders.setdefault(info, []).append((rank, number))
    require_coverage(holders)
    load = [0] * len(ranks)
    chosen: list[list[int]] = [[] for _ in ranks]
    for info in sorted(holders, key=lambda shard: -shard.nbytes):
        rank, number = min(holders[info], key=lambda place: (load[place[0]], place))
        load[rank] += info.nbytes
        chosen[rank].append(number)
    return [sorted(numbers) for numbers in chosen]


def require_coverage(infos: Iterable[ShardInfo]) -> None:
    """Distinct rectangles fill their tensors: pieces of one layout are equal or disjoint."""
    filled: dict[tuple[str, tuple[int, ...]], int] = {}
    for info in infos:
        key = (info.name, info.shape)
        filled[key] = filled.get(key, 0) + math.prod(info.sizes)
    for (name, shape), count in filled.items():
        assert count == math.prod(shape), f"{name}: ranks hold {count} of {math.prod(shape)} values"
