"""Mistakes that people have shipped, planted in the parallel path to prove that verify sees
them. Where a layout has no such step the fault cannot act."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.model.positions import Tables
from fourfold.engine.parallel.context import rank_tables
from fourfold.engine.parallel.shards import Rect, Shard
from fourfold.engine.training.gradients import SharedGradients
from fourfold.engine.training.trainer import Trainer


class _LossDivisor(Trainer):
    """Each rank divides by its own number of targets, as if all had the same."""

    def count_targets(self, targets: list[Tensor]) -> Tensor:
        own = torch.stack([(t != IGNORE).sum() for t in targets]).sum()
        return own.clamp(min=1) * self.world.dp_cp.size


def fewer_sums(axis: str, name: str = "") -> type[Trainer]:
    """Shards with this in their name are left out of the sums over ranks of the axis, which share
    weights."""

    def is_dropped(sums: SharedGradients, shard: Shard) -> bool:
        return sums.group.axis == axis and name in shard.name

    class FewerSums(Trainer):
        def make_shared(self) -> list[SharedGradients]:
            left = (
                replace(sums, shards=tuple(s for s in sums.shards if not is_dropped(sums, s)))
                for sums in super().make_shared()
            )
            return [sums for sums in left if sums.shards]

    return FewerSums


class _CpPositions(Trainer):
    """Every context rank counts its tokens from 0."""

    def make_tables(self) -> Tables:
        own = torch.arange(self.positions.numel(), device=self.device)
        return rank_tables(self.spec, self.world, own)


class _LayerSkip(Trainer):
    """The cut between stages loses the layer before it."""

    def materialize(self, *, initial: bool = True) -> None:
        for chunk in self.chunks:
            if not chunk.is_last:
                *_, last = chunk.layers.values()
                last.forward = lambda x, tables: x
        super().materialize(initial=initial)


class _KvHead(Trainer):
    """KV heads are dealt round robin over ranks, not in blocks as the query heads are."""

    def make_shards(self) -> list[Shard]:
        return [self._moved(shard) for shard in super().make_shards()]

    def _moved(self, shard: Shard) -> Shard:
        if shard.shared != "kv":
            return shard
        model = self.spec.model
        start = self.world.tp.rank % model.kv_heads * model.head_size
        start += shard.rect.rows[0] % model.head_size
        rows = (start, start + shard.rect.rows[1] - shard.rect.rows[0])
        return replace(shard, rect=Rect(rows, shard.rect.columns))


class _StaleWeight(Trainer):
    """Gathered weights outlive the update: the next step computes with the old ones."""

    def before_backward(self, chunk: Decoder, kind: str, last: bool) -> None:
        super().before_backward(chunk, kind, last)
        if self.world.dp_cp.size > 1:
            assert isinstance(chunk, FSDPModule)
            chunk.set_reshard_after_backward(False)


class _NormTwice(Trainer):
    """Weights that tensor ranks share, and a tied embedding's copy, count as often as held."""

    def make_counted(self) -> list[Shard]:
        world = self.world
        copies = world.dp_cp if self.spec.policy.zero == 0 else world.replicas
        return super().make_counted() if copies.rank else list(self.shards)


FAULTS: dict[str, type[Trainer]] = {
    "loss-divisor": _LossDivisor,
    # First and last stage update their copies of the embedding from their own gradients.
    "tied-grad": fewer_sums("embedding"),
    "cp-positions": _CpPositions,
    # Norm weights see only their rank's part of the sequence.
    "norm-grad": fewer_sums("tp", "norm."),
    "layer-skip": _LayerSkip,
    "kv-head": _KvHead,
    "stale-weight": _StaleWeight,
    "norm-twice": _NormTwice,
}
