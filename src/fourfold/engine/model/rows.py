"""Rows of experts: in which order, there, and back, and SwiGLU of them times their scores. One
kernel each on a GPU.

N tokens, D hidden, E experts of width F, K of a token, each with a score, R = N x K rows in the
order of experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.compat import kernels
from fourfold.engine.model.router import power

_ROWS = 128  # rows whose places one program of a GPU computes
_WIDTH = 2048  # columns that it moves


def has_kernel(rows: Tensor) -> bool:
    """A rank's experts may get no row; wider formats are for proofs."""
    return rows.dtype == torch.bfloat16 and rows.shape[0] > 0


def inverse(order_R: Tensor) -> Tensor:
    """The order that undoes this one."""
    each = torch.arange(order_R.shape[0], dtype=order_R.dtype, device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R.long(), each)


@torch.library.custom_op("fourfold::order_rows", mutates_args=())
def order_rows(ids_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(source, place, ends), all int32: row r, in the order of experts, is choice source[r] of
    N x K; choice c is row place[c]; rows of expert e end at ends[e], in the order of tokens."""
    flat = ids_NK.flatten()
    source = flat.sort(stable=True).indices.to(torch.int32)
    ends = torch.bincount(flat, minlength=experts).cumsum(0)
    return source, inverse(source), ends.to(torch.int32)


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
    kernels().count[(blocks,)](ids_NK, counts, rows, blocks, **sizes)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(width, blocks)
    source, place = (ids_NK.new_empty(rows, dtype=torch.int32) for _ in range(2))
    kernels().place[(blocks,)](ids_NK, ends, counts, place, source, rows, blocks, **sizes)
    return source, place, ends[:experts, -1].contiguous()


@torch.library.custom_op("fourfold::regroup_rows", mutates_args=())
def regroup_rows(counts_GE: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows that lie group by group, in each expert by expert, to expert by expert, in each group
    by group: (order, back, ends). New row r was order[r], which is now row back[order[r]]; rows of
    expert e end at ends[e] (int32)."""
    groups, experts = counts_GE.shape
    expert = torch.arange(experts, device=counts_GE.device).repeat(groups)
    each = expert.repeat_interleave(counts_GE.flatten(), output_size=rows)
    order = each.sort(stable=True).indices
    return order, inverse(order), counts_GE.sum(0).cumsum(0).to(torch.int32)


@regroup_rows.register_fake
def _(counts_GE: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    order, back = (counts_GE.new_empty(rows, dtype=torch.int64) for _ in range(2))
    return order, back, counts_GE.new_empty(counts_GE.shape[1], dtype=torch.int32)


@regroup_rows.register_kernel("cuda")
def _(counts_GE: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    groups, experts = counts_GE.shape
    order, back = (counts_GE.new_empty(rows, dtype=torch.int64) for _ in range(2))
    ends = counts_GE.new_empty(experts, dtype=torch.int32)
    sizes = {"G": power(groups), "E": power(experts)}
    block = max(16, 8192 // (sizes["G"] * sizes["E"]))
    kernels().regroup[(max(1, -(-rows // block)),)](
        counts_GE.contiguous(), order, back, ends, rows, groups, experts, **sizes, ROWS=block
    )
    return order, back, ends


def _plain_take(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """Each row's token."""
    return x_ND[inverse(place_R) // choices]


take_rows = torch.library.custom_op("fourfold::take_rows", _plain_take, mutates_args=())


@take_rows.register_fake
def _(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return x_ND.new_empty((place_R.numel(), x_ND.shape[1]))


@take_rows.register_kernel("cuda")
def _(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    tokens, width = x_ND.shape
    if not has_kernel(x_ND):
        return _plain_take(x_ND, place_R, choices)
    rows = x_ND.new_empty((place_R.numel(), width))
    grid = (tokens, -(-width // _WIDTH))
    kernels().take[grid](
        x_ND.contiguous(), place_R, rows, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return rows


def _plain_put(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """The sum of each token's rows."""
    return rows_RD[place_R].unflatten(0, (-1, choices)).sum(1)


put_rows = torch.library.custom_op("fourfold::put_rows", _plain_put, mutates_args=())


@put_rows.register_fake
def _(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return rows_RD.new_empty((place_R.numel() // choices, rows_RD.shape[1]))


@put_rows.register_kernel("cuda")
def _(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    tokens, width = place_R.numel() // choices, rows_RD.shape[1]
    if not has_kernel(rows_RD):
        return _plain_put(rows_RD, place_R, choices)
    out = rows_RD.new_empty((tokens, width))
    grid = (tokens, -(-width // _WIDTH))
    kernels().put[grid](
        rows_RD.contiguous(), place_R, out, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return out


def _plain(gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor) -> Tensor:
    """silu(gate) x up x score of each row."""
    wide = torch.promote_types(gate_up_RG.dtype, torch.float32)
    gate, up = gate_up_RG.to(wide).chunk(2, dim=-1)
    score = scores_NK.flatten()[source_R].to(wide)
    return (F.silu(gate) * up * score[:, None]).to(gate_up_RG.dtype)


swiglu_rows = torch.library.custom_op("fourfold::swiglu_rows", _plain, mutates_args=())


@swiglu_rows.register_fake
def _(gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor) -> Tensor:
    return gate_up_RG.new_empty((gate_up_RG.shape[0], gate_up_RG.shape[1] // 2))


@swiglu_rows.register_kernel("cuda")
def _(gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor) -> Tensor:
    rows, width = gate_up_RG.shape[0], gate_up_RG.shape[1] // 2
    if not has_kernel(gate_up_RG):
        return _plain(gate_up_RG, scores_NK, source_R)
    out = gate_up_RG.new_empty((rows, width))
    block = min(power(width), _WIDTH)
    kernels().swiglu_rows[(rows, -(-width // block))](
        gate_up_RG, scores_NK, source_R, out, width, BLOCK=block, num_warps=4
    )
    return out


def _plain_backward(
    gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor, grad_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up, the activation once more, gradient of the scores)."""
    wide = torch.promote_types(gate_up_RG.dtype, torch.float32)
    gate, up = gate_up_RG.to(wide).chunk(2, dim=-1)
    score = scores_NK.flatten()[source_R].to(wide)[:, None]
    share, slope = gate.sigmoid(), grad_RF.to(wide)
    silu = gate * share
    grads = (slope * score * up * (share + silu * (1.0 - share)), slope * score * silu)
    grad_scores = torch.empty_like(scores_NK)
    grad_scores.view(-1)[source_R] = (slope * silu * up).sum(dim=-1).to(scores_NK.dtype)
    dtype = gate_up_RG.dtype
    return torch.cat(grads, dim=-1).to(dtype), (silu * up * score).to(dtype), grad_scores


swiglu_rows_backward = torch.library.custom_op(
    "fourfold::swiglu_rows_backward", _plain_backward, mutates_args=()
)


@swiglu_rows_backward.register_fake
def _(
    gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor, grad_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gate_up_RG), torch.empty_like(grad_RF), torch.empty_like(scores_NK)


@swiglu_rows_backward.register_kernel("cuda")
def _(
    gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor, grad_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = grad_RF.shape
    if not has_kernel(gate_up_RG):
        return _plain_backward(gate_up_RG, scores_NK, source_R, grad_RF)
    grad, again = torch.empty_like(gate_up_RG), torch.empty_like(grad_RF)
    grad_scores = torch.empty_like(scores_NK)
    kernels().swiglu_rows_backward[(rows,)](
        gate_up_RG,
        scores_NK,
        source_R,
        grad_RF.contiguous(),
        grad,
        again,
        grad_scores,
        width,
        BLOCK=power(width),
        num_warps=4,
    )
    return grad, again, grad_scores


class ScoredSwiglu(torch.autograd.Function):
    """silu(gate) x up x score of each row, which is that of choice `source`. Keeps its inputs only:
    the first product's output is as wide as all else that a layer with experts keeps."""

    @staticmethod
    def forward(ctx: Any, gate_up_R2F: Tensor, scores_R: Tensor, source_R: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_R2F, scores_R, source_R)
        return swiglu_rows(gate_up_R2F, scores_R[:, None], source_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        gate_up, scores, source = ctx.saved_tensors
        given = (gate_up, scores[:, None].contiguous(), source)
        grad, _, grad_scores = swiglu_rows_backward(*given, grads[0])
        return grad, grad_scores[:, 0], None


def scored_swiglu(gate_up_R2F: Tensor, scores_R: Tensor, source_R: Tensor) -> Tensor:
    return ScoredSwiglu.apply(gate_up_R2F, scores_R, source_R)
