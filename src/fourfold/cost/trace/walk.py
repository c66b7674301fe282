"""A list of steps in numbers: bytes, FLOPs, messages by link level, live and peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from fourfold.cost.trace import attention, mlp, symbols
from fourfold.cost.trace.operations import Communication, Operation, TensorOutput
from fourfold.cost.trace.steps import WORKSPACE_BYTES, Ask, AxisGroups, Kind, Program, Step
from fourfold.result.trace import MessageCount, Op, StepCount, TensorCount
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES, Dtype

# The steps of a kind; refuses with a UserError what cannot be divided so.
PROGRAMS: dict[Kind, Callable[[Ask], Program]] = {
    "ulysses": attention.ulysses,
    "allgather": attention.allgather,
    "ring": attention.ring,
    "mlp": mlp.mlp,
    "mlp2d": mlp.mlp2d,
}


def walk(program: Program) -> tuple[StepCount, ...]:
    """What every step makes, computes, sends and holds, without the workspace of products."""
    held: dict[str, TensorCount] = {}
    return tuple(_walked(step, program, held) for step in program.steps)


def _walked(step: Step, program: Program, held: dict[str, TensorCount]) -> StepCount:
    """A tensor that replaces another of its name is written before that is let go."""
    done = StepCount(step.name, step.formula, step.times)
    for operation in step.operations:
        made = [_tensor(output, operation, program) for output in operation.outputs]
        read = [held[tensor.name] for tensor in operation.inputs]
        done.flops += operation.flops(made, read)
        if isinstance(operation, Communication):
            size = operation.buffer_bytes(made, read)
            done.messages += (MessageCount(operation.op, program.groups[0].name, size),)
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


def _tensor(output: TensorOutput, operation: Operation, program: Program) -> TensorCount:
    """Return a tensor in numbers; sums of attention are fp32 or wider."""
    wide: Dtype = "fp64" if program.dtype == "fp64" else "fp32"
    dtype = wide if output.name.endswith(("_fp32", "lse")) else program.dtype
    shape = symbols.shape(output.dims, program.sizes)
    size = prod(shape) * int(DTYPE_BYTES[dtype])
    symbolic = symbols.bracketed(output.dims)
    return TensorCount(output.name, shape, dtype, operation.how, size, symbolic=symbolic)


def _bytes(held: dict[str, TensorCount]) -> int:
    return sum(tensor.bytes for tensor in held.values())


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes one rank sends, and over which links."""

    op: Op
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


def _message(op: Op, whole_bytes: int, group: AxisGroups, cluster: Cluster, rank: int) -> Message:
    """A rank of n sends (n-1)/n of the buffer (all-reduce: twice that; send: all of it)."""
    n = group.size
    if n == 1:
        sent = 0
    elif op == "send":
        sent = whole_bytes
    else:
        sent = whole_bytes * (n - 1) // n * (2 if op == "all-reduce" else 1)
    return Message(op, group.name, sent, _by_level(op, sent, group, cluster, rank))


def _by_level(op: Op, sent: int, group: AxisGroups, cluster: Cluster, rank: int) -> dict[str, int]:
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
