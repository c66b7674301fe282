"""Steps of a divided MLP: tensor parallel (Shoeybi et al., arXiv 1909.08053), and in `mlp2d` with
tokens cut over dp, and over tp between the layers (sequence parallel, Korthikanti, 2205.05198)."""

from __future__ import annotations

from fourfold.cost.trace.steps import (
    Ask,
    Call,
    Kind,
    Program,
    Step,
    axis_groups,
    call,
    divided,
    step,
)
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
    hold, *products = _products("tokens", call("input", whole))
    total = call("output = all_reduce(partial)", whole)
    summed = step("sum", total, note="over tp", frees=("partial",))
    return _mlp(ask, "mlp", (hold, *products, summed), ask.tokens)


def mlp2d(ask: Ask) -> Program:
    """Tokens over dp and, between layers, over tp: gathered before W1, summed and cut after W2."""
    layout = ask.layout
    if layout.cp > 1:
        rule = "is the same as dp for an MLP, which does not mix tokens"
        raise UserError(rule, field="cp", value=layout.cp, hint=f"use dp = {layout.dp * layout.cp}")
    divided("tokens", ask.tokens, layout.dp * layout.tp, "tokens are cut over dp and tp")
    part = ("tokens/dp/tp", "hidden")
    hold, *products = _products("tokens/dp", call("input_part", part))
    whole = call("input = all_gather(input_part)", ("tokens/dp", "hidden"))
    gather = step("gather", whole, note="over tp", frees=("input_part",))
    total = call("output = reduce_scatter(partial)", part)
    cut = step("sum and cut", total, note="over tp", frees=("partial",))
    return _mlp(ask, "mlp2d", (hold, gather, *products, cut), ask.tokens // layout.dp)


def _products(tokens: str, source: Call) -> tuple[Step, Step, Step]:
    """Weights and input; both products of `tokens` tokens."""
    first, second = ("layers", "hidden", "ffn/tp"), ("layers", "ffn/tp", "hidden")
    up = call("intermediate = act(input x W1)", (tokens, "ffn/tp"))
    down = call("partial = intermediate x W2", (tokens, "hidden"))
    held = (call("W1", first), call("W2", second), source)
    return (
        step("hold", *held, note="W1, W2: this rank's columns and rows, of all layers"),
        step("up", up, note="one layer"),
        step("down", down, note="this rank's share of the sum"),
    )


def _mlp(ask: Ask, kind: Kind, steps: tuple[Step, ...], tokens: int) -> Program:
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
