"""Which steps does a divided MLP take? Tensor parallel, and tensor x data parallel.

Columns of W1 and rows of W2 are cut over tp (Shoeybi et al., arXiv 1909.08053); in `mlp2d` tokens
are cut over dp, and over tp between the layers (sequence parallel, Korthikanti et al., 2205.05198).
"""

from __future__ import annotations

from fourfold.cost.trace.ask import Ask, divided
from fourfold.cost.trace.steps import Kind, Program, Send, Step, Tensor, axis_groups
from fourfold.errors import UserError

_NOTES = (
    "forward only, batch 1; the activation function works in place, its FLOPs are not counted",
)


def mlp(ask: Ask) -> Program:
    """Tokens whole on every rank; partial outputs are summed over tp."""
    if ask.layout.dp * ask.layout.cp > 1:
        raise UserError(
            "is not supported by mlp, which splits over tp only",
            field="dp" if ask.layout.dp > 1 else "cp",
            value=ask.layout.dp if ask.layout.dp > 1 else ask.layout.cp,
            hint="use mlp2d, which also splits tokens over dp",
        )
    divided("ffn", ask.ffn, ask.layout.tp, "columns of W1 are cut over tp")
    summed = Step(
        name="sum",
        formula="output = all_reduce(partial) over tp",
        tensors=(Tensor("output", ("tokens", "hidden"), "received"),),
        sends=(Send("all-reduce", "tp", ("tokens", "hidden")),),
        frees=("partial",),
    )
    steps = (_hold(Tensor("input", ("tokens", "hidden"))), *_products("tokens"), summed)
    return _program(ask, "mlp", steps, {"tokens": ask.tokens, "ffn": ask.ffn // ask.layout.tp})


def mlp2d(ask: Ask) -> Program:
    """Tokens over dp and, between layers, over tp: gathered before W1, summed and cut after W2."""
    layout = ask.layout
    if layout.cp > 1:
        raise UserError(
            "is the same as dp for an MLP, which does not mix tokens",
            field="cp",
            value=layout.cp,
            hint=f"use dp = {layout.dp * layout.cp}",
        )
    divided("tokens", ask.tokens, layout.dp * layout.tp, "tokens are cut over dp and tp")
    divided("ffn", ask.ffn, layout.tp, "columns of W1 are cut over tp")
    part, gathered = ("tokens/dp/tp", "hidden"), ("tokens/dp", "hidden")
    steps = (
        _hold(Tensor("input_part", part)),
        Step(
            name="gather",
            formula="input = all_gather(input_part) over tp",
            tensors=(Tensor("input", gathered, "received"),),
            sends=(Send("all-gather", "tp", gathered),),
            frees=("input_part",),
        ),
        *_products("tokens/dp"),
        Step(
            name="sum and cut",
            formula="output = reduce_scatter(partial) over tp",
            tensors=(Tensor("output", part, "received"),),
            sends=(Send("reduce-scatter", "tp", gathered),),
            frees=("partial",),
        ),
    )
    per_rank = {"tokens": ask.tokens // layout.dp, "ffn": ask.ffn // layout.tp}
    return _program(ask, "mlp2d", steps, per_rank)


def _hold(source: Tensor) -> Step:
    return Step(
        name="hold",
        formula="W1, W2: this rank's columns and rows, of all layers",
        tensors=(
            Tensor("W1", ("layers", "hidden", "ffn/tp")),
            Tensor("W2", ("layers", "ffn/tp", "hidden")),
            source,
        ),
    )


def _products(tokens: str) -> tuple[Step, Step]:
    product = (f"2*{tokens}*hidden*ffn/tp",)
    up = Step(
        name="up",
        formula="intermediate = act(input x W1), one layer",
        tensors=(Tensor("intermediate", (tokens, "ffn/tp")),),
        flops=product,
    )
    down = Step(
        name="down",
        formula="partial = intermediate x W2, this rank's share of the sum",
        tensors=(Tensor("partial", (tokens, "hidden")),),
        flops=product,
    )
    return up, down


def _program(ask: Ask, kind: Kind, steps: tuple[Step, ...], per_rank: dict[str, int]) -> Program:
    sizes = {"tokens": ask.tokens, "hidden": ask.hidden, "ffn": ask.ffn, "layers": ask.layers,
             "tp": ask.layout.tp, "dp": ask.layout.dp}  # fmt: skip
    notes = _NOTES
    if ask.layers > 1:
        notes += (f"weights of {ask.layers} layers are held; FLOPs and traffic are one layer's",)
    return Program(
        kind=kind,
        ranks=ask.ranks,
        sizes=sizes,
        dtype=ask.dtype,
        groups=(axis_groups(ask.layout, ("tp",)), axis_groups(ask.layout, ("dp",))),
        steps=steps,
        per_rank=per_rank,
        rank=ask.rank,
        notes=notes,
    )
