"""A router: which experts a token goes to, with what scores, and what keeps experts balanced.

Shapes: T tokens, E experts, K chosen of them. Parallelism replaces `sum_over_sequence` and
`whole_sequence`, since a rank may hold only part of its sequences.

On a GPU its products need no wide copies of tokens (N of them, D hidden), its choice one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.engine.compat import kernels
from fourfold.spec.experts import Moe
from fourfold.spec.model import ModelShape


def power(number: int) -> int:
    """The next power of two, which is what a block of a GPU kernel must be."""
    return 1 << (number - 1).bit_length()


@torch.library.custom_op("fourfold::best_experts", mutates_args=())
def best_experts(scores_NE: Tensor, count: int) -> Tensor:
    """The `count` largest scores of each token, as int32; of equals the first."""
    ranked = scores_NE.sort(dim=-1, descending=True, stable=True).indices
    return ranked[:, :count].to(torch.int32)


@best_experts.register_fake
def _(scores_NE: Tensor, count: int) -> Tensor:
    return scores_NE.new_empty((scores_NE.shape[0], count), dtype=torch.int32)


@best_experts.register_kernel("cuda")
def _(scores_NE: Tensor, count: int) -> Tensor:
    tokens, experts = scores_NE.shape
    ids = scores_NE.new_empty((tokens, count), dtype=torch.int32)
    width = power(experts)
    block = max(1, 4096 // width)
    grid = (-(-tokens // block),)
    kernels().best[grid](
        scores_NE.contiguous(), ids, tokens, experts, K=count, E=width, TOKENS=block
    )
    return ids


def best_of(scores_NE: Tensor, count: int) -> Tensor:
    return best_experts(scores_NE, count).long()


class _RouterProduct(torch.autograd.Function):
    """A router's logits in fp32 of inputs in bf16, whose products are exact in fp32: they need not
    be made wide first. Gradients, which come in fp32, go in two halves of 8 bits each."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        return _mm(x_ND, weight_ED.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        high = grads[0].to(x.dtype)
        halves = torch.cat((high, (grads[0] - high).to(x.dtype)), dim=1)
        grad_weight = _mm(halves.t(), x).unflatten(0, (2, -1)).sum(0)
        return halves @ torch.cat((weight, weight)), grad_weight.to(weight.dtype)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    """Narrow values, summed and kept in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def router_product(x_BSD: Tensor, weight_ED: Tensor) -> Tensor:
    if x_BSD.dtype != torch.bfloat16 or weight_ED.dtype != torch.bfloat16:
        return wide_product(x_BSD, weight_ED)
    logits = _RouterProduct.apply(x_BSD.flatten(0, -2), weight_ED)
    return logits.unflatten(0, x_BSD.shape[:-1])


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _WideProduct(torch.autograd.Function):
    """Keeps tokens as they came: a wide copy would be as large as two layers' residuals."""

    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_BSD, weight_ED)
        return F.linear(_wide(x_BSD), _wide(weight_ED))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_weight = grad.t() @ _wide(x).flatten(0, -2)
        return (grads[0] @ _wide(weight)).to(x.dtype), grad_weight.to(weight.dtype)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    return _WideProduct.apply(x, weight)


def best(scores: Tensor, count: int) -> Tensor:
    return scores.topk(count, -1).indices


def counted(ids: Tensor, kinds: int) -> Tensor:
    """How often each of 0 to `kinds` - 1 is there; unlike torch's own it does not wait."""
    ids = ids.long()
    return ids.new_zeros(kinds).scatter_add_(0, ids, torch.ones_like(ids))


def _same(x: Tensor) -> Tensor:
    return x


