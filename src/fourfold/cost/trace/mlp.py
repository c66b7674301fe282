"""Steps of a divided MLP: tensor parallel (Shoeybi et al., arXiv 1909.08053), and in `mlp2d` with
tokens cut over dp, and over tp between the layers (sequence parallel, Korthikanti, 2205.05198)."""

from __future__ import annotations

from fourfold.cost.trace.steps import Ask, Kind, Program, Send, Step, Tensor, axis_groups, divided
from fourfold.errors import UserError


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
