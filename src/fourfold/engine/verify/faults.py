"""Does the comparison see mistakes? Eight real ones, planted in the parallel path on request.

Each is a mistake people have shipped. It is planted before the model gets its storage, by replacing
one step of the trainer; where a layout has no such step the fault cannot act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fourfold.engine.compat import activation_dtype
from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.model.positions import Tables, make_tables
from fourfold.engine.parallel.shards import Rect, Shard
from fourfold.engine.training.gradients import SharedGradients
from fourfold.engine.training.trainer import Trainer


def _loss_divisor(trainer: Trainer) -> None:
    """Each rank divides by its own number of targets, as if all had the same."""

    def count_targets(targets: list[Tensor]) -> Tensor:
        own = torch.stack([(t != IGNORE).sum() for t in targets]).sum()
        return own.clamp(min=1) * trainer.world.dp_cp.size

    trainer.count_targets = count_targets


def _without(trainer: Trainer, dropped: Callable[[SharedGradients, Shard], bool]) -> None:
    """Leave some pieces out of the sums over ranks that share weights."""
    make = trainer.make_shared

    def make_shared() -> list[SharedGradients]:
        left = (
            replace(sums, shards=tuple(shard for shard in sums.shards if not dropped(sums, shard)))
            for sums in make()
        )
        return [sums for sums in left if sums.shards]

    trainer.make_shared = make_shared


def _tied_grad(trainer: Trainer) -> None:
    """First and last stage update their copies of the embedding from their own gradients."""
    _without(trainer, lambda shared, shard: shared.group.axis == "embedding")


def _norm_grad(trainer: Trainer) -> None:
    """Norm weights see only their rank's part of the sequence."""
    _without(trainer, lambda shared, shard: shared.group.axis == "tp" and "norm." in shard.name)


def _cp_positions(trainer: Trainer) -> None:
    """Every context rank counts its tokens from 0."""
    world, model = trainer.world, trainer.spec.model
    each = model.heads // world.tp.size

    def make() -> Tables:
        own = torch.arange(trainer.positions.numel(), device=trainer.device)
        heads = range(world.tp.rank * each, (world.tp.rank + 1) * each)
        dtype = activation_dtype(trainer.spec.policy.dtypes.compute)
        return make_tables(model, own, heads, dtype)

    trainer.make_tables = make


def _layer_skip(trainer: Trainer) -> None:
    """The cut between stages loses the layer before it."""
    for chunk in trainer.chunks:
        if not chunk.is_last:
            *_, last = chunk.layers.values()
            last.forward = lambda x, tables: x


def _kv_head(trainer: Trainer) -> None:
    """KV heads are dealt round robin over ranks, not in blocks as the query heads are."""
    make, model, rank = trainer.make_shards, trainer.spec.model, trainer.world.tp.rank

    def moved(shard: Shard) -> Shard:
        if shard.shared != "kv":
            return shard
        size = model.head_size
        start = rank % model.kv_heads * size + shard.rect.rows[0] % size
        rows = (start, start + shard.rect.rows[1] - shard.rect.rows[0])
        return replace(shard, rect=Rect(rows, shard.rect.columns))

    trainer.make_shards = lambda: [moved(shard) for shard in make()]


def _stale_weight(trainer: Trainer) -> None:
    """Gathered weights outlive the update: the next step computes with the old ones."""
    original = trainer.before_backward

    def before_backward(chunk: Decoder, kind: str, last: bool) -> None:
        original(chunk, kind, last)
        if trainer.world.dp_cp.size > 1:
            assert isinstance(chunk, FSDPModule)
            chunk.set_reshard_after_backward(False)

    trainer.before_backward = before_backward


def _norm_twice(trainer: Trainer) -> None:
    """Weights that tensor ranks share, and a tied embedding's copy, count as often as held."""
    make = trainer.make_counted
    world, zero = trainer.world, trainer.spec.policy.zero
    copies = world.dp_cp if zero == 0 else world.replicas
    trainer.make_counted = lambda: make() if copies.rank else list(trainer.shards)


FAULTS: dict[str, Callable[[Trainer], None]] = {
    "loss-divisor": _loss_divisor,
    "tied-grad": _tied_grad,
    "cp-positions": _cp_positions,
    "norm-grad": _norm_grad,
    "layer-skip": _layer_skip,
    "kv-head": _kv_head,
    "stale-weight": _stale_weight,
    "norm-twice": _norm_twice,
}
