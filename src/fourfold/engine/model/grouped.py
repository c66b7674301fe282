"""Experts on one device, with as few passes over memory as there are products: rows are gathered in
the order of experts, multiplied in groups, and added up per token. Counts stay on the device, so
nothing waits for them.

N tokens, D hidden, E experts, K experts of a token, R = N x K rows, F width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.experts import Experts, MoeMlp, dispatch_local
from fourfold.engine.model.router import best_of, router_product
from fourfold.engine.model.rows import (
    order_rows,
    put_rows,
    swiglu_rows,
    swiglu_rows_backward,
    take_rows,
)


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Products of groups: rows of `left` up to ends[e] with right[e], or, where both have two
    dimensions, columns of `left` with rows of `right` up to ends[e]: one product a group. fp64,
    which torch's kernel does not take, one by one."""
    if left.dtype != torch.float64:
        return F.grouped_mm(left, right, offs=ends)
    cuts = ends[:-1].cpu().long()
    if right.ndim == 3:
        parts = left.tensor_split(cuts)
        return torch.cat([part @ each for part, each in zip(parts, right, strict=True)])
    pairs = zip(left.tensor_split(cuts, dim=1), right.tensor_split(cuts), strict=True)
    return torch.stack([one @ other for one, other in pairs])


class _GroupedExperts(torch.autograd.Function):
    """Keeps rows and what comes out of the first product; the activation is made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, *order: Tensor
    ) -> Tensor:
        source, place, ends = order
        choices = scores.shape[1]
        rows = take_rows(x, place, choices)
        hidden = grouped_mm(rows, gate_up.transpose(-2, -1), ends)
        acted = swiglu_rows(hidden, scores, source)
        out = grouped_mm(acted, down.transpose(-2, -1), ends)
        ctx.save_for_backward(rows, hidden, scores, gate_up, down, source, place, ends)
        return put_rows(out, place, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, scores, gate_up, down, source, place, ends = ctx.saved_tensors
        choices = scores.shape[1]
        grad_out = take_rows(grads[0], place, choices)
        grad_acted = grouped_mm(grad_out, down, ends)
        grad_hidden, acted, grad_scores = swiglu_rows_backward(hidden, scores, source, grad_acted)
        grad_down = grouped_mm(grad_out.transpose(-2, -1), acted, ends)
        grad_rows = grouped_mm(grad_hidden, gate_up, ends)
        grad_gate_up = grouped_mm(grad_hidden.transpose(-2, -1), rows, ends)
        grad_x = put_rows(grad_rows, place, choices)
        return grad_x, grad_scores, grad_gate_up, grad_down, None, None, None


def grouped_experts(
    x_ND: Tensor, scores_NK: Tensor, ids_NK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor
) -> Tensor:
    """The sum of each token's experts, times their scores (before the second product: the sum of
    the rows is then all that is left to do)."""
    order = order_rows(ids_NK, gate_up_EGD.shape[0])
    return _GroupedExperts.apply(x_ND, scores_NK, gate_up_EGD, down_EDF, *order)


def dispatch_grouped(
    x_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor, experts: Experts
) -> Tensor:
    """All experts are at hand, and so are these kernels."""
    count = experts.down.experts
    gate_up, down = (
        each.weight.view(count, -1, each.weight.shape[1])
        for each in (experts.gate_up, experts.down)
    )
    return grouped_experts(x_TD, scores_TK, chosen_TK.to(torch.int32), gate_up, down)


def apply_grouped(decoder: Decoder, dtype: torch.dtype) -> None:
    for layer in decoder.blocks.values():
        mlp = layer.mlp
        if not isinstance(mlp, MoeMlp) or dtype != torch.bfloat16:
            continue
        mlp.router.product, mlp.router.best = router_product, best_of
        if mlp.dispatch is dispatch_local and not mlp.experts.drops:
            mlp.dispatch = dispatch_grouped
