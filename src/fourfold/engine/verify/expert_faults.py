"""Mistakes with experts that people have shipped, planted to prove that verify sees and names them.
Where a layout or model has no such step the fault cannot act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.model.router import Router
from fourfold.engine.parallel.expert_groups import expert_groups
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import Shard
from fourfold.engine.training.gradients import Balance
from fourfold.engine.training.step import StepOutcome
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.faults import fewer_sums


class _Moe(Trainer):
    """Reaches what experts are made of."""

    @property
    def mlps(self) -> list[MoeMlp]:
        layers = (layer for chunk in self.chunks for layer in chunk.blocks.values())
        return [layer.mlp for layer in layers if isinstance(layer.mlp, MoeMlp)]

    @property
    def of_experts(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.shared == "experts"]

    @property
    def expert_rank(self) -> int:
        return self.spec.layout.expert_place(self.world.rank)[1]


class _ExpertScale(_Moe):
    """Gradients of experts are summed over ep ranks that all have the whole sum already."""

    def reduce(self, loss: Tensor) -> StepOutcome:
        for shard in self.of_experts:
            if shard.grad is not None:
                shard.grad.mul_(self.spec.layout.ep)
        return super().reduce(loss)


class _ExpertGroup(_Moe):
    """Gradients of experts are summed over the ranks that other weights are."""

    def reduce(self, loss: Tensor) -> StepOutcome:
        if self.mlps and self.spec.layout.ep > 1:
            group = expert_groups(self.world).dispatch
            for shard in self.of_experts:
                if shard.grad is not None:
                    dist.all_reduce(shard.grad, group=group.handle)
        return super().reduce(loss)


class _ExpertNorm(_Moe):
    """The norm leaves out experts of other ranks: clipping is too weak."""

    def make_counted(self) -> list[Shard]:
        counted = super().make_counted()
        return [s for s in counted if s.shared != "experts" or self.expert_rank == 0]


class _ExpertNormTwice(_Moe):
    """Copies of experts count as often as held."""

    def make_counted(self) -> list[Shard]:
        rest = [s for s in super().make_counted() if s.shared != "experts"]
        return rest + self.of_experts


def _scored(changed: Callable[[Tensor], Tensor]) -> type[Trainer]:
    """Experts get other scores than the router gave."""

    class Scored(_Moe):
        def materialize(self, *, initial: bool = True) -> None:
            for mlp in self.mlps:
                mlp.router.register_forward_hook(lambda _, x, out: (out[0], changed(out[1])))
            super().materialize(initial=initial)

    return Scored


class _SharedSum(_Moe):
    """Shared experts are reduced as experts are: tokens of other ep ranks do not count."""

    def materialize(self, *, initial: bool = True) -> None:
        for mlp in self.mlps:
            if mlp.shared is not None and self.expert_rank:
                mlp.shared.forward = _unmoved(mlp.shared)
        super().materialize(initial=initial)


def _unmoved(module: nn.Module) -> Any:
    """Its forward, whose gradients of weights are 0."""
    forward = module.forward

    def unmoved(x: Tensor) -> Tensor:
        weights = {n: p.detach() + 0 * p for n, p in module.named_parameters()}
        module.forward = forward
        try:
            return functional_call(module, weights, (x,))
        finally:
            module.forward = unmoved

    return unmoved


class _Losses(_Moe):
    """Routers have other losses."""

    def change(self, router: Router) -> None:
        raise NotImplementedError

    def materialize(self, *, initial: bool = True) -> None:
        super().materialize(initial=initial)
        for mlp in self.mlps:
            self.change(mlp.router)


class _BalanceMicro(_Losses):
    """A router balances what it sees: its rank's micro batch, or part of a sequence."""

    def change(self, router: Router) -> None:
        whole = router.loss
        router.sum_over_sequence, router.sequence_parts = lambda counts: counts, 1

        def of_part(x_BSD: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
            counts = torch.bincount(chosen.flatten(), minlength=router.experts)
            before, router.load = router.load, nn.Parameter(counts / counts.sum(), False)
            loss = whole(x_BSD, logits, scores, chosen)
            router.load = before
            return loss

        router.loss = of_part


class _ByRank(Balance):
    """Losses are divided by the tokens of the rank, not of the batch."""

    def begin(self, tokens: int, loss_scale: Tensor | None) -> None:
        size = 1 if self.group is None else self.group.size
        super().begin(tokens // size, loss_scale)


class _Lost(Balance):
    """Losses are reported, but no part of what is differentiated."""

    def begin(self, tokens: int, loss_scale: Tensor | None) -> None:
        super().begin(tokens, torch.zeros(()))


class _OwnCounts(Balance):
    """Every rank counts its own tokens only."""

    def __init__(self, chunks: Sequence[Decoder], world: World) -> None:
        super().__init__(chunks, world)
        self.group = world.this_rank if self.routers else None


class _Twice(Balance):
    """The bias moves with every forward pass, and recompute has two."""

    def take_up(self, overflow: Tensor | None) -> None:
        super().take_up(overflow)
        super().take_up(overflow)


def _with(balance: type[Balance]) -> type[Trainer]:
    class Other(Trainer):
        def make_balance(self) -> Balance:
            return balance(self.chunks, self.world)

    return Other


class _DropOrder(_Losses):
    """A full expert drops the tokens that came first."""

    def change(self, router: Router) -> None:
        whole, own, length = router.whole_sequence, router.own_places, self.spec.batch.seq_len
        places = torch.arange(length) if own is None else own
        router.whole_sequence = lambda chosen: whole(chosen).flip(1)
        router.own_places = length - 1 - places


class _IdleDecay(_Moe):
    """An expert without tokens has no gradient, and the optimizer passes it over."""

    def update(self, norm: Tensor) -> None:
        kept = [(s, s.values.clone()) for s in self.of_experts if self._is_idle(s)]
        super().update(norm)
        for shard, values in kept:
            shard.values.copy_(values)

    def _is_idle(self, shard: Shard) -> bool:
        return shard.grad is None or not bool(shard.grad.any())


EXPERT_FAULTS: dict[str, type[Trainer]] = {
    "expert-scale": _ExpertScale,
    "expert-group": _ExpertGroup,
    "expert-norm": _ExpertNorm,
    "expert-norm-twice": _ExpertNormTwice,
    # Routers see only their rank's part of the sequence.
    "router-sum": fewer_sums("tp", ".router."),
    "scores-left": _scored(lambda scores: torch.ones_like(scores) + 0 * scores),
    "scores-twice": _scored(lambda scores: scores * scores),
    # They travel by a collective that autograd does not see.
    "scores-cut": _scored(lambda scores: scores.detach() + 0 * scores),
    "shared-sum": _SharedSum,
    "balance-micro": _BalanceMicro,
    "balance-scale": _with(_ByRank),
    "balance-lost": _with(_Lost),
    "balance-rank": _with(_OwnCounts),
    "bias-twice": _with(_Twice),
    "drop-order": _DropOrder,
    "idle-decay": _IdleDecay,
}