class NotedScores(torch.autograd.Function):
    """Scores as they are. Backwards, which happens once however often the forward pass is repeated,
    the router counts its tokens, and the losses of balance get their gradient. Padding is not
    counted, as it was when the forward pass first ran: recompute may fall into another batch."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor, counts: Tensor, router: Router) -> Tensor:
        ctx.router, ctx.is_padding = router, router.is_padding
        ctx.save_for_backward(loss.detach(), counts)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        loss, counts = ctx.saved_tensors
        if ctx.is_padding:
            return grads[0], torch.zeros_like(loss), None, None
        ctx.router.note(loss, counts)
        scale = ctx.router.loss_scale
        return grads[0], torch.ones_like(loss) if scale is None else scale.to(loss), None, None


class Router(nn.Module):
    """Chooses experts, in fp32 whatever layers compute in. `choice_bias` and `load` (each expert's
    share of the tokens of the batch before) are state: no gradient, changed once a step. `tokens`
    are those of the global batch. `seen` (tokens that chose each expert, then choices dropped) and
    `losses` add up over a step. `own_places`: where this rank's tokens lie in their sequences."""

    choice_bias: nn.Parameter | None
    load: nn.Parameter
    product: Callable[[Tensor, Tensor], Tensor] = staticmethod(wide_product)
    best: Callable[[Tensor, int], Tensor] = staticmethod(best)
    sum_over_sequence: Callable[[Tensor], Tensor] = staticmethod(_same)
    whole_sequence: Callable[[Tensor], Tensor] = staticmethod(_same)
    own_places: Tensor | None = None
    is_padding = False
    loss_scale: Tensor | None = None
    forced_from: int | None = None
    seen: Tensor | None = None
    losses: Tensor | None = None

    def __init__(self, shape: ModelShape, moe: Moe) -> None:
        super().__init__()
        self.moe, self.experts, self.top_k = moe, shape.experts, shape.top_k
        self.tokens, self.sequence_parts = 1, 1
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.load = nn.Parameter(torch.empty(shape.experts), requires_grad=False)
        biased = moe.choice_bias
        self.choice_bias = nn.Parameter(torch.empty_like(self.load), False) if biased else None

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """([T, K] experts, [T, K] scores). A choice that was dropped is expert E: nobody."""
        logits = self.product(x_BSD, self.weight).flatten(0, 1)
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        chosen = self._chosen(scores)
        taken = scores.gather(-1, chosen)
        if self.moe.normalised:
            taken = taken / (taken.sum(-1, keepdim=True) + 1e-20)
        taken = taken * self.moe.scale
        counts = counted(chosen.flatten(), self.experts + 1)
        sent = chosen
        if self.moe.capacity:
            sent = self._within_capacity(chosen.unflatten(0, (x_BSD.shape[0], -1)))
            counts[-1] = (sent == self.experts).sum()
        if torch.is_grad_enabled():
            taken = NotedScores.apply(taken, self.loss(x_BSD, logits, scores, chosen), counts, self)
        return sent, taken

    @torch.no_grad()
    def _within_capacity(self, chosen_BSK: Tensor) -> Tensor:
        """Each expert takes a sequence's tokens in their order, until it is full."""
        whole = self.whole_sequence(chosen_BSK)
        batch, length, top_k = whole.shape
        most = math.ceil(self.moe.capacity * top_k * length / self.experts)
        taken = whole.new_zeros(batch, length, self.experts).scatter_(2, whole, 1)
        number = taken.cumsum(1).gather(2, whole)
        sent = torch.where(number <= most, whole, self.experts)
        own = sent if self.own_places is None else sent[:, self.own_places]
        return own.flatten(0, 1)

    @torch.no_grad()
    def _chosen(self, scores: Tensor) -> Tensor:
        if self.forced_from is not None:
            each = torch.arange(scores.shape[0] * self.top_k, device=scores.device)
            return ((each + self.forced_from) % self.experts).view(-1, self.top_k)
        moe = self.moe
        rank = scores if self.choice_bias is None else scores + self.choice_bias.to(scores)
        if moe.groups > 1:
            grouped = rank.unflatten(-1, (moe.groups, -1))
            best = grouped.topk(2 if moe.group_score == "best-two" else 1, -1).values.sum(-1)
            groups = best.topk(moe.group_top_k, -1).indices
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, groups, True)
            rank = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        return self.best(rank, self.top_k)

    def loss(self, x_BSD: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """This rank's part of the losses over the global batch."""
        moe, size, total = self.moe, x_BSD.shape[0], scores.new_zeros(())
        if moe.z_weight:
            total = total + moe.z_weight * logits.logsumexp(-1).square().sum() / self.tokens
        if moe.balance == "none" or not moe.balance_weight:
            return total
        shares = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        if moe.balance == "batch":
            balance = (self.load.to(shares) * shares.sum(0)).sum()
        else:
            length = x_BSD.shape[1] * self.sequence_parts
            rows = chosen.view(size, -1)
            counts = rows.new_zeros(size, self.experts).scatter_add_(1, rows, torch.ones_like(rows))
            counts = self.sum_over_sequence(counts).to(shares) / (self.top_k * length)
            balance = (counts * shares.unflatten(0, (size, -1)).sum(1)).sum()
        return total + moe.balance_weight * self.experts * balance / self.tokens

    @torch.no_grad()
    def note(self, loss: Tensor, counts: Tensor) -> None:
        self.losses = loss if self.losses is None else self.losses + loss
        self.seen = counts if self.seen is None else self.seen + counts

    @torch.no_grad()
    def take_up(self, counts: Tensor, keep: Tensor | None = None) -> None:
        """`counts` of the whole batch: the next batch is balanced by them. `keep` is 1 where the
        step was thrown away."""
        counts = counts[: self.experts]
        load = counts.to(self.load.dtype) / counts.sum().clamp(min=1)
        moved = (counts.sum() - counts * self.experts).sign() * self.moe.bias_rate
        for state, new in ((self.load, load), (self.choice_bias, moved)):
            if state is not None:
                value = new.to(state) if state is self.load else state + new.to(state)
                state.copy_(value if keep is None else torch.where(keep > 0, state, value))
