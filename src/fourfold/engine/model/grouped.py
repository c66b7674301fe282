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
from fourfold.engine.model.fast_router import best_of, expert_kernels, power, router_product
from fourfold.engine.model.swiglu_rows import swiglu_rows, swiglu_rows_backward

_ROWS = 128  # rows whose places one program of a GPU computes
_WIDTH = 2048  # columns that it moves


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


@torch.library.custom_op("fourfold::order_rows", mutates_args=())
def order_rows(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(source, place, ends), all int32: row r, in the order of experts, is choice source[r] of
    N x K; choice c is row place[c]; rows of expert e end at ends[e], in the order of tokens."""
    flat = ids_NK.flatten()
    source = flat.sort(stable=True).indices
    place = torch.empty_like(source)
    place[source] = torch.arange(source.numel(), device=source.device)
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    return source.to(torch.int32), place.to(torch.int32), ends.to(torch.int32)


@order_rows.register_fake
def _(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = ids_NK.numel()
    source, place = (ids_NK.new_empty(rows, dtype=torch.int32) for _ in range(2))
    return source, place, ids_NK.new_empty(experts, dtype=torch.int32)


@order_rows.register_kernel("cuda")
def _(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = ids_NK.numel(), power(experts)
    blocks = -(-rows // _ROWS)
    counts = ids_NK.new_empty((width, blocks), dtype=torch.int32)
    sizes = {"E": width, "ROWS": _ROWS}
    kernels = expert_kernels()
    kernels.count[(blocks,)](ids_NK, counts, rows, blocks, **sizes)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(width, blocks)
    source, place = (ids_NK.new_empty(rows, dtype=torch.int32) for _ in range(2))
    kernels.place[(blocks,)](ids_NK, ends, counts, place, source, rows, blocks, **sizes)
    return source, place, ends[:experts, -1].contiguous()


@torch.library.custom_op("fourfold::take_rows", mutates_args=())
def take_rows(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """Each row's token."""
    rows = x_ND.new_empty((place_R.numel(), x_ND.shape[1]))
    rows[place_R] = x_ND.repeat_interleave(choices, dim=0)
    return rows


@take_rows.register_fake
def _(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return x_ND.new_empty((place_R.numel(), x_ND.shape[1]))


@take_rows.register_kernel("cuda")
def _(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    tokens, width = x_ND.shape
    rows = x_ND.new_empty((place_R.numel(), width))
    grid = (tokens, -(-width // _WIDTH))
    expert_kernels().take[grid](
        x_ND.contiguous(), place_R, rows, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return rows


@torch.library.custom_op("fourfold::put_rows", mutates_args=())
def put_rows(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """The sum of each token's rows."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    picked = rows_RD[place_R.view(-1, choices)]
    return picked.sum(dim=1, dtype=wide).to(rows_RD.dtype)


@put_rows.register_fake
def _(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return rows_RD.new_empty((place_R.numel() // choices, rows_RD.shape[1]))


@put_rows.register_kernel("cuda")
def _(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    tokens, width = place_R.numel() // choices, rows_RD.shape[1]
    out = rows_RD.new_empty((tokens, width))
    grid = (tokens, -(-width // _WIDTH))
    expert_kernels().put[grid](
        rows_RD.contiguous(), place_R, out, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return out


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
        if not isinstance(mlp, MoeMlp) or mlp.experts.drops:
            continue
        if dtype == torch.bfloat16 and mlp.dispatch is dispatch_local:
            mlp.dispatch = dispatch_grouped
            mlp.router.product = router_product
            mlp.router.best = best_of
