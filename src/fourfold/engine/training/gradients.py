"""What is left to do with gradients after FSDP: sums over ranks that share weights, the global
norm, and the scale of the loss in fp16. And with routers of experts: their losses and tokens are
added up, and their state moves once, after the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine import compat
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.expert_groups import expert_groups
from fourfold.engine.parallel.groups import Group, World
from fourfold.engine.parallel.shards import Shard
from fourfold.result.report import ExpertLoad
from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True)
class SharedGradients:
    """Pieces whose gradients are partial on each rank of a group: one flat sum for all of them."""

    group: Group
    shards: tuple[Shard, ...]

    @torch.no_grad()
    def sum(self) -> None:
        # Zeros that belong to nobody where the backward pass never reached a shard.
        grads = [torch.zeros_like(s.values) if s.grad is None else s.grad for s in self.shards]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=self.group.handle)
        at = 0
        for grad in grads:
            grad.copy_(flat[at : at + grad.numel()].view_as(grad))
            at += grad.numel()


def shared_gradients(shards: Sequence[Shard], spec: RunSpec, world: World) -> list[SharedGradients]:
    """In the order they are summed. Which they are:

    tp    norms, row-cut biases and learned positions under sequence parallelism: each rank saw only
          its part of the sequence (without it all ranks compute the same whole gradient)
    heads norms of queries and keys with one weight for all heads: each rank saw only its heads
    kv    a KV head kept on several ranks: each saw only its own queries
    ends  a tied embedding on the first and the last stage: one saw tokens, the other logits
    """
    kv = world.kv_group(spec.model)
    shards = [shard for shard in shards if shard.param.requires_grad]
    sums: list[tuple[Group | None, list[Shard]]] = []
    if spec.policy.sequence_parallel:
        sums.append((world.tp, [shard for shard in shards if shard.shared == "tp"]))
    sums.append((world.tp, [shard for shard in shards if shard.shared == "heads"]))
    sums.append((kv, [shard for shard in shards if shard.shared == "kv"]))
    if spec.model.tied:
        sums.append(
            (world.embedding, [shard for shard in shards if shard.name == "embedding.weight"])
        )
    return [
        SharedGradients(group, tuple(partial))
        for group, partial in sums
        if group is not None and partial
    ]


def counted_once(shards: Sequence[Shard], spec: RunSpec, world: World) -> list[Shard]:
    """Pieces this rank adds to the global norm, so that over all ranks every value counts once."""
    whole = spec.policy.zero == 0
    if (world.dp_cp if whole else world.replicas).rank > 0:
        shards = [shard for shard in shards if shard.shared == "experts"]
    replica = world.place["dp"] // world.layout.shard
    holds_first = replica == 0 and (not whole or world.layout.expert_place(world.rank)[0] == 0)
    kv = world.kv_group(spec.model)
    tp_first = world.tp.rank == 0
    first = {
        "none": True,
        "tp": tp_first,
        "heads": tp_first,
        "kv": kv is None or kv.rank == 0,
        "experts": holds_first,
    }
    tied_copy = spec.model.tied and not world.is_first
    return [
        shard
        for shard in shards
        if first[shard.shared] and not (tied_copy and shard.name == "embedding.weight")
    ]


def squares(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Sum of squares of the pieces' gradients, fp64, no host synchronisation."""
    grads = [shard.grad for shard in shards if shard.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack(compat.foreach_norm(grads, 2, wide))
    return norms.to(torch.float64).square().sum()


def clip_factor(
    norm: Tensor, max_norm: float | None, loss_scale: Tensor | None = None
) -> Tensor | None:
    """What all gradients are multiplied by so that the global norm is at most `max_norm` (torch's
    formula), and back from the scale of the loss; None: nothing. `norm` is without that scale."""
    if max_norm is None and loss_scale is None:
        return None
    factor = torch.ones_like(norm)
    if max_norm is not None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return factor if loss_scale is None else factor / loss_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """Powers of two, so that scaling rounds nothing. Below `smallest` the scale has collapsed:
    gradients overflow that nobody made larger."""

    initial: float = 2.0**16
    interval: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**32


class LossScaler:
    """A large loss gives fp16 gradients that are not too small (Micikevicius et al. 2018). `scale`
    and `good` (steps since it last changed) are tensors on the device; all ranks see the same norm,
    so all decide the same, and nothing waits for the device."""

    def __init__(self, settings: ScalerSettings, device: torch.device) -> None:
        self.settings = settings
        self.scale = torch.tensor(settings.initial, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int64, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscaled(self, value: Tensor) -> Tensor:
        return value / self.scale

    def overflow(self, norm: Tensor) -> Tensor:
        """1 where the global norm says that some gradient is not finite, else 0."""
        return (~torch.isfinite(norm)).to(torch.float32)

    def update(self, overflow: Tensor) -> None:
        """After a step: halve, double, or keep the scale."""
        bad = overflow > 0
        good = torch.where(bad, 0, self.good + 1)
        grown = good >= self.settings.interval
        scale = torch.where(grown, self.scale * 2, self.scale).clamp(max=self.settings.largest)
        self.scale.copy_(torch.where(bad, self.scale / 2, scale))
        self.good.copy_(torch.where(grown, 0, good))

    def collapsed(self) -> bool:
        """Waits for the device."""
        return float(self.scale) < self.settings.smallest

    def scalars(self) -> dict[str, float]:
        """What a checkpoint must hold; waits for the device."""
        return {"loss_scale": float(self.scale), "loss_scale_good_steps": float(self.good)}

    def restore(self, scalars: dict[str, float]) -> None:
        """Take what `scalars` gave; a checkpoint of another precision has none: start anew."""
        self.scale.fill_(scalars.get("loss_scale", self.settings.initial))
        self.good.fill_(int(scalars.get("loss_scale_good_steps", 0)))


class Balance:
    """The routers of this rank. `counts`: tokens of the last batch by router and expert, and how
    many choices were dropped; `total`: of all batches since `forget`."""

    def __init__(self, chunks: Sequence[Decoder], world: World) -> None:
        self.routers = [router for chunk in chunks for router in chunk.routers]
        self.group = expert_groups(world).stage if self.routers else None
        self.layers = [i for c in chunks for i, layer in c.blocks.items() if layer.has_experts]
        self.counts: Tensor | None = None
        self.total: Tensor | None = None

    def begin(self, tokens: int, loss_scale: Tensor | None) -> None:
        for router in self.routers:
            router.tokens, router.loss_scale = tokens, loss_scale
            router.seen = router.losses = None

    def enter(self, chunk: Decoder, *, is_padding: bool) -> None:
        """A forward pass of a micro batch begins; all of its sequences count, or none."""
        for router in chunk.routers if self.routers else ():
            router.is_padding = is_padding

    def losses(self) -> list[Tensor]:
        """What this rank's routers have added to the loss; none where no token came by."""
        return [router.losses for router in self.routers if router.losses is not None]

    @torch.no_grad()
    def sum_counts(self) -> None:
        """Over all ranks that hold these layers: once a step."""
        if self.group is None:
            return
        load = self.routers[0].load
        none = load.new_zeros(load.numel() + 1, dtype=torch.int64)
        seen = [none if router.seen is None else router.seen for router in self.routers]
        self.counts = torch.stack(seen)
        if self.group.size > 1:
            dist.all_reduce(self.counts, group=self.group.handle)
        self.total = self.counts if self.total is None else self.total + self.counts

    def forget(self) -> None:
        self.total = None

    def loads(self) -> tuple[ExpertLoad, ...]:
        """How even tokens were in each layer; waits for the device."""
        if self.total is None:
            return ()
        found = zip(self.layers, self.total.double().cpu(), strict=True)
        return tuple(_load(layer, counts) for layer, counts in found)

    def take_up(self, overflow: Tensor | None) -> None:
        if self.counts is not None:
            for router, counts in zip(self.routers, self.counts, strict=True):
                router.take_up(counts, overflow)


def _load(layer: int, counts: Tensor) -> ExpertLoad:
    tokens, choices = counts[:-1], float(counts[:-1].sum())
    mean = max(choices / tokens.numel(), 1e-9)
    return ExpertLoad(
        layer=layer,
        largest=float(tokens.max()) / mean,
        spread=float(tokens.std(correction=0)) / mean,
        dropped=float(counts[-1]) / max(choices, 1.0),
    )
