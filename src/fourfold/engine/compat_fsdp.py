"""FSDP's own business that is used here nonetheless, as compat.py has torch's: names with an
underscore, and steps of FSDP that run by other kernels.

FSDP takes seconds to import, so it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.engine.compat import patched


def fsdp_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What FSDP keeps of each parameter: its shard, and gradients that are not reduced yet."""
    from torch.distributed.fsdp import FSDPModule

    for inner in (inner for module in modules for inner in module.modules()):
        if isinstance(inner, FSDPModule):
            group = inner._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


def fsdp_add_with(modules: Iterable[nn.Module], add: Callable[[Tensor, Tensor], Any]) -> None:
    """FSDP adds gradients of more micro batches up by `add`, in place."""

    def accumulate(parameter: Any) -> None:
        total, fresh = parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad
        if total is not None and fresh is not None:
            add(total, fresh)
            parameter.unsharded_param.grad = None

    for parameter in fsdp_parameters(modules):
        parameter.accumulate_unsharded_grad_if_needed = functools.partial(accumulate, parameter)


@functools.cache
def fsdp_gather_in_place() -> None:
    """On GPUs FSDP gathers a layer's weights straight to where they are used, in one piece of work,
    instead of into a buffer from which they are copied."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    gather_all, copy_all = collectives.foreach_all_gather, collectives.foreach_all_gather_copy_out

    def gather(
        params: list[Any],
        group: dist.ProcessGroup,
        async_op: bool,
        copies: Any,
        gathers: Any,
        device: torch.device,
        comm: Any,
    ) -> Any:
        """`copies` and `gathers` are the streams of the two."""
        if device.type != "cuda" or async_op:
            return gather_all(params, group, async_op, copies, gathers, device, comm)
        with torch.cuda.stream(copies):
            own = collectives._get_param_all_gather_inputs(params)
        gathers.wait_stream(copies)
        event = _gather_in_place(params, [part for (part,) in own], group, gathers)
        kept: Any = own  # until the event
        return collectives.AllGatherResult(kept, event, None, [], [], [])

    def copy_out(result: Any, params: list[Any], group: dist.ProcessGroup) -> None:
        if isinstance(result.all_gather_output, Tensor):
            copy_all(result, params, group)
        else:
            torch.cuda.current_stream().wait_event(result.all_gather_event)

    for name, made in (("foreach_all_gather", gather), ("foreach_all_gather_copy_out", copy_out)):
        setattr(groups, name, made)


@torch.no_grad()
def _gather_in_place(
    params: list[Any], own: list[Tensor], group: dist.ProcessGroup, gathers: Any
) -> Any:
    """The moment at which the stream `gathers` has the whole parameters."""
    for param, part in zip(params, own, strict=True):
        param.init_all_gather_outputs([part.numel()], [part.dtype], group.size(), part.device)
        param.alloc_all_gather_outputs()
    whole = [param.all_gather_outputs[0] for param in params]
    # Their bytes may still be read as those of a layer that was let go of.
    gathers.wait_stream(torch.cuda.current_stream())
    preserved = torch.autograd._unsafe_preserve_version_counter(tuple(whole))
    with torch.cuda.stream(gathers), preserved:
        group.allgather_into_tensor_coalesced(whole, own).wait()
        return gathers.record_event()


@functools.cache
def fsdp_gather_gradients_with(copy: Callable[[Tensor, Tensor], Any]) -> None:
    """Before a reduction FSDP lays gradients side by side, for each rank its part of all of them,
    by `copy` (from, to: [ranks, values]), which may widen them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    name = "foreach_reduce_scatter_copy_in"
    original = getattr(collectives, name)

    def copy_in(grads: list[Tensor], out: Tensor, ranks: int) -> None:
        uneven = any(grad.shape[0] % ranks or not grad.is_contiguous() for grad in grads)
        if uneven or grads[0].dtype == out.dtype or out.device.type != "cuda":
            original(grads, out, ranks)
            return
        parts = out.view(ranks, -1).split([grad.numel() // ranks for grad in grads], dim=1)
        for grad, part in zip(grads, parts, strict=True):
            copy(grad.view(ranks, -1), part)

    setattr(collectives, name, copy_in)


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


def watch_fsdp_buffers(see: Callable[[Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, `see` is called with every buffer that FSDP makes for a collective."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

    original = DefaultAllocMixin.allocate

    def allocate(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        buffer = original(self, *args, **kwargs)
        see(buffer)
        return buffer

    return patched(DefaultAllocMixin, "allocate", allocate)
