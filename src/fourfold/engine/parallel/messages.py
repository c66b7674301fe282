"""Messages from one rank to another: between pipeline stages, and around a ring of ranks.

gloo sends and receives host memory only; a message in a GPU's memory (ranks that share one GPU) is
copied to the host before it is sent, and from there once it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class _Staged:
    """Keeps the message's host copy; what arrives is copied from there when it is waited for."""

    def __init__(self, work: dist.Work, host: Tensor, target: Tensor | None) -> None:
        self.work, self.host, self.target = work, host, target

    def wait(self) -> None:
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.host)


def start(ops: Sequence[dist.P2POp]) -> list[Pending]:
    """Post all messages at once; one to wait for each, in their order."""
    if any(_needs_host(op) for op in ops):
        return start_by_host(ops)
    works = dist.batch_isend_irecv(list(ops))
    if len(works) != len(ops):  # NCCL joins a batch into one piece of work
        return [works[0]] * len(ops)
    return list(works)


def start_by_host(ops: Sequence[dist.P2POp]) -> list[Pending]:
    """The same by copies in host memory."""
    staged = []
    for op in ops:
        sends = op.op is dist.isend
        host = op.tensor.cpu() if sends else torch.empty_like(op.tensor, device="cpu")
        staged.append((dist.P2POp(op.op, host, op.peer, op.group), None if sends else op.tensor))
    works = dist.batch_isend_irecv([op for op, _ in staged])
    return [
        _Staged(work, op.tensor, target) for work, (op, target) in zip(works, staged, strict=True)
    ]


def _needs_host(op: dist.P2POp) -> bool:
    return op.tensor.is_cuda and dist.get_backend(op.group) == "gloo"
