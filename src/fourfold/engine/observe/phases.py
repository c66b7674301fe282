"""Point a ledger at a trainer: whose bytes are whose, which group serves which axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.observe.ledger import STATE_KINDS, Ledger
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.shards import local
from fourfold.engine.training.trainer import Trainer
from fourfold.result.dryrun import Kind, Large, RankCount, Traffic
from fourfold.spec.model import ModelShape

# Several groups serve one axis of the layout: copies and shards of data parallelism, ranks that
# share a KV head, the two stages that share a tied embedding.
_AXIS = {"dp_cp": "dp", "fsdp": "dp", "replicas": "dp", "kv": "tp", "embedding": "pp"}


def axes_of(world: World, model: ModelShape) -> dict[str, str]:
    """Group name -> axis, for groups in which something travels."""
    groups = [*world.groups, world.kv_group(model)]
    return {
        group.name: _AXIS.get(group.axis, group.axis)
        for group in groups
        if group is not None and group.size > 1
    }


def owners_of(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """State as of now: what outlives a step, or (gradients) is on its way to the optimizer."""
    for parameter in trainer.parameters():
        yield "parameters", local(parameter.detach())
        if parameter.grad is not None:
            yield "gradients", local(parameter.grad)
    for parameter in _fsdp_parameters(trainer.chunks):
        # Not yet reduced: whole, in the accumulation format.
        if parameter.unsharded_accumulated_grad is not None:
            yield "gradients", parameter.unsharded_accumulated_grad_data
    for alone in trainer.alone.values():
        yield from alone.tensors()
    for state in trainer.optimizer.inner.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield "optimizer", value


def _fsdp_parameters(chunks: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


def watch(trainer: Trainer, ledger: Ledger) -> None:
    """From here on the ledger knows this trainer's state and axes."""
    ledger.axes |= axes_of(trainer.world, trainer.spec.model)
    ledger.owners = lambda: owners_of(trainer)
    ledger.mark(ledger.phase)


def mark_phases(
    trainer: Trainer,
    mark: Callable[[str], None],
    check: Callable[[Tensor], None] | None = None,
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A step that says where it is: forward and backward of each micro batch, reduce, optimizer.

    The same calls in the same order as Trainer.step; gives (loss, gradient norm), unread. `check`
    sees the norm before weights change.
    """
    before, reduce, update = trainer.before_backward, trainer.reduce, trainer.update

    def before_backward(chunk: Decoder, kind: str, last: bool) -> None:
        mark("backward")
        before(chunk, kind, last)

    def marked_reduce(loss: Tensor) -> tuple[Tensor, Tensor]:
        mark("reduce")
        return reduce(loss)

    def marked_update(norm: Tensor) -> None:
        mark("optimizer")
        if check is not None:
            check(norm)
        update(norm)

    def step(index: int) -> tuple[Tensor, Tensor]:
        done = trainer.step(index)
        return done.loss, done.grad_norm

    # The trainer looks these up on itself at every step, so that they can be replaced from outside.
    for name, method in (
        ("before_backward", before_backward),
        ("reduce", marked_reduce),
        ("update", marked_update),
    ):
        setattr(trainer, name, method)
    for chunk in trainer.chunks:
        chunk.register_forward_pre_hook(lambda *_: mark("forward"))
    return step


def count_of(ledger: Ledger, trainer: Trainer, seconds: float = 0.0) -> RankCount:
    """The ledger's entries of one step as a result."""
    peak = ledger.peak
    state = sum(peak.kinds.get(kind, 0) for kind in STATE_KINDS)
    known = set(ledger.axes.values())
    return RankCount(
        stage=trainer.world.stage,
        rank=trainer.world.rank,
        params=sum(parameter.numel() for parameter in trainer.parameters()),
        state_bytes=state,
        activation_bytes=ledger.peak_bytes - state,
        peak_bytes=ledger.peak_bytes,
        peak_phase=peak.phase,
        flops=ledger.flops,
        comm=tuple(
            Traffic(axis=axis, op=op, bytes=size, calls=ledger.calls[axis, op])
            for (axis, op), size in sorted(ledger.traffic.items())
            if axis in known  # a group of one rank sends nothing
        ),
        kinds=tuple(
            Kind(name=name, bytes=size) for name, size in sorted(peak.kinds.items()) if size
        ),
        largest=tuple(
            Large(
                bytes=allocation.size,
                kind=allocation.kind,
                shape="x".join(map(str, allocation.shape)),
                dtype=allocation.dtype,
                op=allocation.op,
                phase=allocation.phase,
            )
            for allocation in peak.largest
        ),
        micro_batches=len(trainer.sizes),
        seconds=seconds,
    )
