"""Traces of attention and of an MLP that are divided over ranks: the operations that a step is
priced by (cost/ops), forward, of one run whose sizes are printed as symbols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any, Literal

import numpy as np

from fourfold.cost.columns import DEFAULTS, NAMES, Columns
from fourfold.cost.ops import layer
from fourfold.cost.ops.op import Dim, Op, Sizes, Tensor, of_one
from fourfold.cost.ops.sequence import DIVIDED
from fourfold.cost.trace.steps import (
    Ask,
    AxisGroups,
    Kind,
    Program,
    Step,
    axis_groups,
    check_heads,
    check_ulysses,
    divided,
)
from fourfold.cost.trace.symbols import Size
from fourfold.errors import UserError
from fourfold.spec.words import CpKind

_NAIVE = (
    "naive attention: the N x N scores are kept; forward only, batch 1, full square (no causal "
    "mask), no softmax"
)
_FLASH = (
    "flash attention: scores never reach memory; forward only, batch 1; a causal mask leaves half "
    "the square, and every rank the same share of it (tokens dealt out from both ends)"
)
# Operations of a priced layer by the step in which they are traced; others are called as theirs.
_STEPS = {
    "attention.qkv": "project",
    "attention.out": "output",
    "mlp.input_comm": "gather",
    "mlp.gate_up": "up",
    "mlp.activation": "multiply",
    "mlp.down": "down",
    "mlp.down, sum": "sum",
}
# Beside a step's formula, by its name or by a function in it.
_NOTES = {
    "by_owner": "heads of one rank side by side",
    "parts": "tokens of one rank side by side",
    "by_token": "tokens of one rank side by side",
    "by_head": "heads of one token side by side",
    "in_order": "tokens in the order of the sequence",
    "stack": "kv: one message a round",
    "attention": "lse: its row sums",
    "attention_of_halves": "each half of q, keys before it and its own; added to out_fp32, lse",
    "attention_of_block": "added to out_fp32, lse",
    "gather": "over tp",
    "gate": "one layer",
    "up": "one layer",
    "down": "this rank's share of the sum",
    "sum": "over tp",
    "sum and cut": "over tp",
}
# Tensors that a step reads last.
_FREES = {
    "gather": ("input_part",),
    "multiply": ("up",),
    "sum": ("partial",),
    "sum and cut": ("partial",),
    "cast": ("out_fp32",),
}


class SymbolicRun(Columns):
    """One run whose sizes are symbols. What chooses among them does so without arrays, in which
    they would be numbers alone."""

    @property
    def split(self) -> Any:
        return self.tp if self.sp else Size(1.0)

    @property
    def kv_copies(self) -> Any:
        copies = of_one(super().kv_copies)
        return Size(copies, "kv_copies") if copies > 1 else Size(1.0)


def _run(**sizes: float) -> SymbolicRun:
    """Return a run of these sizes on no machine in particular."""
    facts: dict[str, float] = dict.fromkeys(NAMES, 0.0) | DEFAULTS | {"micro": 1.0} | sizes
    numbers: dict[str, Any] = {
        name: value if isinstance(value, Size) else np.float64(value)
        for name, value in facts.items()
    }
    return SymbolicRun(**numbers)


def _attention(kind: CpKind, ask: Ask) -> Program:
    """The sequence group is the whole world, whatever axes it is made of."""
    _check_attention(kind, ask)
    heads, head_size = Size(ask.heads, "heads"), Size(ask.hidden // ask.heads, "head_size")
    width = heads * head_size
    run = _run(
        seq=Size(ask.tokens, "tokens"),
        hidden=width,
        width=width,
        values=width,
        heads=heads,
        kv_heads=Size(ask.kv_heads, "kv_heads"),
        cp=Size(ask.ranks, "ranks"),
        tp=Size(1.0),
    )
    attend = partial(DIVIDED[kind], is_flash=ask.attention == "flash", rank=ask.rank)
    ops = list(_traced(layer.attention(run, _sizes(run), attend), "cp"))
    source = Tensor("input", (run.seq / run.cp, run.hidden))
    note = "input: tokens of this rank; Q, K, V, O: whole on every rank"
    own = {"heads": ask.heads, "kv_heads": ask.kv_heads, "tokens": ask.tokens // ask.ranks}
    names = {name: getattr(ask, name) for name in ("tokens", "hidden", "heads", "kv_heads")}
    program = Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=names | {"head_size": int(head_size), "ranks": ask.ranks},
        dtype=ask.dtype,
        groups=(AxisGroups("sequence", (tuple(range(ask.ranks)),)),),
        steps=_steps(_held((source, *_weights(ops)), note), ops),
        per_rank=own,
        rank=ask.rank,
        notes=(_NAIVE if ask.attention == "naive" else _FLASH,),
    )
    return program if kind != "ulysses" else _dealt(program, int(run.kv_copies))


def _dealt(program: Program, copies: int) -> Program:
    """Return a program whose ranks attend with a part of the heads."""
    own, ranks = program.per_rank, program.ranks
    heads = {"heads": own["heads"] // ranks, "kv_heads": own["kv_heads"] * copies // ranks}
    program = replace(program, per_rank=own | heads)
    if copies == 1:
        return program
    note = f"kv_copies: KV heads do not deal out to the ranks, each is sent {copies} times"
    sizes = program.sizes | {"kv_copies": copies}
    return replace(program, sizes=sizes, notes=(*program.notes, note))


def _check_attention(kind: CpKind, ask: Ask) -> None:
    """A causal mask needs two chunks a rank, an early one and a late one, for equal work, but where
    each rank sees whole sequences."""
    check_heads(ask)
    if kind == "ulysses":
        check_ulysses(ask.heads, ask.ranks)
        divided("tokens", ask.tokens, ask.ranks, "every rank holds the same share")
        return
    chunks = ask.ranks if ask.attention == "naive" else 2 * ask.ranks
    divided("tokens", ask.tokens, chunks, f"{kind} cuts the sequence into equal chunks")


def _mlp(kind: Literal["mlp", "mlp2d"], ask: Ask) -> Program:
    """Tensor parallel (Shoeybi et al., arXiv 1909.08053): tokens whole on every rank, partial
    outputs are summed. In `mlp2d` tokens are cut over dp and, between layers, over tp (sequence
    parallel, Korthikanti, arXiv 2205.05198): gathered before the first matrix, summed and cut after
    the last.

    A gated MLP has a third matrix, W3 in Llama's naming: act(input x W1) is multiplied by
    input x W3.
    """
    _check_mlp(kind, ask)
    is_cut = kind == "mlp2d"
    tp, dp = Size(ask.layout.tp, "tp"), Size(ask.layout.dp, "dp")
    run = _run(
        seq=Size(ask.tokens, "tokens") / (dp if is_cut else Size(1.0)),
        hidden=Size(ask.hidden, "hidden"),
        width=Size(ask.hidden, "hidden"),
        heads=Size(1.0),
        kv_heads=Size(1.0),
        ffn=Size(ask.ffn, "ffn"),
        gated=float(ask.gated),
        sp=float(is_cut),
        tp=tp,
        cp=Size(1.0),
    )
    ops = list(_traced(layer.mlp(run, _sizes(run)), "tp"))
    if is_cut:
        ops = [op._replace(name="sum and cut") if op.name == "sum" else op for op in ops]
    weights = [Tensor(w.name, (Size(ask.layers, "layers"), *w.dims)) for w in _weights(ops)]
    source = Tensor("input_part" if is_cut else "input", (run.seq / run.split, run.hidden))
    note = f"{', '.join(w.name for w in weights)}: this rank's columns and rows, of all layers"
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
        steps=_steps(_held((*weights, source), note), ops),
        per_rank={"tokens": int(run.seq), "ffn": ask.ffn // ask.layout.tp},
        rank=ask.rank,
        notes=tuple(notes),
    )


def _check_mlp(kind: Literal["mlp", "mlp2d"], ask: Ask) -> None:
    layout = ask.layout
    if kind == "mlp" and layout.dp * layout.cp > 1:
        raise UserError(
            "is not supported by mlp, which splits over tp only",
            field="dp" if layout.dp > 1 else "cp",
            value=layout.dp if layout.dp > 1 else layout.cp,
            hint="use mlp2d, which also splits tokens over dp",
        )
    if layout.cp > 1:
        rule = "is the same as dp for an MLP, which does not mix tokens"
        raise UserError(rule, field="cp", value=layout.cp, hint=f"use dp = {layout.dp * layout.cp}")
    if kind == "mlp2d":
        divided("tokens", ask.tokens, layout.dp * layout.tp, "tokens are cut over dp and tp")
    divided("ffn", ask.ffn, layout.tp, "columns of W1 are cut over tp")


# The steps of a kind; refuses with a UserError what cannot be divided so.
PROGRAMS: dict[Kind, Callable[[Ask], Program]] = {
    **{kind: partial(_attention, kind) for kind in DIVIDED},
    "mlp": partial(_mlp, "mlp"),
    "mlp2d": partial(_mlp, "mlp2d"),
}


def _sizes(run: SymbolicRun) -> Sizes:
    one: Dim = Size(1.0)
    return Sizes(run, one)


def _traced(ops: Iterable[Op], axis: str) -> Iterator[Op]:
    """Yield the operations that write or read named tensors, by the names of their steps; of other
    axes no message. Every matrix is a product of its own."""
    for op in ops:
        has_tensors = bool(op.writes or op.reads) and op.phase == "forward"
        if has_tensors and op.axis in ("", axis) and of_one(op.halves):
            traced = op._replace(name=_STEPS.get(op.name, op.name))
            yield from _products(traced) if op.kind == "product" else [traced]


def _products(op: Op) -> Iterator[Op]:
    """Yield the products of one that engines may fuse; with a gate, the first is the gate's."""
    source, *weights = op.reads
    function = op.function
    for tensor, weight in zip(op.writes, weights, strict=True):
        columns: Dim = prod(tensor.dims[1:])
        name = "gate" if function == "act" and len(weights) > 1 else op.name
        yield op._replace(
            name=name,
            n=columns,
            writes=(tensor,),
            reads=(source, weight),
            function=function,
        )
        function = ""


