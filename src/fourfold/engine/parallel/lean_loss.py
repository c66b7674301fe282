"""Cross-entropy without a second copy of the logits: their gradient takes their place in memory. In
chunks, a part's gradients are made right after its logits, so nothing is computed twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine.compat import kernels
from fourfold.engine.model.decoder import IGNORE, Decoder
from fourfold.engine.parallel.groups import Group, World, all_reduce
from fourfold.engine.parallel.tensor import VocabLoss
from fourfold.spec.run import RunSpec

# Values of a block of rows in wide format, where nothing is compiled: 64 MiB of fp32.
_BLOCK_VALUES = 2**24
# Values that one program of a GPU kernel works on at a time.
_ROW_BLOCK, _TURN_BLOCK = 8192, 4096


def apply_lean_loss(decoder: Decoder, spec: RunSpec, world: World) -> None:
    """Put it in place of the head's loss, whole or cut by vocabulary."""
    head = decoder.head
    if head is None or not spec.policy.is_loss_lean:
        return
    old = head.loss
    first, group = (old.first, old.group) if isinstance(old, VocabLoss) else (0, None)
    lean = LeanLoss(first, group, compiled=spec.policy.compile and world.device_type == "cuda")
    head.loss, head.loss_in_chunks = lean, lean.in_chunks


class LeanLoss(nn.Module):
    """`first`: the vocabulary row of the first logit here; `group`: who has the other rows."""

    def __init__(self, first: int, group: Group | None, *, compiled: bool) -> None:
        super().__init__()
        self.first, self.group = first, group
        self._most_values = 2**62 if compiled else _BLOCK_VALUES
        self._sums = _gpu_sums if compiled else _sums
        self._turn = _gpu_turn if compiled else _turn

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        return _LeanCrossEntropy.apply(logits_NV, targets_N, self)

    def in_chunks(self, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunks: int) -> Tensor:
        """The loss of x weight^T. Also the gradients, which the backward pass only scales."""
        return _ChunkedCrossEntropy.apply(x_ND, weight_VD, targets_N, self, chunks)

    def measure(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, logsumexp of each row, each row's target as a column of these logits or -1)."""
        counts = targets_N != IGNORE
        column = targets_N - self.first
        is_local = counts & (column >= 0) & (column < logits_NV.shape[1])
        column = torch.where(is_local, column, -1)
        parts = [self._sums(*block) for block in self._blocks(logits_NV, column)]
        logsum, chosen = (torch.cat(part) for part in zip(*parts, strict=True))
        if self.group is not None:
            top = all_reduce(logsum, self.group, "max")
            both = all_reduce(torch.stack([(logsum - top).exp(), chosen]), self.group)
            logsum, chosen = top + both[0].log(), both[1]
        return (logsum - chosen).masked_fill(~counts, 0.0).sum(), logsum, column

    def turn(self, logits_NV: Tensor, logsum_N: Tensor, column_N: Tensor, share_N: Tensor) -> None:
        """Logits become their own gradient, in place: (softmax - one at the target) x share."""
        for block in self._blocks(logits_NV, logsum_N, column_N, share_N):
            self._turn(*block)

    def _blocks(self, logits: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Rows in as few equal blocks as may be."""
        count = max(1, min(logits.shape[0], -(-logits.numel() // self._most_values)))
        return zip(*(tensor.tensor_split(count) for tensor in (logits, *rows)), strict=True)


class _LeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, lean: LeanLoss) -> Tensor:
        loss, logsum, column = lean.measure(logits, targets)
        ctx.save_for_backward(logits, logsum, column, targets)
        ctx.lean = lean
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, logsum, column, targets = ctx.saved_tensors
        ctx.lean.turn(logits, logsum, column, _share(grads[0], targets, logsum))
        return logits, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, lean: LeanLoss, chunks: int
    ) -> Tensor:
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        parts = (tensor.tensor_split(chunks) for tensor in (x, targets, grad_x))
        for x_part, target, grad_part in zip(*parts, strict=True):
            logits = x_part @ weight.t()
            loss, logsum, column = lean.measure(logits, target)
            total += loss
            lean.turn(logits, logsum, column, _share(torch.ones_like(total), target, logsum))
            torch.mm(logits, weight, out=grad_part)
            grad_weight.addmm_(logits.t(), x_part)
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,) = grads
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x.mul_(grad), grad_weight.mul_(grad), None, None, None


def _share(grad: Tensor, targets: Tensor, logsum: Tensor) -> Tensor:
    """What each row's gradient is multiplied by: nothing where its target does not count."""
    return (grad * (targets != IGNORE)).to(logsum.dtype)


def _gpu_sums(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:
        return _sums(logits, column)
    rows, width = logits.shape
    logsum, chosen = (torch.empty(rows, device=logits.device) for _ in range(2))
    kernels().row_sums[(rows,)](
        logits, column, logsum, chosen, width, BLOCK=_ROW_BLOCK, num_warps=8
    )
    return logsum, chosen


def _gpu_turn(logits: Tensor, logsum: Tensor, column: Tensor, share: Tensor) -> None:
    if logits.dtype == torch.float64:
        _turn(logits, logsum, column, share)
        return
    rows, width = logits.shape
    grid = (rows, -(-width // _TURN_BLOCK))
    kernels().turn[grid](logits, logsum, column, share, width, BLOCK=_TURN_BLOCK, num_warps=8)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _sums(logits: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """(logsumexp, the target's logit or 0) of each row."""
    wide = _wide(logits)
    top = wide.amax(dim=-1, keepdim=True)
    logsum = top[:, 0] + (wide - top).exp().sum(dim=-1).log()
    chosen = wide.gather(1, column.clamp(min=0)[:, None])[:, 0]
    return logsum, torch.where(column < 0, 0.0, chosen)


def _turn(logits: Tensor, logsum: Tensor, column: Tensor, share: Tensor) -> None:
    columns = torch.arange(logits.shape[1], device=logits.device)
    softmax = (_wide(logits) - logsum[:, None]).exp()
    hit = columns == column[:, None]
    logits.copy_(torch.where(hit, softmax - 1.0, softmax) * share[:, None])
