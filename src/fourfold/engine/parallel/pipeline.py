"""Pipeline parallelism: run a rank's list of actions over micro batches that may differ in size.

Activations between stages are plain local tensors: [micro, tokens, hidden], the tokens cut over tp
under sequence parallelism, so that traffic between stages is cut too. Both sides know shapes before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.parallel.schedule import Action, Compute, Exchange, Transfer
from fourfold.engine.world import Group

# (chunk, micro batch, input) -> output of the chunk; the loss of the last one.
Forward = Callable[[Decoder, int, Tensor | None], Tensor]
# (chunk, whether this is the step's last backward pass through it)
BeforeBackward = Callable[[Decoder, bool], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What travels between stages, and to whom."""

    group: Group
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device


class Pipeline:
    """One step of one rank. `forward` gets None for the input on the first stage."""

    def __init__(
        self,
        chunks: Sequence[Decoder],
        link: Link,
        forward: Forward,
        before_backward: BeforeBackward,
    ) -> None:
        (self.chunk,) = chunks
        self.link, self.forward, self.before_backward = link, forward, before_backward
        self.is_first = link.group.rank == 0
        self.is_last = link.group.rank == link.group.size - 1
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self.to_send: dict[int, Tensor] = {}
        self.sending: list[tuple[dist.Work, Tensor]] = []

    def run(self, plan: Sequence[Action]) -> list[Tensor]:
        """Losses of the micro batches, detached; none but on the last stage."""
        losses: list[Tensor] = []
        backwards = sum(isinstance(a, Compute) and a.kind == "backward" for a in plan)
        for action in plan:
            if isinstance(action, Exchange):
                self._exchange(action)
            elif action.kind == "forward":
                losses += self._forward(action.micro)
            else:
                backwards -= 1
                self._backward(action.micro, last=backwards == 0)
        self._finish_sending()
        return losses

    def _forward(self, micro: int) -> list[Tensor]:
        output = self.forward(self.chunk, micro, self.inputs.get(micro))
        self.outputs[micro] = output
        return [output.detach()] if self.is_last else []

    def _backward(self, micro: int, *, last: bool) -> None:
        self.before_backward(self.chunk, last)
        output = self.outputs.pop(micro)
        torch.autograd.backward(output, None if self.is_last else self.grads.pop(micro))
        if not self.is_first:
            grad = self.inputs.pop(micro).grad
            assert grad is not None
            self.to_send[micro] = grad

    def _exchange(self, exchange: Exchange) -> None:
        """Post all transfers, wait for what is received; sends may be on their way for longer."""
        self._finish_sending()
        posted = [self._post(transfer) for transfer in exchange.transfers]
        works = dist.batch_isend_irecv([op for op, _ in posted])
        receives = [t.what.startswith("receive") for t in exchange.transfers]
        if len(works) != len(posted):  # NCCL joins a batch into one piece of work
            works = [works[0]] * len(posted)
        for work, (_, tensor), receive in zip(works, posted, receives, strict=True):
            if receive:
                work.wait()
            else:
                self.sending.append((work, tensor))

    def _finish_sending(self) -> None:
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()

    def _post(self, transfer: Transfer) -> tuple[dist.P2POp, Tensor]:
        group, micro = self.link.group, transfer.micro
        if transfer.what == "send-output":
            tensor, peer, op = self.outputs[micro].detach().contiguous(), 1, dist.isend
        elif transfer.what == "send-grad":
            tensor, peer, op = self.to_send.pop(micro).contiguous(), -1, dist.isend
        elif transfer.what == "receive-input":
            tensor, peer, op = self._buffer(micro), -1, dist.irecv
            self.inputs[micro] = tensor.requires_grad_()
        else:
            tensor, peer, op = self._buffer(micro), 1, dist.irecv
            self.grads[micro] = tensor
        target = group.ranks[group.rank + peer]
        return dist.P2POp(op, tensor.detach(), target, group=group.handle), tensor

    def _buffer(self, micro: int) -> Tensor:
        link = self.link
        return torch.empty(link.shapes[micro], dtype=link.dtype, device=link.device)