def _weights(ops: Iterable[Op]) -> list[Tensor]:
    """Return the matrices of these products, as they are held."""
    return [Tensor(str(op.reads[1]), (op.k, op.n)) for op in ops if op.kind == "product"]


def _held(tensors: tuple[Tensor, ...], note: str) -> Step:
    """Return the step before the first: weights and inputs, which exist."""
    held = Op("hold", "held", function="hold", writes=tensors)
    return Step("hold", (held,), note)


def _steps(hold: Step, ops: list[Op]) -> tuple[Step, ...]:
    """Return a step for each run of operations with one name. Equal rounds of a ring that follow
    each other are one step that is done several times."""
    steps = [_step(name, tuple(run)) for name, run in groupby(ops, lambda op: op.name)]
    folded: list[Step] = []
    first = 1
    for step, run in groupby(steps, _nameless):
        equal = list(run)
        times = len(equal)
        name = equal[0].name
        if name.startswith("round"):
            name = f"round {first}" if times == 1 else f"rounds {first}-{first + times - 1}"
            first += times
        folded.append(replace(step, name=name, times=times))
    return (hold, *folded)


def _nameless(step: Step) -> Step:
    operations = tuple(op._replace(name="") for op in step.operations)
    name = "" if step.name.startswith("round") else step.name
    return replace(step, name=name, operations=operations)


def _step(name: str, ops: tuple[Op, ...]) -> Step:
    words = (name, *(op.function for op in ops))
    return Step(
        name,
        ops,
        note=next((_NOTES[word] for word in words if word in _NOTES), ""),
        frees=(*_FREES.get(name, ()), *(t.name for op in ops for t in op.writes if t.brief)),
        moves=(("kv_next", "kv"),) if any(op.kind == "send" for op in ops) else (),
    )
