"""Experts as their formulas say, for the reference: scores of all tokens, a mask of who chose whom,
one expert after another, and losses that autograd sees. Nothing here is the engine's own routing.

Shapes: B sequences of S tokens, T = B x S, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.model.router import Router
from fourfold.engine.verify.plain_muon import MuonGuess
from fourfold.spec.experts import Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What an engine may do instead, one at a time: where its numbers are those of a guess, the
    fault has a name. `parts`: which tokens an engine sees at once, as a number for each [B, S]."""

    scores: Literal["once", "never", "twice", "without gradient"] = "once"
    balance: Literal["right", "left out", "by part"] = "right"
    keeps: Literal["first", "last"] = "first"
    parts: Tensor | None = None
    muon: MuonGuess | None = None


@dataclass(slots=True)
class RoutedStep:
    """What routers of one process did in a step: losses, tokens by expert and then choices dropped,
    and how much better the last chosen score was than the next, relative to the best."""

    tokens: int
    losses: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    margin: float = math.inf

    def loss(self, guess: Guess) -> Tensor | float:
        """Reported in either case; it may have been left out of the gradient."""
        left_out = guess.balance == "left out"
        return sum(loss.detach() if left_out else loss for loss in self.losses)


class PlainExperts(nn.Module):
    """Computes with the weights of `mlp`, in its place. `step` is set before each."""

    def __init__(self, mlp: MoeMlp, guess: Guess) -> None:
        super().__init__()
        self.mlp, self.guess = mlp, guess
        self.moe: Moe = mlp.router.moe
        self.experts, self.top_k = mlp.router.experts, mlp.router.top_k
        self.step = RoutedStep(1)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, 1)
        router, moe = self.mlp.router, self.moe
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = x_TD.to(wide) @ router.weight.to(wide).T
        scores_TE = torch.softmax(logits_TE, -1) if moe.score == "softmax" else logits_TE.sigmoid()
        chosen_TE = self.chosen(scores_TE.detach())
        gates_TE = torch.where(chosen_TE, scores_TE, 0)
        if moe.normalised:
            gates_TE = gates_TE / (gates_TE.sum(-1, keepdim=True) + 1e-20)
        gates_TE = self._guessed(gates_TE * moe.scale)
        sent_TE = self.within_capacity(chosen_TE.unflatten(0, x_BSD.shape[:2])).flatten(0, 1)
        dropped = (chosen_TE & ~sent_TE).sum()
        self.step.counts.append(torch.cat([chosen_TE.sum(0), dropped[None]]))
        self.step.losses.append(self.loss(x_BSD.shape[:2], logits_TE, scores_TE, chosen_TE))
        y_BSD = self.computed(x_TD, gates_TE, sent_TE).view_as(x_BSD)
        if self.mlp.shared is None:
            return y_BSD
        shared = self.mlp.shared(x_BSD)
        if self.mlp.shared_gate is not None:
            shared = (x_BSD @ self.mlp.shared_gate.weight.T).sigmoid() * shared
        return y_BSD + shared

    def _guessed(self, gates_TE: Tensor) -> Tensor:
        match self.guess.scores:
            case "never":
                return torch.ones_like(gates_TE)
            case "twice":
                return gates_TE * gates_TE
            case "without gradient":
                return gates_TE.detach()
            case _:
                return gates_TE

    def chosen(self, scores_TE: Tensor) -> Tensor:
        """A mask: the best `top_k` of the best groups."""
        moe, bias = self.moe, self.mlp.router.choice_bias
        rank = scores_TE if bias is None else scores_TE + bias.to(scores_TE)
        if moe.groups > 1:
            by_group = rank.unflatten(-1, (moe.groups, -1)).sort(-1, descending=True).values
            best = by_group[..., : 2 if moe.group_score == "best-two" else 1].sum(-1)
            allowed = self._best(best, moe.group_top_k)
            rank = rank.masked_fill(
                ~allowed.repeat_interleave(self.experts // moe.groups, -1), -math.inf
            )
        return self._best(rank, self.top_k)

    def _best(self, values: Tensor, count: int) -> Tensor:
        """The `count` largest of each row as a mask; how close the next one was is noted."""
        ordered, order = values.sort(dim=-1, descending=True, stable=True)
        if count < values.shape[-1]:
            last, next_one = ordered[:, count - 1], ordered[:, count]
            gap = ((last - next_one) / ordered[:, 0].abs()).min()
            self.step.margin = min(self.step.margin, float(gap))
        mask = torch.zeros_like(values, dtype=torch.bool)
        return mask.scatter(-1, order[:, :count], True)

    def within_capacity(self, chosen_BSE: Tensor) -> Tensor:
        """An expert takes the first tokens of a sequence, up to its share times `capacity`."""
        if not self.moe.capacity:
            return chosen_BSE
        length = chosen_BSE.shape[1]
        most = math.ceil(self.moe.capacity * self.top_k * length / self.experts)
        number = chosen_BSE.long().cumsum(1)
        if self.guess.keeps == "last":
            number = chosen_BSE.flip(1).long().cumsum(1).flip(1)
        return chosen_BSE & (number <= most)

    def computed(self, x_TD: Tensor, gates_TE: Tensor, sent_TE: Tensor) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        inner, outer = self.mlp.experts.gate_up.weight, self.mlp.experts.down.weight
        halves = zip(inner.chunk(self.experts), outer.chunk(self.experts), strict=True)
        for e, (gate_up, down) in enumerate(halves):
            rows = sent_TE[:, e].nonzero()[:, 0]
            gate, up = (x_TD[rows] @ gate_up.T).chunk(2, -1)
            act = F.silu(gate) * up
            act = (act * gates_TE[rows, e, None]).to(act.dtype)
            y_TD = y_TD.index_add(0, rows, act @ down.T)
        return y_TD

    def loss(self, size: Any, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Of all tokens of the batch: what keeps logits small, and experts balanced."""
        moe, tokens = self.moe, self.step.tokens
        total = moe.z_weight * logits.logsumexp(-1).square().sum() / tokens
        if moe.balance == "none":
            return total
        shares = (scores / scores.sum(-1, keepdim=True)).unflatten(0, size)
        picked = chosen.unflatten(0, size).to(shares)
        if self.guess.balance == "by part" and self.guess.parts is not None:
            parts = [self.guess.parts == part for part in self.guess.parts.unique()]
            load = torch.stack([picked[part].mean(0) for part in parts]) / self.top_k
            summed = torch.stack([shares[part].sum(0) for part in parts])
        elif moe.balance == "batch":
            load, summed = self.mlp.router.load.to(shares), shares.sum((0, 1))
        else:
            load, summed = picked.mean(1) / self.top_k, shares.sum(1)
        return total + moe.balance_weight * self.experts * (load * summed).sum() / tokens


@torch.no_grad()
def take_up(router: Router, counts: Tensor) -> None:
    """Shares of tokens, for the next step; and the bias, towards experts with too few of them."""
    counts = counts[: router.experts]
    router.load.copy_(counts.double() / counts.sum())
    if router.choice_bias is not None:
        even = counts.sum() - counts * router.experts
        router.choice_bias.add_(even.sign().to(router.choice_bias), alpha=router.moe.bias_rate)


def make_plain(decoder: Decoder, guess: Guess) -> list[PlainExperts]:
    """Let a model compute its experts this way."""
    made = []
    for layer in decoder.blocks.values():
        if isinstance(layer.mlp, MoeMlp):
            plain = PlainExperts(layer.mlp, guess)
            layer.mlp.forward = plain.forward
            made.append(plain)
    return made
