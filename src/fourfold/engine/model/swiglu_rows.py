"""SwiGLU of experts' rows times their scores: one kernel each way on a GPU.

R rows, F width of an expert, N tokens with K scores each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.model.fast_router import expert_kernels, power
from fourfold.engine.model.rows import has_kernel

_WIDTH = 2048  # columns that one program of a GPU computes


@torch.library.custom_op("fourfold::swiglu_rows", mutates_args=())
def swiglu_rows(gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor) -> Tensor:
    """silu(gate) x up x score of each row."""
    return _plain(gate_up_RG, scores_NK, source_R)


def _plain(gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor) -> Tensor:
    wide = torch.promote_types(gate_up_RG.dtype, torch.float32)
    gate, up = gate_up_RG.to(wide).chunk(2, dim=-1)
    score = scores_NK.flatten()[source_R].to(wide)
    return (F.silu(gate) * up * score[:, None]).to(gate_up_RG.dtype)


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
    expert_kernels().swiglu[(rows, -(-width // block))](
        gate_up_RG, scores_NK, source_R, out, width, BLOCK=block, num_warps=4
    )
    return out


@torch.library.custom_op("fourfold::swiglu_rows_backward", mutates_args=())
def swiglu_rows_backward(
    gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor, grad_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of gate_up, the activation once more, gradient of the scores)."""
    return _plain_backward(gate_up_RG, scores_NK, source_R, grad_RF)


def _plain_backward(
    gate_up_RG: Tensor, scores_NK: Tensor, source_R: Tensor, grad_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
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
    expert_kernels().swiglu_backward[(rows,)](
        gate_up_RG, scores_NK, source_R, grad_RF.contiguous(), grad, again, grad_scores, width,
        BLOCK=power(width), num_warps=4,
    )  # fmt: skip
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
