"""What a trainer tells those who watch its steps; and the micro batches of a step as one CUDA
graph: the host launches once, so no layer waits for it.

What a step does between its batch and its gradients is the same every time: the same kernels and
collectives (NCCL's can be captured too) on the same memory, which the graph keeps. Reduction of the
norm and the update stay outside: learning rate and clipping change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fourfold.engine.compat import foreach_copy_
from fourfold.engine.model.decoder import Decoder

# Tokens and targets of each micro batch.
Batches = Sequence[tuple[Tensor, Tensor]]
# Steps before the graph is recorded: they compile, choose kernels and connect ranks.
_EAGER_STEPS = 2


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A phase begins: `data` (the step itself), `backward` of one micro batch through `chunk`
    (`kind` B, or I and W of a split one), `reduce`, `optimizer` (`norm` is known, weights have not
    changed; a callback may raise); or the step is at its `end`."""

    phase: Literal["data", "backward", "reduce", "optimizer", "end"]
    chunk: Decoder | None = None
    kind: str = ""
    norm: Tensor | None = None


class StepOutcome(NamedTuple):
    """Tensors: nothing waits for the device until somebody reads them. Equal on all ranks. `loss`
    is that of the targets alone; what routers add to it is apart."""

    loss: Tensor
    grad_norm: Tensor
    router_loss: Tensor


class Recordable(Protocol):
    """What a graph is made of."""

    def micro_batches(self, batches: Batches) -> Tensor:
        """Make the gradients of all weights; the loss."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class StepGraph:
    """Made before the model is: the default stream can't be captured, and autograd adds a weight's
    gradients up on the stream that was current when the weight was first used. So everything that
    this process computes from now on runs on one other stream."""

    def __init__(self, trainer: Recordable, device: torch.device) -> None:
        torch.cuda.set_stream(torch.cuda.Stream(device))
        self.trainer, self.eager_steps = trainer, _EAGER_STEPS
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._grads: list[tuple[nn.Parameter, Tensor]] = []
        self._loss = torch.zeros(())

    def __call__(self, batches: Batches) -> Tensor:
        fresh = [tensor for pair in batches for tensor in pair]
        if [tensor.shape for tensor in fresh] != [tensor.shape for tensor in self._inputs]:
            self.forget()  # another batch size, and with it another list of micro batches
        if self._graph is None:
            if self.eager_steps > 0:
                self.eager_steps -= 1
                return self.trainer.micro_batches(batches)
            self._capture(fresh)
        elif fresh:
            foreach_copy_(self._inputs, fresh)
        assert self._graph is not None
        self._graph.replay()
        for parameter, grad in self._grads:
            parameter.grad = grad
        return self._loss

    def forget(self) -> None:
        """Give its memory back; the next step is recorded anew."""
        self._graph, self._grads, self._inputs = None, [], []

    def _capture(self, fresh: list[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in fresh]
        graph = torch.cuda.CUDAGraph()
        pairs = list(zip(self._inputs[::2], self._inputs[1::2], strict=True))
        # Other threads (NCCL's watchdog) may ask the device meanwhile.
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._loss = self.trainer.micro_batches(pairs)
        self._graph = graph
        self._grads = [(p, p.grad) for p in self.trainer.parameters() if p.grad is not None]
