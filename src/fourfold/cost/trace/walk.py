"""A list of steps in numbers: bytes, FLOPs, messages by link level, live and peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from fourfold.cost.ops.op import Op, Tensor, flops, of_one
from fourfold.cost.trace.steps import WORKSPACE_BYTES, AxisGroups, Program, Step
from fourfold.cost.trace.symbols import bracketed
from fourfold.result.trace import How, MessageCount, MessageOp, StepCount, TensorCount
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES, Dtype

_HOW: dict[str, How] = {
    "copy": "copied",
    "view": "view",
    "collective": "received",
    "send": "received",
}


def walk(program: Program) -> tuple[StepCount, ...]:
    """What every step makes, computes, sends and holds, without the workspace of products."""
    held: dict[str, TensorCount] = {}
    return tuple(_walked(step, program, held) for step in program.steps)


def _walked(step: Step, program: Program, held: dict[str, TensorCount]) -> StepCount:
    """A tensor that replaces another of its name is written before that is let go."""
    done = StepCount(step.name, step.formula, step.times)
    for op in step.operations:
        made = [_tensor(output, op, program) for output in op.writes]
        done.flops += _flops(op)
        if op.axis:
            (source,) = op.reads
            size = max(made[0].bytes, held[str(source)].bytes)
            message = cast(MessageOp, op.function)
            done.messages += (MessageCount(message, program.groups[0].name, size),)
        for tensor in made:
            done.tensors += (tensor,)
            if tensor.how != "view":
                done.peak_bytes = max(done.peak_bytes, _bytes(held) + tensor.bytes)
                held[tensor.name] = tensor
    done.peak_bytes = max(done.peak_bytes, _bytes(held))
    for name in step.frees:
        del held[name]
    for source, target in step.moves:
        held[target] = held.pop(source)
    done.live_bytes = _bytes(held)
    return done


def _flops(op: Op) -> int:
    """Return the FLOPs of one rank, in whole numbers of any size."""
    m, n, k, groups = (_exact(size) for size in (op.m, op.n, op.k, op.groups))
    return flops(op.kind, op.phase, m * n * k * groups)


def _exact(size: Any) -> int:
    number = of_one(size)
    assert number.is_integer(), f"{size} = {number} is not whole"
    return int(number)


def _tensor(output: Tensor, op: Op, program: Program) -> TensorCount:
    """Return a tensor in numbers."""
    wide: Dtype = "fp64" if program.dtype == "fp64" else "fp32"
    dtype = wide if output.wide else program.dtype
    shape = tuple(map(_exact, output.dims))
    size = prod(shape) * int(DTYPE_BYTES[dtype])
    how = _HOW.get(op.kind, "new")
    return TensorCount(output.name, shape, dtype, how, size, symbolic=bracketed(output.dims))


def _bytes(held: dict[str, TensorCount]) -> int:
    return sum(tensor.bytes for tensor in held.values())


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes one rank sends, and over which links."""

    op: MessageOp
    group: str
    bytes: int
    by_link_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step in numbers; FLOPs and bytes sent are those of all its `times`. `peak_bytes` is the
    highest so far, as an allocator reports it; `step_peak_bytes` is the step's own."""

    name: str
    formula: str
    times: int
    tensors: tuple[TensorCount, ...]
    flops_rank: int
    flops_all: int
    comm: tuple[Message, ...]
    live_bytes: int
    step_peak_bytes: int
    peak_bytes: int

    @property
    def comm_bytes(self) -> int:
        return sum(message.bytes for message in self.comm)


def step_rows(
    program: Program,
    steps: Iterable[StepCount],
    cluster: Cluster,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> tuple[StepRow, ...]:
    """Of all ranks, over links, with what products hold besides."""
    made: list[StepRow] = []
    workspace = peak = 0
    for step in steps:
        workspace = workspace_bytes if step.flops else workspace
        own_peak = step.peak_bytes + workspace
        peak = max(peak, own_peak)
        flops = step.times * step.flops
        made.append(
            StepRow(
                name=step.name,
                formula=step.formula,
                times=step.times,
                tensors=step.tensors,
                flops_rank=flops,
                flops_all=flops * program.ranks,
                comm=tuple(
                    _message(
                        m.op, step.times * m.bytes, program.group(m.group), cluster, program.rank
                    )
                    for m in step.messages
                ),
                live_bytes=step.live_bytes + workspace,
                step_peak_bytes=own_peak,
                peak_bytes=peak,
            )
        )
    return tuple(made)


def _message(
    op: MessageOp, whole_bytes: int, group: AxisGroups, cluster: Cluster, rank: int
) -> Message:
    """A rank of n sends (n-1)/n of the buffer (all-reduce: twice that; send: all of it)."""
    n = group.size
    if n == 1:
        sent = 0
    elif op == "send":
        sent = whole_bytes
    else:
        sent = whole_bytes * (n - 1) // n * (2 if op == "all-reduce" else 1)
    return Message(op, group.name, sent, _by_level(op, sent, group, cluster, rank))


def _by_level(
    op: MessageOp, sent: int, group: AxisGroups, cluster: Cluster, rank: int
) -> dict[str, int]:
    """An all-to-all sends each peer the same, over whatever link reaches it. The others go round
    a ring, which runs at the pace of its slowest hop: all bytes are put down to that level."""
    if sent == 0:
        return {}
    if op != "all-to-all":
        return {cluster.level(group.span).name: sent}
    peers = [peer for peer in group.of(rank) if peer != rank]
    counts = Counter(_level_between(cluster, rank, peer) for peer in peers)
    return {name: sent * count // len(peers) for name, count in counts.items()}


def _level_between(cluster: Cluster, one: int, other: int) -> str:
    for link in cluster.links:
        if one // link.ranks == other // link.ranks:
            return link.name
    return cluster.links[-1].name
