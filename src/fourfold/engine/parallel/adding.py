"""Gradients in the format in which they add up: those of one more micro batch are added, or they
are laid side by side for a reduction."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


@torch.no_grad()
def add_gradient(total: Tensor, fresh: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + fresh` in `dtype`; `total` itself where it has that format already."""
    on_gpu = total.device.type == "cuda" and dtype == torch.float32 != fresh.dtype
    if not (on_gpu and total.is_contiguous() and fresh.is_contiguous()):
        return total.to(dtype).add_(fresh)
    out = total if total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    grid = (-(-total.numel() // _BLOCK),)
    _kernels().add[grid](total, fresh, out, total.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    return out


@torch.no_grad()
def widen(narrow: Tensor, wide: Tensor) -> None:
    """Copy [rows, values] on a GPU; rows of `narrow` lie side by side, those of `wide` may not."""
    rows, width = narrow.shape
    grid = (rows, -(-width // _BLOCK))
    _kernels().widen[grid](narrow, wide, width, wide.stride(0), BLOCK=_BLOCK, num_warps=_WARPS)


@functools.cache
def _kernels() -> Any:
    from fourfold.engine.parallel import add_triton

    return add_triton
