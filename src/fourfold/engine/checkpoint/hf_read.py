"""Weights from Hugging Face safetensors (names: spec/hf/tensors.py); a rank reads only what it
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from fourfold.cost.count import params
from fourfold.engine.parallel.shards import Rect, Shard
from fourfold.engine.training.trainer import Trainer
from fourfold.spec.hf.folder import HfFolder
from fourfold.spec.hf.tensors import locate
from fourfold.spec.model import ModelShape

# What of a rectangle is in host memory at once.
_READ_BYTES = 2**28


class HfWeights(HfFolder):
    """Its values as torch's tensors."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, framework="pt")

    def rectangle(self, model: ModelShape, name: str, rect: Rect, *, matrix: bool) -> Tensor:
        """A part of the published tensor `name`: [rows, columns] of a matrix, else [rows]."""
        found = locate(self.kind, model, name)
        part = self.slice_of(found.name)
        top, bottom = (found.start + row for row in rect.rows)
        if not matrix:
            return part[top:bottom]
        left, right = rect.columns
        return part[left:right, top:bottom].T if found.transposed else part[top:bottom, left:right]


def begin_from(trainer: Trainer, folder: str, tick: Callable[[], None]) -> None:
    """Give a trainer the weights of a folder, if they are those of its model."""
    weights, spec = HfWeights(folder), trainer.spec
    weights.require(spec.model, params.tensors(spec.model, spec.batch.seq_len))
    fill(trainer.shards, weights, spec.model, tick)


@torch.no_grad()
def fill(
    shards: Iterable[Shard],
    weights: HfWeights,
    model: ModelShape,
    tick: Callable[[], None] = lambda: None,
) -> None:
    for shard in shards:
        if shard.name.endswith(f"router.{params.LOAD}"):  # no batch came before
            shard.values.fill_(1.0 / shard.shape[0])
            continue
        (top, bottom), columns = shard.rect.rows, shard.rect.columns
        rows = max(1, _READ_BYTES // (4 * (columns[1] - columns[0])))
        for first in range(top, bottom, rows):
            last = min(bottom, first + rows)
            read = weights.rectangle(
                model, shard.name, Rect((first, last), columns), matrix=len(shard.shape) > 1
            )
            shard.values[first - top : last - top].copy_(read)
        tick()
