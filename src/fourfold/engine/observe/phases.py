"""Point a ledger at a trainer: whose bytes are whose, which group serves which axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from fourfold.engine.compat import fsdp_parameters, local
from fourfold.engine.observe.ledger import STATE_KINDS, Ledger
from fourfold.engine.parallel.groups import World
from fourfold.engine.training.hooks import StepEvent
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
    for parameter in fsdp_parameters(trainer.chunks):
        # Not yet reduced: whole, in the accumulation format.
        if parameter.unsharded_accumulated_grad is not None:
            yield "gradients", parameter.unsharded_accumulated_grad_data
    for alone in trainer.alone.values():
        yield from alone.tensors()
    for state in trainer.optimizer.inner.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield "optimizer", value


def watch(trainer: Trainer, ledger: Ledger) -> None:
    """From here on the ledger knows this trainer's state and axes."""
    ledger.axes |= axes_of(trainer.world, trainer.spec.model)
    ledger.owners = lambda: owners_of(trainer)
    ledger.mark(ledger.phase)


def mark_phases(
    trainer: Trainer,
    mark: Callable[[str], None],
    check: Callable[[Tensor], None] | None = None,
) -> None:
    """From here on steps say where they are: forward and backward of each micro batch, reduce,
    optimizer. `check` sees the norm before weights change."""

    def observe(event: StepEvent) -> None:
        if event.phase in ("backward", "reduce", "optimizer"):
            mark(event.phase)
        if check is not None and event.norm is not None:
            check(event.norm)

    trainer.hooks.add(observe)
    for chunk in trainer.chunks:
        chunk.register_forward_pre_hook(lambda *_: mark("forward"))


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
