"""Where a trainer is in its step, and whose bytes are whose: for ledgers, heartbeats and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fourfold.engine.compat import local
from fourfold.engine.compat_fsdp import fsdp_parameters
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.observe.ledger import STATE_KINDS, Ledger
from fourfold.engine.parallel.expert_groups import expert_groups
from fourfold.engine.parallel.groups import World
from fourfold.engine.training.step import StepEvent
from fourfold.engine.training.trainer import Trainer
from fourfold.result.one_rank import MemoryKind, RankCount, Traffic
from fourfold.spec.model import ModelShape

# Several groups serve one axis of the layout: copies and shards of data parallelism, ranks that
# share a KV head, the two stages that share a tied embedding.
_AXIS = {
    "dp_cp": "dp",
    "fsdp": "dp",
    "replicas": "dp",
    "kv": "tp",
    "embedding": "pp",
    "all_edp": "edp",
}


def axes_of(world: World, model: ModelShape) -> dict[str, str]:
    """Group name -> axis, for groups in which something travels."""
    groups = [*world.groups, world.kv_group(model)]
    if model.moe is not None:
        experts = expert_groups(world)
        groups += [experts.dispatch, experts.copies, experts.all_copies]
        groups += [experts.sequence, experts.stage]
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
    for state in trainer.optimizer.states():
        for value in state.values():
            if isinstance(value, Tensor):
                yield "optimizer", value


def watch(trainer: Trainer, ledger: Ledger) -> None:
    """From here on the ledger knows this trainer's state and axes."""
    ledger.axes |= axes_of(trainer.world, trainer.spec.model)
    ledger.owners = lambda: owners_of(trainer)
    ledger.mark(ledger.phase)


def mark_phases(
    trainer: Trainer, mark: Callable[[str], None], check: Callable[[Tensor], None] | None = None
) -> None:
    """From here on steps say where they are: forward and backward of each micro batch, reduce,
    optimizer. `check` sees the norm before weights change."""

    def observe(event: StepEvent) -> None:
        if event.phase in ("backward", "reduce", "optimizer"):
            mark(event.phase)
        if check is not None and event.norm is not None:
            check(event.norm)

    trainer.callbacks.append(observe)
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
            MemoryKind(name=name, bytes=size) for name, size in sorted(peak.kinds.items()) if size
        ),
        largest=tuple(allocation.large() for allocation in peak.largest),
        micro_batches=len(trainer.sizes),
        seconds=seconds,
    )


# Of a micro batch; a phase lasts until the next. With virtual stages each chunk has its own
# (`layers#1`). A step has the others once.
MICRO_PHASES = (
    "embed",
    "layers",
    "head",
    "between",
    "head back",
    "layers back",
    "embed back",
    "weights",
)
STEP_PHASES = ("data", "reduce", "optimizer")

Stamp = torch.cuda.Event | float


class PhaseTimeline:
    """`listeners` are told the name of every phase that begins."""

    def __init__(self, device: torch.device, listeners: Sequence[Callable[[str], None]]) -> None:
        self.device, self.listeners = device, listeners
        self.marks: list[tuple[str, Stamp]] = []
        self.recorded: list[tuple[str, Stamp]] = []  # in a CUDA graph, and again in every replay

    def mark(self, name: str) -> None:
        for listener in self.listeners:
            listener(name)
        if self.device.type != "cuda":
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        captured = torch.cuda.is_current_stream_capturing()
        (self.recorded if captured else self.marks).append((name, event))

    def take(self) -> dict[str, list[float]]:
        """Seconds of every interval so far by phase, only after the device has caught up; of steps
        that replay a graph those of the last one, whose marks are the ones that are left."""
        if self.recorded:
            last = max(i for i, (name, _) in enumerate(self.marks) if name == "data")
            self.marks = [self.marks[last], *self.recorded, *self.marks[last + 1 :]]
        seconds: dict[str, list[float]] = {}
        for (name, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if name != "end":
                seconds.setdefault(name, []).append(_between(begin, end))
        self.marks.clear()
        return seconds


def _between(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    return begin.elapsed_time(end) / 1e3


def phase_of(name: str) -> str:
    """Without the chunk."""
    return name.partition("#")[0]


def steady(intervals: dict[str, list[float]], passes: int) -> dict[str, float]:
    """Seconds (or anything else) of one ordinary micro batch by phase, from `passes` of them. The
    median of a chunk's passes: the first forward gathers and the last backward reduces besides."""
    by_phase = {}
    for name, values in intervals.items():
        phase = phase_of(name)
        if phase in MICRO_PHASES and values:
            by_phase[phase] = by_phase.get(phase, 0.0) + median(values) * len(values) / passes
    return {phase: by_phase[phase] for phase in MICRO_PHASES if phase in by_phase}


def attach(trainer: Trainer, mark: Callable[[str], None]) -> None:
    """From here on the trainer's steps call `mark` at the beginning of every phase."""
    names = {chunk: f"#{i}" if i else "" for i, chunk in enumerate(trainer.chunks)}

    def observe(event: StepEvent) -> None:
        if event.chunk is None:
            mark(event.phase)
        else:  # W makes gradients of weights, after those of inputs
            mark(("weights" if event.kind == "W" else "head back") + names[event.chunk])

    trainer.callbacks.append(observe)
    for chunk, name in names.items():
        _attach_chunk(chunk, lambda phase, name=name: mark(phase + name))


def _attach_chunk(chunk: Decoder, mark: Callable[[str], None]) -> None:
    layers = list(chunk.layers.values())
    chunk.register_forward_pre_hook(lambda *_: mark("embed"), prepend=True)
    chunk.register_forward_hook(lambda *_: mark("between"))

    def enter(phase: str, tensor: Any, after_backward: str) -> None:
        mark(phase)
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: mark(after_backward))

    layers[0].register_forward_pre_hook(
        lambda _, args: enter("layers", args[0], "embed back"), prepend=True
    )
    layers[-1].register_forward_hook(lambda _, args, out: enter("head", out, "layers back"))
