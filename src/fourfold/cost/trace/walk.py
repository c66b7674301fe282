"""What does a list of steps come to? Bytes, FLOPs, messages by link level, live and peak memory.

`peak_bytes` is the highest so far, as an allocator reports it; `step_peak_bytes` is the step's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from fourfold.cost.trace import attention, mlp, ring, symbols
from fourfold.cost.trace.ask import Ask
from fourfold.cost.trace.steps import WORKSPACE_BYTES, Group, Kind, Program, Send, Step, Tensor
from fourfold.result.trace import How, Op
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES, Dtype

PROGRAMS: dict[Kind, Callable[[Ask], Program]] = {
    "ulysses": attention.ulysses,
    "allgather": attention.allgather,
    "ring": ring.ring,
    "mlp": mlp.mlp,
    "mlp2d": mlp.mlp2d,
}


def build(kind: Kind, ask: Ask) -> Program:
    """The steps of a kind; refuses with a UserError what cannot be divided so."""
    return PROGRAMS[kind](ask)


@dataclass(frozen=True, slots=True)
class TensorRow:
    name: str
    symbolic: str
    shape: tuple[int, ...]
    elements: int
    bytes: int
    dtype: str
    how: How


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes one rank sends; `by_level` splits them over the links they cross."""

    op: Op
    group: str
    bytes: int
    by_level: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step in numbers; FLOPs and bytes sent are those of all its `times`."""

    name: str
    formula: str
    times: int
    tensors: tuple[TensorRow, ...]
    flops_rank: int
    flops_all: int
    messages: tuple[Message, ...]
    live_bytes: int
    step_peak_bytes: int
    peak_bytes: int

    @property
    def comm_bytes(self) -> int:
        return sum(message.bytes for message in self.messages)


def walk(
    program: Program, cluster: Cluster, *, workspace_bytes: int = WORKSPACE_BYTES
) -> tuple[StepRow, ...]:
    """Every step in numbers, in order."""
    groups = {group.name: group for group in program.groups}
    held: dict[str, int] = {}
    rows: list[StepRow] = []
    peak = 0
    for step in program.steps:
        if step.flops:
            held.setdefault("workspace", workspace_bytes)
        tensors = tuple(tensor_row(tensor, program) for tensor in step.tensors)
        top = _hold(held, tensors, step)
        peak = max(peak, top)
        flops = step.times * _flops(step, program)
        messages = tuple(
            _message(send, program, groups[send.group], cluster, step.times) for send in step.sends
        )
        rows.append(
            StepRow(
                name=step.name,
                formula=step.formula,
                times=step.times,
                tensors=tensors,
                flops_rank=flops,
                flops_all=flops * program.ranks,
                messages=messages,
                live_bytes=sum(held.values()),
                step_peak_bytes=top,
                peak_bytes=peak,
            )
        )
    return tuple(rows)


def item_bytes(dtype: Dtype) -> int:
    return int(DTYPE_BYTES[dtype])


def payload_bytes(step: Step, program: Program) -> int:
    """Whole buffers of a step's messages, as one counts calls; a group of one sends none."""
    sizes = {group.name: group.size for group in program.groups}
    return step.times * sum(
        prod(symbols.shape(send.dims, program.sizes)) * item_bytes(send.dtype or program.dtype)
        for send in step.sends
        if sizes[send.group] > 1
    )


def tensor_row(tensor: Tensor, program: Program) -> TensorRow:
    dtype = tensor.dtype or program.dtype
    shape = symbols.shape(tensor.dims, program.sizes)
    count = prod(shape)
    return TensorRow(
        name=tensor.name,
        symbolic=symbols.bracketed(tensor.dims),
        shape=shape,
        elements=count,
        bytes=count * item_bytes(dtype),
        dtype=dtype,
        how=tensor.how,
    )


def _hold(held: dict[str, int], tensors: tuple[TensorRow, ...], step: Step) -> int:
    """Write the step's tensors one after the other into `held`; returns the step's peak."""
    live = top = sum(held.values())
    for tensor in tensors:
        if tensor.how == "view":
            continue
        live += tensor.bytes
        top = max(top, live)
        live -= held.get(tensor.name, 0)
        held[tensor.name] = tensor.bytes
    for name in step.frees:
        del held[name]
    for source, target in step.moves:
        held[target] = held.pop(source)
    return top


def _flops(step: Step, program: Program) -> int:
    total = sum((symbols.ratio(term, program.sizes) for term in step.flops), Fraction(0))
    assert total.denominator == 1, step.name
    return total.numerator


def _message(send: Send, program: Program, group: Group, cluster: Cluster, times: int) -> Message:
    count = prod(symbols.shape(send.dims, program.sizes))
    whole = times * count * item_bytes(send.dtype or program.dtype)
    return message(send.op, whole, group, cluster, program.rank)


def message(op: Op, whole_bytes: int, group: Group, cluster: Cluster, rank: int) -> Message:
    """A rank of n sends (n-1)/n of the buffer (all-reduce: twice that; send: all of it)."""
    n = group.size
    if n == 1:
        sent = 0
    elif op == "send":
        sent = whole_bytes
    else:
        sent = whole_bytes * (n - 1) // n * (2 if op == "all-reduce" else 1)
    return Message(op, group.name, sent, _by_level(op, sent, group, cluster, rank))


def _by_level(op: Op, sent: int, group: Group, cluster: Cluster, rank: int) -> dict[str, int]:
    """An all-to-all sends each peer the same, over whatever link reaches it. The others go round
    a ring, which runs at the pace of its slowest hop: all bytes are put down to that level."""
    if sent == 0:
        return {}
    if op != "all-to-all":
        return {cluster.level(group.span).name: sent}
    peers = [peer for peer in group.of(rank) if peer != rank]
    counts: dict[str, int] = {}
    for peer in peers:
        name = _level_between(cluster, rank, peer)
        counts[name] = counts.get(name, 0) + 1
    return {name: sent * count // len(peers) for name, count in counts.items()}


def _level_between(cluster: Cluster, one: int, other: int) -> str:
    for link in cluster.links:
        if one // link.ranks == other // link.ranks:
            return link.name
    return cluster.links[-1].name
