"""Saves beside the steps, which wait only while tensors are copied to host memory; one save at a
time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine.checkpoint.checkpoint import LOOK_S, save, state_shards
from fourfold.engine.checkpoint.tensor_file import StateShard
from fourfold.engine.compat import foreach_norm
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.parallel.host_group import cpu_group
from fourfold.engine.process.health import NonFiniteError
from fourfold.engine.training.trainer import Trainer
from fourfold.result.checkpoint.folder import CheckpointState


@torch.no_grad()
def must_be_finite(items: Sequence[StateShard]) -> None:
    """A NaN in a weight that no token of late has used does not show in the loss."""
    if not items:
        return
    peaks = torch.stack(
        [peak.double() for peak in foreach_norm([item.tensor for item in items], float("inf"))]
    )
    if not bool(torch.isfinite(peaks).all()):
        bad = items[int((~torch.isfinite(peaks)).nonzero()[0])].name
        raise NonFiniteError(f"{bad} is not finite on this rank; nothing was saved")


class Saver:
    """Saves a trainer's state into `root`. Made on all ranks at once, on the main thread."""

    def __init__(
        self, trainer: Trainer, root: Path, *, keep: int = 0, background: bool = True
    ) -> None:
        self.trainer, self.root, self.keep, self.background = trainer, root, keep, background
        self._group = cpu_group()
        self._written_here: list[int] = []
        self._shard_count = 0
        self._buffers: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._written = 0
        self._error: BaseException | None = None

    def save(self, state: CheckpointState, tick: Callable[[], None] | None = None) -> None:
        """In the background: returns when everything is copied, after the save before is done."""
        self.wait(tick)
        items = self._to_write()
        must_be_finite(items)
        if self.background:
            items = self._staged(items)
        self._written = 0

        def work() -> None:
            if self.trainer.device.type == "cuda":  # a thread starts on the first one
                torch.cuda.set_device(self.trainer.device)
            try:
                save(items, self.root, state, keep=self.keep, group=self._group, tick=self._wrote)
            except BaseException as error:
                self._error = error

        # Also in the foreground, so that somebody is left to tell how far it is.
        self._thread = threading.Thread(target=work, name="save", daemon=True)
        self._thread.start()
        if not self.background:
            self.wait(tick)

    def _wrote(self) -> None:
        self._written += 1

    def look(self, tick: Callable[[], None]) -> None:
        """Raise what a background save has come to, without waiting for it."""
        if self._thread is not None and not self._thread.is_alive():
            tick()
            self.wait()

    def wait(self, tick: Callable[[], None] | None = None) -> None:
        """Until nothing is under way; `tick` is called whenever it got further."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        seen = -1
        while thread.is_alive():
            thread.join(LOOK_S)
            if tick is not None and self._written != seen:
                seen = self._written
                tick()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _to_write(self) -> list[StateShard]:
        """The rectangles this rank writes; who writes what is agreed on once."""
        items = list(state_shards(self.trainer))
        if len(items) != self._shard_count:
            self._written_here = _agreed(items, self._group)
            self._shard_count, self._buffers = len(items), []
        return [items[number] for number in self._written_here]

    @torch.no_grad()
    def _staged(self, items: list[StateShard]) -> list[StateShard]:
        """Copies in host memory that is kept for the next save."""
        device = self.trainer.device
        if not self._buffers:
            pin = device.type == "cuda"
            self._buffers = [
                torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=pin)
                for item in items
            ]
        for item, buffer in zip(items, self._buffers, strict=True):
            buffer.copy_(item.tensor, non_blocking=True)
        synchronize(device)
        pairs = zip(items, self._buffers, strict=True)
        return [replace(item, tensor=buffer) for item, buffer in pairs]


def _agreed(items: Sequence[StateShard], group: dist.ProcessGroup) -> list[int]:
    """One rank hears what all hold and tells each what to write. Collective."""
    infos = [
        ShardInfo(item.name, item.shape, item.offsets, tuple(item.tensor.shape), item.tensor.nbytes)
        for item in items
    ]
    first = dist.get_rank() == 0
    all_ranks: list | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(infos, all_ranks, group=group)
    numbers: list = [None]
    dist.scatter_object_list(
        numbers, assign_writers(all_ranks) if all_ranks is not None else None, group=group
    )
    return numbers[0]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A held rectangle without its values, to tell other ranks about."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


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
