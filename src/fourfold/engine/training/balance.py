"""What a step does for the balance of experts: adds up each router's losses and tokens, and moves
its state once, after the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.expert_groups import expert_groups
from fourfold.engine.parallel.groups import World
from fourfold.result.report import ExpertLoad


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

    def add_losses(self, loss: Tensor) -> Tensor:
        """The rank's own part of the loss, with that of its routers."""
        losses = [router.losses for router in self.routers if router.losses is not None]
        return loss if not losses else loss + torch.stack(losses).sum()

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
