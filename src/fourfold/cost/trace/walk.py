"""A list of steps in numbers: bytes, FLOPs, messages by link level, live and peak memory.

Steps of a divided MLP: tensor parallel (Shoeybi et al., arXiv 1909.08053), and in `mlp2d` with
tokens cut over dp, and over tp between the layers (sequence parallel, Korthikanti, 2205.05198).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from fourfold.cost.trace import attention, symbols
from fourfold.cost.trace.steps import (
    WORKSPACE_BYTES,
    Ask,
    AxisGroups,
    Kind,
    Program,
    Send,
    Step,
    Tensor,
    axis_groups,
    divided,
)
from fourfold.errors import UserError
from fourfold.result.trace import How, Op
from fourfold.spec.cluster import Cluster
from fourfold.spec.words import DTYPE_BYTES


def mlp(ask: Ask) -> Program:
    """Tokens whole on every rank; partial outputs are summed over tp."""
    if ask.layout.dp * ask.layout.cp > 1:
        raise UserError(
            "is not supported by mlp, which splits over tp only",
            field="dp" if ask.layout.dp > 1 else "cp",
            value=ask.layout.dp if ask.layout.dp > 1 else ask.layout.cp,
            hint="use mlp2d, which also splits tokens over dp",
        )
    whole = ("tokens", "hidden")
    summed = Step(
        "sum",
        "output = all_reduce(partial) over tp",
        (Tensor("output", whole, "received"),),
        sends=(Send("all-reduce", "tp", whole),),
        frees=("partial",),
    )
    return _program(ask, "mlp", (*_products("tokens", Tensor("input", whole)), summed), ask.tokens)


def mlp2d(ask: Ask) -> Program:
    """Tokens over dp and, between layers, over tp: gathered before W1, summed and cut after W2."""
    layout = ask.layout
    if layout.cp > 1:
        rule = "is the same as dp for an MLP, which does not mix tokens"
        raise UserError(rule, field="cp", value=layout.cp, hint=f"use dp = {layout.dp * layout.cp}")
    divided("tokens", ask.tokens, layout.dp * layout.tp, "tokens are cut over dp and tp")
    part, gathered = ("tokens/dp/tp", "hidden"), ("tokens/dp", "hidden")
    gather = Step(
        "gather",
        "input = all_gather(input_part) over tp",
        (Tensor("input", gathered, "received"),),
        sends=(Send("all-gather", "tp", gathered),),
        frees=("input_part",),
    )
    hold, *products = _products("tokens/dp", Tensor("input_part", part))
    cut = Step(
        "sum and cut",
        "output = reduce_scatter(partial) over tp",
        (Tensor("output", part, "received"),),
        sends=(Send("reduce-scatter", "tp", gathered),),
        frees=("partial",),
    )
    return _program(ask, "mlp2d", (hold, gather, *products, cut), ask.tokens // layout.dp)


def _products(tokens: str, source: Tensor) -> tuple[Step, Step, Step]:
    """Weights and input; both products of `tokens` tokens."""
    product = (f"2*{tokens}*hidden*ffn/tp",)
    first, second = ("layers", "hidden", "ffn/tp"), ("layers", "ffn/tp", "hidden")
    intermediate, partial = (tokens, "ffn/tp"), (tokens, "hidden")
    return (
        Step(
            "hold",
            "W1, W2: this rank's columns and rows, of all layers",
            (Tensor("W1", first), Tensor("W2", second), source),
        ),
        Step(
            "up",
            "intermediate = act(input x W1), one layer",
            (Tensor("intermediate", intermediate),),
            product,
        ),
        Step(
            "down",
            "partial = intermediate x W2, this rank's share of the sum",
            (Tensor("partial", partial),),
            product,
        ),
    )


def _program(ask: Ask, kind: Kind, steps: tuple[Step, ...], tokens: int) -> Program:
    """`tokens`: of one rank."""
    divided("ffn", ask.ffn, ask.layout.tp, "columns of W1 are cut over tp")
    sizes = {name: getattr(ask, name) for name in ("tokens", "hidden", "ffn", "layers")}
    notes = [
        "forward only, batch 1; the activation function works in place, its FLOPs are not counted"
    ]
    if ask.layers > 1:
        notes.append(f"weights of {ask.layers} layers are held; FLOPs and traffic are one layer's")
    return Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=sizes | {"tp": ask.layout.tp, "dp": ask.layout.dp},
        dtype=ask.dtype,
        groups=(axis_groups(ask.layout, ("tp",)), axis_groups(ask.layout, ("dp",))),
        steps=steps,
        per_rank={"tokens": tokens, "ffn": ask.ffn // ask.layout.tp},
        rank=ask.rank,
        notes=tuple(notes),
    )


# The steps of a kind; refuses with a UserError what cannot be divided so.
PROGRAMS: dict[Kind, Callable[[Ask], Program]] = {
    "ulysses": attention.ulysses,
    "allgather": attention.allgather,
    "ring": attention.ring,
    "mlp": mlp,
    "mlp2d": mlp2d,
}


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
    """One step in numbers; FLOPs and bytes sent are those of all its `times`. `peak_bytes` is the
    highest so far, as an allocator reports it; `step_peak_bytes` is the step's own."""

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
        sent = (
            (send.op, step.times * _buffer_bytes(send, program), program.group(send.group))
            for send in step.sends
        )
        rows.append(
            StepRow(
                name=step.name,
                formula=step.formula,
                times=step.times,
                tensors=tensors,
                flops_rank=flops,
                flops_all=flops * program.ranks,
                messages=tuple(message(*one, cluster, program.rank) for one in sent),
                live_bytes=sum(held.values()),
                step_peak_bytes=top,
                peak_bytes=peak,
            )
        )
    return tuple(rows)


def _buffer_bytes(send: Send, program: Program) -> int:
    return prod(symbols.shape(send.dims, program.sizes)) * int(DTYPE_BYTES[program.dtype])


def payload_bytes(step: Step, program: Program) -> int:
    """Whole buffers of a step's messages, as one counts calls; a group of one sends none."""
    return step.times * sum(
        _buffer_bytes(send, program) for send in step.sends if program.group(send.group).size > 1
    )


def tensor_row(tensor: Tensor, program: Program) -> TensorRow:
    dtype = tensor.dtype or program.dtype
    shape = symbols.shape(tensor.dims, program.sizes)
    count, symbolic = prod(shape), symbols.bracketed(tensor.dims)
    size = count * int(DTYPE_BYTES[dtype])
    return TensorRow(tensor.name, symbolic, shape, count, size, dtype, tensor.how)


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


def message(op: Op, whole_bytes: int, group: AxisGroups, cluster: Cluster, rank: int) -> Message:
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
