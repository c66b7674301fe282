"""Operators of other engines by the storages that their CUDA kernels make, on a CPU: where CUDA has
one kernel, a CPU takes the call apart. For fake tensors, whose values nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine import compat
from fourfold.engine.observe.operators import RmsNorm

_HALF = (torch.bfloat16, torch.float16)


class AttentionOptions(NamedTuple):
    """Arguments of torch's attention, by their names there."""

    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Inside, norms and attention have the storages of CUDA's fused kernels: RMS norms keep their
    input and one number a row, attention is cuDNN's."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    plain_norm, plain_attention = F.rms_norm, F.scaled_dot_product_attention

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: Any = None
    ) -> Tensor:
        if weight is None or weight.dtype != input.dtype:
            return plain_norm(input, normalized_shape, weight, eps)
        if not isinstance(input, DTensor):
            return RmsNorm.apply(input, weight)
        # Each rank normalizes the rows that it holds; its gradient of the weight is one summand.
        sums = [Partial() if place.is_shard() else Replicate() for place in input.placements]
        held = weight.to_local(grad_placements=sums) if isinstance(weight, DTensor) else weight
        return _as(input, RmsNorm.apply(input.to_local(), held))

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        how = AttentionOptions(attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not isinstance(query, DTensor):
            return attend(query, key, value, how)
        parts = [part.to_local() for part in (query, key, value) if isinstance(part, DTensor)]
        return _as(query, attend(parts[0], parts[1], parts[2], how))

    def attend(query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
        if query.dtype not in _HALF or how.attn_mask is not None:
            return plain_attention(query, key, value, **how._asdict())
        keeps_sums = torch.is_grad_enabled()
        return compat.fused_forward(
            query, key, value, causal=how.is_causal, scale=how.scale, keeps_sums=keeps_sums
        )

    with (
        compat.patched(F, "rms_norm", rms_norm),
        compat.patched(F, "scaled_dot_product_attention", attention),
    ):
        yield


def _as(tensor: Any, held: Tensor) -> Tensor:
    """This rank's part as a distributed tensor that lies where `tensor` does."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(held, tensor.device_mesh, tensor.placements, run_check=False)
