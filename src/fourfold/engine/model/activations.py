"""Activations of MLPs where the compiler's own kernels are slower than memory: GELU and SwiGLU.

GELU by one exponential for value and slope, x Phi(x) with Phi by Abramowitz and Stegun's formula
7.1.26: off by at most 1e-7, where bf16 rounds by 4e-3 and fp16 by 5e-4 of a value. A GPU takes
longer for its exact erf than for reading and writing the values.

SwiGLU's backward pass by one kernel that writes the gradients of gate and up side by side; the
compiler's, which joins them (`cat`), takes twice the time of the values' traffic.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.model.decoder import Decoder

_P = 0.3275911 / math.sqrt(2.0)
# The formula's, halved: Phi is half of 1 + erf.
_A = (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)
_DENSITY = 1.0 / math.sqrt(2.0 * math.pi)
_BLOCK, _WARPS = 2048, 8


def apply_fast_activations(decoder: Decoder, dtype: torch.dtype) -> None:
    """In formats that round by more than the formula is off."""
    if dtype.itemsize > 2:
        return
    for layer in decoder.blocks.values():
        layer.mlp.gelu, layer.mlp.swiglu = fast_gelu, fast_swiglu


def fast_gelu(x: Tensor) -> Tensor:
    return _FastGelu.apply(x)


class _FastGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        below, _ = _normal(wide)
        return (wide * below).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, bell = _normal(wide)
        return (grads[0].float() * (below + wide * bell * _DENSITY)).to(x.dtype)


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
    _swiglu_kernel()[grid](gate_up, grad, out, width, BLOCK=_BLOCK, num_warps=_WARPS)
    return out


@functools.cache
def _swiglu_kernel() -> Any:
    """triton comes with torch for GPUs only, so it is imported late."""
    from fourfold.engine.model.swiglu_triton import swiglu_backward

    return swiglu_backward
