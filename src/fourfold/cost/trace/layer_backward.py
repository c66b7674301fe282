"""Which steps does a decoder layer take backward? Gradients of inputs and weights,
in torch's order.

What forward kept is ended by the step that reads it last; gradients of weights stay.
"""

from __future__ import annotations

from fourfold.cost.trace import layer_core
from fourfold.cost.trace.layer_ask import LayerAsk
from fourfold.cost.trace.step import Send, Step, Tensor


def backward(ask: LayerAsk) -> tuple[Step, ...]:
    """d_y -> d_x and the gradients of all weights."""
    top = Step(
        name="gradient",
        formula="d_y comes from the layer above",
        tensors=(Tensor("d_y", (ask.part, "hidden"), "received"),),
    )
    return (
        top,
        *_row_product(ask, "down, back", "d_y", "d_act", "act", "W_down"),
        *_mlp(ask),
        *_column_product(ask, "up, back", "d_up", "h2", "W_up"),
        *_norm(ask, "MLP norm, back", "h2", "x1", "d_x1", "d_y"),
        *_row_product(ask, "out, back", "d_x1", "d_out", "out", "W_out"),
        *layer_core.backward(ask),
        *_rotate(ask),
        *_column_product(ask, "project, back", "d_qkv", "h1", "W_qkv"),
        *_norm(ask, "attention norm, back", "h1", "x", "d_x", "d_x1"),
    )


def _row_product(
    ask: LayerAsk, title: str, source: str, name: str, kept: str, weight: str
) -> tuple[Step, ...]:
    """Through `kept x weight`, whose sum was cut by tokens: gather the gradient first."""
    depth = "ffn/tp" if kept == "act" else "heads*head_size/tp"
    whole = (ask.here, "hidden")
    gathered = source if ask.tp == 1 else f"{source}_all"
    # `out` is also what attention's own backward reads.
    ends = ((kept,) if kept == "act" else ()) + (() if ask.tp == 1 else (gathered,))
    product = Step(
        name=title,
        formula=f"{name} = {gathered} x {weight}^T, d_{weight} = {kept}^T x {gathered}",
        tensors=(Tensor(name, (ask.here, depth)), Tensor(f"d_{weight}", (depth, "hidden"))),
        flops=(f"4*tokens*{depth}*hidden/cp",),
        frees=ends,
    )
    if ask.tp == 1:
        return (product,)
    gather = Step(
        name=f"{title} gather",
        formula=f"{gathered} = all_gather({source}) over tp",
        tensors=(Tensor(gathered, whole, "received"),),
        sends=(Send("all-gather", "tp", whole),),
    )
    return gather, product


def _column_product(
    ask: LayerAsk, title: str, source: str, kept: str, weight: str
) -> tuple[Step, ...]:
    """Through `kept x weight`, whose input was gathered: sum and cut the gradient after."""
    width = ask.up_width if weight == "W_up" else "qkv_width"
    whole = (ask.here, "hidden")
    written = f"d_{kept}" if ask.tp == 1 else f"d_{kept}_partial"
    product = Step(
        name=title,
        formula=f"{written} = {source} x {weight}^T, d_{weight} = {kept}^T x {source}",
        tensors=(Tensor(written, whole), Tensor(f"d_{weight}", ("hidden", width))),
        flops=(f"4*tokens*hidden*{width}/cp",),
        frees=(source, kept),
    )
    if ask.tp == 1:
        return (product,)
    scatter = Step(
        name=f"{title} sum",
        formula=f"d_{kept} = reduce_scatter({written}) over tp",
        tensors=(Tensor(f"d_{kept}", (ask.part, "hidden"), "received"),),
        sends=(Send("reduce-scatter", "tp", whole),),
        frees=(written,),
    )
    return product, scatter


def _mlp(ask: LayerAsk) -> tuple[Step, ...]:
    wide = (ask.here, "ffn/tp")
    if not ask.model.gated:
        relu2 = ask.model.activation == "relu2"
        step = Step(
            name="relu^2, back" if relu2 else "gelu, back",
            formula="d_up = act'(d_act)",
            tensors=(Tensor("d_up", wide),),
            frees=("d_act", "relu" if relu2 else "up"),
        )
        return (step,)
    multiply = Step(
        name="multiply, back",
        formula="d_silu = d_act * up, d_raise = d_act * silu",
        tensors=(Tensor("d_silu", wide), Tensor("d_raise", wide)),
        frees=("d_act", "silu"),
    )
    gate = Step(
        name="gate, back",
        formula="d_gate = silu'(d_silu)",
        tensors=(Tensor("d_gate", wide),),
        frees=("d_silu", "up"),
    )
    join = Step(
        name="join, back",
        formula="d_up = [d_gate, d_raise]",
        tensors=(Tensor("d_up", (ask.here, ask.up_width), "copied"),),
        frees=("d_gate", "d_raise"),
    )
    return multiply, gate, join


def _norm(
    ask: LayerAsk, title: str, name: str, kept: str, total: str, direct: str
) -> tuple[Step, ...]:
    """Through the norm, then the gradient that came past the block is added. The layer's own
    input and the gradient from above belong to the caller and stay."""
    part = (ask.part, "hidden")
    through = Step(
        name=title,
        formula=f"d_{name}_in = norm'(d_{name})",
        tensors=(Tensor(f"d_{name}_in", part),),
        frees=(f"d_{name}", *(() if kept == "x" else (kept,))),
    )
    add = Step(
        name=f"add {direct}",
        formula=f"{total} = d_{name}_in + {direct}",
        tensors=(Tensor(total, part),),
        frees=(f"d_{name}_in", *(() if direct == "d_y" else (direct,))),
    )
    return through, add


def _rotate(ask: LayerAsk) -> tuple[Step, ...]:
    """Back through the rotation (fp32 inside), then one tensor again from the three parts."""
    turns = tuple(
        Step(
            name=f"rotate {name}, back",
            formula=f"d_{name} = rotary'(d_{name}), fp32 inside",
            tensors=(
                Tensor("wide", ("4", ask.here, heads, "head_size"), dtype=ask.wide),
                Tensor(f"d_{name}", (ask.here, heads, "head_size")),
            ),
            frees=("wide",),
        )
        for name, heads in (("q", "heads/tp"), ("k", ask.kv))
    )
    # Where keys and values were copied before attention, qkv ended there.
    copied = ask.cp_kind == "ulysses" or (ask.cp_kind == "allgather" and ask.rope)
    kept = () if ask.cp > 1 and copied else ("qkv",)
    join = Step(
        name="join, back",
        formula="d_qkv = [d_q, d_k, d_v]",
        tensors=(Tensor("d_qkv", (ask.here, "qkv_width"), "copied"),),
        frees=("d_q", "d_k", "d_v", *kept),
    )
    return (*turns, join) if ask.rope else (join,)
