"""Which steps does a decoder layer take forward, and what does it keep for the way back?

Eager torch: a tensor that backward needs stays; the rest ends where its last reader is done.
"""

from __future__ import annotations

from fourfold.cost.trace import layer_core
from fourfold.cost.trace.layer_ask import LayerAsk
from fourfold.cost.trace.step import Send, Step, Tensor


def forward(ask: LayerAsk) -> tuple[Step, ...]:
    """x -> y."""
    return (
        *_norm(ask, "h1", "x", "attention"),
        _project(ask),
        *_rotate(ask),
        *layer_core.forward(ask),
        *_row_product(ask, "out projection", "o", "out", "W_out", "heads*head_size/tp"),
        _add(ask, "x1", "x", "o"),
        *_norm(ask, "h2", "x1", "MLP"),
        *_mlp(ask),
        *_row_product(ask, "down", "m", "act", "W_down", "ffn/tp"),
        _add(ask, "y", "x1", "m"),
    )


def _norm(ask: LayerAsk, name: str, source: str, block: str) -> tuple[Step, ...]:
    """Between blocks a rank has its part of the tokens; the block's input is gathered over tp."""
    written = name if ask.tp == 1 else f"{name}_part"
    norm = Step(
        name=f"{block} norm",
        formula=f"{written} = norm({source})",
        tensors=(Tensor(written, (ask.part, "hidden")),),
    )
    if ask.tp == 1:
        return (norm,)
    whole = (ask.here, "hidden")
    gather = Step(
        name=f"{block} gather",
        formula=f"{name} = all_gather({written}) over tp",
        tensors=(Tensor(name, whole, "received"),),
        sends=(Send("all-gather", "tp", whole),),
        frees=(written,),
    )
    return norm, gather


def _project(ask: LayerAsk) -> Step:
    return Step(
        name="project",
        formula="qkv = h1 x W_qkv; q, k and v are views of it",
        tensors=(
            Tensor("qkv", (ask.here, "qkv_width")),
            Tensor("v", (ask.here, ask.kv, "head_size"), "view"),
        ),
        flops=("2*tokens*hidden*qkv_width/cp",),
    )


def _rotate(ask: LayerAsk) -> tuple[Step, ...]:
    """Rotary embedding in fp32: four wide tensors at once, then the result in the layer's dtype."""
    if not ask.rope:
        return ()
    return tuple(
        Step(
            name=f"rotate {name}",
            formula=f"{name} = rotary({name}), fp32 inside",
            tensors=(
                Tensor("wide", ("4", ask.here, heads, "head_size"), dtype=ask.wide),
                Tensor(name, (ask.here, heads, "head_size")),
            ),
            frees=("wide",),
        )
        for name, heads in (("q", "heads/tp"), ("k", ask.kv))
    )


def _row_product(
    ask: LayerAsk, title: str, name: str, source: str, weight: str, depth: str
) -> tuple[Step, ...]:
    """A product cut by rows: partial sums, added over tp and cut by tokens."""
    whole = (ask.here, "hidden")
    written = name if ask.tp == 1 else f"{name}_partial"
    product = Step(
        name=title,
        formula=f"{written} = {source} x {weight}",
        tensors=(Tensor(written, whole),),
        flops=(f"2*tokens*{depth}*hidden/cp",),
    )
    if ask.tp == 1:
        return (product,)
    scatter = Step(
        name=f"{title} sum",
        formula=f"{name} = reduce_scatter({written}) over tp",
        tensors=(Tensor(name, (ask.part, "hidden"), "received"),),
        sends=(Send("reduce-scatter", "tp", whole),),
        frees=(written,),
    )
    return product, scatter


def _add(ask: LayerAsk, name: str, source: str, more: str) -> Step:
    return Step(
        name=f"add {more}",
        formula=f"{name} = {source} + {more}",
        tensors=(Tensor(name, (ask.part, "hidden")),),
        frees=(more,),
    )


def _mlp(ask: LayerAsk) -> tuple[Step, ...]:
    wide = (ask.here, "ffn/tp")
    up = Step(
        name="up",
        formula="up = h2 x W_up" + (", gate and up side by side" if ask.model.gated else ""),
        tensors=(Tensor("up", (ask.here, ask.up_width)),),
        flops=(f"2*tokens*hidden*{ask.up_width}/cp",),
    )
    if ask.model.gated:
        gate = Step(name="gate", formula="silu = silu(gate)", tensors=(Tensor("silu", wide),))
        act = Step(name="multiply", formula="act = silu * up", tensors=(Tensor("act", wide),))
        return up, gate, act
    if ask.model.activation == "relu2":
        relu = Step(
            name="relu",
            formula="relu = max(up, 0); up is not needed again",
            tensors=(Tensor("relu", wide),),
            frees=("up",),
        )
        square = Step(name="square", formula="act = relu^2", tensors=(Tensor("act", wide),))
        return up, relu, square
    return up, Step(name="gelu", formula="act = gelu(up)", tensors=(Tensor("act", wide),))
