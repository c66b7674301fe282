"""What would a GPU keep where the CPU's operators keep more? For dry runs: shapes, no values.

torch normalises on a GPU by one kernel, which keeps its input and one number a token; on a CPU the
same call is a dozen operators, two of which keep the whole input again in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RmsNorm(torch.autograd.Function):
    """The storages of torch's fused kernel. Its values are never read: tensors here are fake."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        root = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, root)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Inside, fused kernels of GPUs stand for what the CPU would do in pieces."""
    original = F.rms_norm

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
        if weight is None:
            return original(x, shape, weight, eps)
        return _RmsNorm.apply(x, weight)

    setattr(F, "rms_norm", rms_norm)  # noqa: B010  (torch types it as a function, not a variable)
    try:
        yield
    finally:
        setattr(F, "rms_norm", original)  # noqa: B010
