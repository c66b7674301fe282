"""Collectives that autograd understands, over one group, on plain tensors. The functional ops
return before the transfer ends (`wait` is where the result is needed)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.engine.compat import functional
from fourfold.engine.parallel.groups import Group


def wait(tensor: Tensor) -> Tensor:
    return functional.wait_tensor(tensor)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    return wait(functional.all_reduce(x.contiguous(), op, group.name))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """Parts of all ranks, joined along `dim`."""
    joined = wait(functional.all_gather_into_tensor(x.contiguous(), group.size, group.name))
    if dim == 0 or x.shape[:dim].numel() == 1:
        return joined.view(*x.shape[:dim], group.size * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(joined.chunk(group.size), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which this rank keeps its part along `dim`."""
    each = x.shape[dim] // group.size
    shape = (*x.shape[:dim], each, *x.shape[dim + 1 :])
    if dim > 0 and x.shape[:dim].numel() > 1:
        x = torch.cat(x.chunk(group.size, dim=dim))
    flat = x.reshape(group.size * each, -1) if dim else x
    out = wait(functional.reduce_scatter_tensor(flat.contiguous(), "sum", group.size, group.name))
    return out.view(shape)


def start_exchange(x: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
    """All-to-all of rows: `sent[r]` rows go to rank r. The result must be waited for."""
    return functional.all_to_all_single(x.contiguous(), received, sent, group.name)


class IdentityWithGradReduce(torch.autograd.Function):
    """The same input on all ranks: gradients of their different uses add up (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return all_reduce(grad, ctx.group), None


class AllReduce(torch.autograd.Function):
    """Partial results add up; every rank's part sees the whole gradient (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad, None


class AllReduceBothWays(torch.autograd.Function):
    """Partial results add up, and every rank uses the sum for something else: gradients of these
    uses add up too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return all_reduce(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """Parts along `dim` -> the whole on all ranks; gradients of its uses add up, then part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return reduce_scatter(grad, ctx.group, ctx.dim), None, None


class ReduceScatter(torch.autograd.Function):
    """Partial results add up and part along `dim`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return all_gather(grad, ctx.group, ctx.dim), None, None


class AllToAll(torch.autograd.Function):
    """All-to-all that splits dimension `split` over ranks and joins dimension `join` (Ulysses)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _all_to_all(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        return _all_to_all(grad, ctx.group, ctx.join, ctx.split), None, None, None


def _all_to_all(x: Tensor, group: Group, split: int, join: int) -> Tensor:
    stacked = torch.stack(x.chunk(group.size, dim=split))
    rows = [1] * group.size
    received = wait(start_exchange(stacked, group, rows, rows))
    return torch.cat(received.unbind(0), dim=join)
