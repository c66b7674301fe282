"""FSDP's own business that is used here nonetheless, as compat.py has torch's: names with an
underscore.

FSDP takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What FSDP keeps of each parameter: its shard, and gradients that are not reduced yet."""
    from torch.distributed.fsdp import FSDPModule

    for inner in (inner for module in modules for inner in module.modules()):
        if isinstance(inner, FSDPModule):
            group = inner._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


def fsdp_after_backward(module: Any, *, is_root: bool = False) -> None:
    """What FSDP does after a backward pass through a module, where no autograd runs; at the root,
    also what ends the pass."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:  # a stage in the middle has nothing of its own beside its layers
        # The first part has left gradients of norms and biases in the format of accumulation, the
        # products' are in the format of compute: one reduction takes one format only.
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        group.post_backward()
    if is_root:
        module._get_fsdp_state()._root_post_backward_final_callback()


def cast_reduce_scatter(dtype: torch.dtype) -> Any:
    """FSDP's reduce-scatter in another format than gradients are accumulated in."""
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class CastReduceScatter(ReduceScatter):
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: Tensor,
            input_tensor: Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            sent = input_tensor.to(dtype)
            got = torch.empty(output_tensor.shape, dtype=dtype, device=output_tensor.device)
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(got, sent, group=group, op=op)
            output_tensor.copy_(got)

    return CastReduceScatter()
