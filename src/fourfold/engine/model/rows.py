"""Rows of experts: in which order, there, and back. One kernel each on a GPU.

N tokens, D hidden, E experts, K experts of a token, R = N x K rows in the order of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.engine.model.fast_router import expert_kernels, power

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
    kernels = expert_kernels()
    kernels.count[(blocks,)](ids_NK, counts, rows, blocks, **sizes)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(width, blocks)
    source, place = (ids_NK.new_empty(rows, dtype=torch.int32) for _ in range(2))
    kernels.place[(blocks,)](ids_NK, ends, counts, place, source, rows, blocks, **sizes)
    return source, place, ends[:experts, -1].contiguous()


@torch.library.custom_op("fourfold::take_rows", mutates_args=())
def take_rows(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """Each row's token."""
    return _plain_take(x_ND, place_R, choices)


def _plain_take(x_ND: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return x_ND[inverse(place_R) // choices]


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
    expert_kernels().take[grid](
        x_ND.contiguous(), place_R, rows, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return rows


@torch.library.custom_op("fourfold::put_rows", mutates_args=())
def put_rows(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    """The sum of each token's rows."""
    return _plain_put(rows_RD, place_R, choices)


def _plain_put(rows_RD: Tensor, place_R: Tensor, choices: int) -> Tensor:
    return rows_RD[place_R].unflatten(0, (-1, choices)).sum(1)


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
    expert_kernels().put[grid](
        rows_RD.contiguous(), place_R, out, width, K=choices, BLOCK=_WIDTH, num_warps=4
    )
    return out
