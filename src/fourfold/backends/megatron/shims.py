"""What makes megatron-core run without CUDA and Transformer Engine. Stand-ins compute in place of
its own kernels, and every answer names them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.conformance.ranks.shims import gathered_attention


def megatron_seeds() -> None:
    """Megatron keeps a CUDA generator of its own for dropout, which is 0 here."""
    import megatron.core.tensor_parallel.random as random

    if not torch.cuda.is_available():
        random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    random.model_parallel_cuda_manual_seed(1)


class SequenceNorm(nn.RMSNorm):
    """Stand-in 'norm' for TENorm: Megatron's own torch norm refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        said: Any = self.weight
        said.sequence_parallel = config.sequence_parallel  # as TENorm says it


def norm_for_sequences() -> None:
    import megatron.core.transformer.torch_norm as torch_norm

    torch_norm.WrappedTorchNorm.__new__ = lambda cls, **kw: SequenceNorm(**kw)


class ContextAttention(nn.Module):
    """Stand-in 'attention' for TEDotProductAttention, the only one of Megatron that takes cp."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        q, k, v = (z.permute(1, 2, 0, 3) for z in (q, k, v))  # from tokens, batch, heads, channels
        return gathered_attention(q, k, v, group).permute(2, 0, 1, 3).flatten(2)
