"""Faults that people have shipped, planted under any engine to prove that the lab names them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

LARGE = 64  # elements: numbers that are no statistics


class NeverStarted:
    """A collective that was never started."""

    def wait(self, *a: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def plant(fault: str) -> None:
    if fault == "lost-sum":
        _skip(lambda tensor: tensor.numel() >= LARGE)
    elif fault == "norm-shard":
        _skip(lambda tensor: tensor.numel() == 1)
    elif fault == "doubled-loss":
        _doubled()
    else:
        raise ValueError(f"no fault is called {fault!r}")


def _skip(chosen: Any) -> None:
    """Sums of such tensors over ranks are left out; each rank goes on with its own part."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *a: Any, **k: Any) -> Any:
        summed = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and tensor.is_floating_point()
        if summed and tensor.dtype != torch.float64 and chosen(tensor):
            return NeverStarted() if k.get("async_op") else None
        return real(tensor, op, *a, **k)

    dist.all_reduce = all_reduce


def _doubled() -> None:
    """The loss is scaled once more before the backward pass."""
    real = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *a: Any, **k: Any) -> Any:
        first = tensors[0] if isinstance(tensors, tuple | list) else tensors
        given = grad_tensors[0] if isinstance(grad_tensors, tuple | list) else grad_tensors
        if first.numel() == 1 and given is None:
            return real(2 * first, None, *a, **k)
        return real(tensors, grad_tensors, *a, **k)

    torch.autograd.backward = backward
