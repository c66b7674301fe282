"""Steps of a divided MLP: tensor parallel (Shoeybi et al., arXiv 1909.08053), and in `mlp2d` with
tokens cut over dp, and over tp between the layers (sequence parallel, Korthikanti, 2205.05198)."""

from __future__ import annotations

from fourfold.cost.trace.operations import (
    Given,
    activated_gemm,
    communication,
    gemm,
    given,
    multiply_by,
)
from fourfold.cost.trace.steps import (
    Ask,
    Kind,
    Program,
    Step,
    axis_groups,
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
    hold, *products = _products("tokens", given("input", *whole), gated=ask.gated)
    total = communication("all-reduce", "output", whole, "partial")
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
    hold, *products = _products("tokens/dp", given("input_part", *part), gated=ask.gated)
    whole = communication("all-gather", "input", ("tokens/dp", "hidden"), "input_part")
    gather = step("gather", whole, note="over tp", frees=("input_part",))
    total = communication("reduce-scatter", "output", part, "partial")
    cut = step("sum and cut", total, note="over tp", frees=("partial",))
    return _mlp(ask, "mlp2d", (hold, gather, *products, cut), ask.tokens // layout.dp)


def _products(tokens: str, source: Given, *, gated: bool) -> tuple[Step, ...]:
    """Return the steps that hold weights and input, and the GEMMs of `tokens` tokens.

    A gated MLP has a third matrix, W3 in Llama's naming: act(input x W1) is multiplied by
    input x W3.
    """
    first, second = ("layers", "hidden", "ffn/tp"), ("layers", "ffn/tp", "hidden")
    weights = (given("W1", *first), *([given("W3", *first)] if gated else []))
    names = "W1, W3, W2" if gated else "W1, W2"
    note = f"{names}: this rank's columns and rows, of all layers"
    hold = step("hold", *weights, given("W2", *second), source, note=note)
    activate = activated_gemm("intermediate", (tokens, "ffn/tp"), "input", "W1")
    down = gemm("partial", (tokens, "hidden"), "intermediate", "W2")
    last = step("down", down, note="this rank's share of the sum")
    if not gated:
        return hold, step("up", activate, note="one layer"), last
    multiply = step("multiply", multiply_by("intermediate", "up"), frees=("up",))
    up = step("up", gemm("up", (tokens, "ffn/tp"), "input", "W3"), note="one layer")
    return hold, step("gate", activate, note="one layer"), up, multiply, last


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
