"""A router on a GPU: its products without wide copies of tokens, its choice in one kernel.

N tokens, D hidden, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.engine.model.router import wide_product


def expert_kernels() -> Any:
    """triton comes with torch for GPUs only, so they are imported late."""
    from fourfold.engine.model import triton_experts

    return triton_experts


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
    expert_kernels().best[grid](
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
