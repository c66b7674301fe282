"""Activations of MLPs where the compiler's own kernels are slower than memory: GELU and SwiGLU.

GELU by one exponential for value and slope, x Phi(x) with Phi by Abramowitz and Stegun's formula
7.1.26: off by at most 1e-7, where bf16 rounds by 4e-3 and fp16 by 5e-4 of a value. A GPU takes
longer for its exact erf than for reading and writing the values.

SwiGLU's backward pass by one kernel that writes the gradients of gate and up side by side; the
compiler's, which joins them (`cat`), takes twice the time of the values' traffic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.compat import kernels
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.layers import Linear

_P = 0.3275911 / math.sqrt(2.0)
# The formula's, halved: Phi is half of 1 + erf.
_A = (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
_BLOCK, _WARPS = 2048, 8
_ROWS, _TILE, _COLUMNS = 256, 8, 512


def apply_fast_activations(decoder: Decoder, dtype: torch.dtype) -> None:
    """In formats that round by more than the formula is off."""
    if dtype.itemsize > 2:
        return
    for layer in decoder.blocks.values():
        if layer.dense_mlp is not None:
            layer.dense_mlp.gelu_of, layer.dense_mlp.swiglu = fast_gelu_of, fast_swiglu


def fast_gelu_of(up: Linear, x: Tensor) -> Tensor:
    """GELU of the linear's output. Its bias's gradient is the sum of what GELU hands back, which
    the same kernel adds up."""
    if up.bias is None or up.product is not F.linear:
        return fast_gelu(up(x))
    return fast_gelu(F.linear(x, up.weight, up.bias.detach()), up.bias)


def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """`bias`: what was added to get x, for its gradient."""
    return _FastGelu.apply(x, bias)


class _FastGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        grad_x, sums = _gelu_backward(x, grads[0])
        return grad_x, None if ctx.bias_dtype is None else sums.sum(dim=0).to(ctx.bias_dtype)


@torch.library.custom_op("fourfold::gelu", mutates_args=())
def _gelu(x: Tensor) -> Tensor:
    wide = x.float()
    below, _ = _normal(wide)
    return (wide * below).to(x.dtype)


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_gelu.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, count = 2 * _BLOCK, x.numel()
    grid = (-(-count // block),)
    kernels().gelu[grid](x.contiguous(), out, count, BLOCK=block, num_warps=_WARPS)
    return out


@torch.library.custom_op("fourfold::gelu_backward", mutates_args=())
def _gelu_backward(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, and [blocks of rows, width]: sums of it over each block."""
    wide = x.float()
    below, bell = _normal(wide)
    out = (grad.float() * (below + wide * bell * _DENSITY)).to(x.dtype)
    rows = out.reshape(-1, x.shape[-1]).split(_ROWS)
    return out, torch.stack([part.float().sum(dim=0) for part in rows])


@_gelu_backward.register_fake
def _(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-x.shape[:-1].numel() // _ROWS)
    sums = torch.empty((blocks, x.shape[-1]), dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), sums


@_gelu_backward.register_kernel("cuda")
def _(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = torch.empty((-(-rows // _ROWS), width), dtype=torch.float32, device=x.device)
    grid = (-(-width // _COLUMNS), sums.shape[0])
    sizes = {"ROWS": _ROWS, "TILE": _TILE, "COLUMNS": _COLUMNS, "num_warps": _WARPS}
    tensors = (x.contiguous(), grad.contiguous(), out, sums)
    kernels().gelu_backward[grid](*tensors, rows, width, **sizes)
    return out, sums


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    """(share of a standard normal below x, its density times the root of 2 pi)."""
    bell = (x * x * -0.5).exp()
    t = 1.0 / (1.0 + _P * x.abs())
    tail = t * (_A[0] + t * (_A[1] + t * (_A[2] + t * (_A[3] + t * _A[4])))) * bell
    return torch.where(x < 0, tail, 1.0 - tail), bell


def fast_swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) x up of a tensor that holds both side by side in its last dimension."""
    return _FastSwiglu.apply(gate_up)


class _FastSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _swiglu_backward(gate_up, grads[0])


@torch.library.custom_op("fourfold::swiglu_backward", mutates_args=())
def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `gate_up`, in its layout."""
    wide = gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    share = gate.sigmoid()
    silu, grad = gate * share, grad.float()
    both = (grad * up * (share + silu * (1.0 - share)), grad * silu)
    return torch.cat(both, dim=-1).to(gate_up.dtype)


@_swiglu_backward.register_fake
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    return torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)


@_swiglu_backward.register_kernel("cuda")
def _(gate_up: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    width = grad.shape[-1]
    grid = (grad.numel() // width, -(-width // _BLOCK))
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    kernels().swiglu_backward[grid](gate_up, grad, out, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return out
