"""What makes torchtitan run without CUDA and with releases of torch that it was not made for.
Stand-ins compute in place of its own kernels, and every answer names them."""

from __future__ import annotations

import inspect
import itertools
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def titan_on_cpu() -> None:
    """torchtitan decides once, while it loads, that it runs on CUDA; its files copy the answer."""
    import torchtitan.tools.utils  # noqa: F401  (loads most of them)

    cpu: Any = torch.cpu
    cpu.set_stream = getattr(cpu, "set_stream", lambda stream: None)  # it asks for the name
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if name.startswith("torchtitan") and getattr(module, "device_type", "") == "cuda":
            module.device_type, module.device_module = "cpu", cpu


def micro_batch_lists() -> None:
    """torchtitan 0.3 gives a schedule lists of micro batches, which torch takes from 2.14 on; what
    older ones make of a whole batch is handed to the same function."""
    from torch.distributed.pipelining import schedules

    def step(self: Any, **kw: Any) -> None:
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(**kw)

    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = step


def cpu_permutation() -> None:
    """torchtitan 0.2 has a CPU form of its permutation that none of its options reaches."""
    import torchtitan.models.moe.utils as utils

    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)


def dense_flex_attention() -> None:
    """Stand-in 'flex', which has no backward on CPU: the same scores by the engine's own mask."""
    import torchtitan.models.common.attention as attention
    from torch.nn.attention.flex_attention import create_mask

    def dense(
        q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
    ) -> tuple[Tensor, None]:
        sizes = (q.shape[0], 1, q.shape[2], k.shape[2])
        kw = {"attn_mask": create_mask(block_mask.mask_mod, *sizes, device="cpu"), "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa, **kw), None

    attention.FlexAttention.compiled_flex_attn = staticmethod(dense)


def ungrouped_experts() -> None:
    """Stand-in 'experts', whose grouped product is for CUDA only: rows of A, grouped by their ends,
    times B_t of their expert. The cast to bf16 for that kernel is left out."""
    import torchtitan.models.common.moe as moe

    def products(self: Any, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        parts = [A[low:high] @ B_t[e] for e, (low, high) in enumerate(itertools.pairwise(ends))]
        return torch.cat([*parts, A.new_zeros(A.shape[0] - ends[-1], B_t.shape[-1])])

    tensor: Any = torch.Tensor
    tensor.bfloat16 = lambda self: self
    moe.GroupedExperts._grouped_mm = products
