"""Which steps does a whole decoder layer take under a layout, forward and backward?

Weights and gradients in the trace's dtype; sharded over dp x cp as the policy says (ZeRO).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fourfold.cost.trace.groups import axis_groups
from fourfold.cost.trace.layer_ask import LayerAsk, check_layer
from fourfold.cost.trace.layer_backward import backward
from fourfold.cost.trace.layer_forward import forward
from fourfold.cost.trace.size import shape
from fourfold.cost.trace.step import Program, Send, Step, Tensor

_SHARDS = "dpxcp"


def layer(ask: LayerAsk) -> Program:
    """One layer, one sequence, forward and backward, all cuts of the layout applied."""
    check_layer(ask)
    model = ask.model
    sizes = {
        "tokens": ask.tokens, "hidden": model.hidden, "heads": model.heads,
        "kv_heads": model.kv_heads, "head_size": model.head_size, "ffn": model.ffn,
        "tp": ask.tp, "cp": ask.cp, "dp": ask.layout.dp,
        # Columns of the fused projection on one rank; a KV head may be on several.
        "qkv_width": (model.heads // ask.tp + 2 * ask.kv_rank) * model.head_size,
    }  # fmt: skip
    if ask.kv_copies > 1:
        sizes["kv_copies"] = ask.kv_copies
    if ask.shards > 1:
        count = sum(prod(shape(dims, sizes)) for _, dims in _weights(ask))
        sizes["weights"] = -(-count // ask.shards) * ask.shards  # padded to equal parts
    steps = (_hold(ask), *_forward(ask), *_again(ask), *backward(ask), *_reduce(ask))
    return Program(
        kind="layer",
        ranks=ask.layout.world,
        sizes=sizes,
        dtype=ask.dtype,
        groups=(
            axis_groups(ask.layout, ("tp",), "tp"),
            axis_groups(ask.layout, ("cp",), "cp"),
            axis_groups(ask.layout, ("dp", "cp"), _SHARDS),
        ),
        steps=steps,
        per_rank={
            "heads": model.heads // ask.tp,
            "kv_heads": ask.kv_rank,
            "tokens": ask.tokens // ask.cp,
            "ffn": model.ffn // ask.tp,
        },
        rank=ask.rank,
        notes=_notes(ask),
    )


def _notes(ask: LayerAsk) -> tuple[str, ...]:
    notes = [
        f"{ask.model.name}, one layer forward and backward, batch 1, eager; flash attention, "
        "causal: half the square; norms, biases and element-wise FLOPs are not counted",
        "weights and gradients in the trace's dtype, no optimizer state; "
        f"{ask.sharding} over dp x cp = {ask.shards}",
    ]
    if ask.cp > 1:
        notes.append(f"cp kind: {ask.cp_kind}")
    return tuple(notes)


def _weights(ask: LayerAsk) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return (
        ("W_qkv", ("hidden", "qkv_width")),
        ("W_out", ("heads*head_size/tp", "hidden")),
        ("W_up", ("hidden", ask.up_width)),
        ("W_down", ("ffn/tp", "hidden")),
        ("norms", ("4" if ask.model.norm == "layernorm" else "2", "hidden")),
    )


def _part(ask: LayerAsk) -> str:
    """What a rank keeps between steps: one part of dp x cp, or under zero0 everything."""
    return "weights" if ask.sharding == "zero0" else "weights/dp/cp"


def _hold(ask: LayerAsk) -> Step:
    tables = ()
    if ask.rope:
        tables = (Tensor("cos_sin", ("2", ask.here, "head_size"), dtype="fp32"),)
    if ask.shards > 1:
        weights = (Tensor("weights_part", (_part(ask),)),)
    else:
        weights = tuple(Tensor(*weight) for weight in _weights(ask))
    return Step(
        name="hold",
        formula="x: tokens of this rank; weights: this rank's cut over tp, as it is kept",
        tensors=(Tensor("x", (ask.part, "hidden")), *tables, *weights),
    )


def _forward(ask: LayerAsk) -> tuple[Step, ...]:
    """The buffer of the gathered parts is let go with the layer, not with the copy."""
    steps = (*_gather(ask), *forward(ask))
    if not steps[0].sends:
        return steps
    first, *middle, last = steps
    return (replace(first, frees=()), *middle, replace(last, frees=(*last.frees, "gathered")))


def _gather(ask: LayerAsk, name: str = "gather weights") -> tuple[Step, ...]:
    """All parts in one message, then copied to where the matrices are used."""
    if ask.shards == 1:
        return ()
    matrices = tuple(Tensor(matrix, dims, "copied") for matrix, dims in _weights(ask))
    if ask.sharding == "zero0":
        step = Step(
            name="unpack weights",
            formula="weights_part is whole under zero0; the matrices are copied out of it",
            tensors=matrices,
        )
        return (step,)
    step = Step(
        name=name,
        formula="gathered = all_gather(weights_part) over dp x cp, cut into matrices",
        tensors=(Tensor("gathered", ("weights",), "received"), *matrices),
        sends=(Send("all-gather", _SHARDS, ("weights",)),),
        frees=("gathered",),
    )
    return (step,)


def _again(ask: LayerAsk) -> tuple[Step, ...]:
    """Under zero3 the other layers need the room between forward and backward; the last layer's
    backward comes at once, so its weights stay."""
    if ask.sharding != "zero3" or ask.shards == 1 or ask.last:
        return ()
    drop = Step(
        name="drop weights",
        formula="only the part is kept until backward",
        frees=tuple(name for name, _ in _weights(ask)),
    )
    return drop, *_gather(ask, "gather weights again")


def _reduce(ask: LayerAsk) -> tuple[Step, ...]:
    """Gradients are added over the ranks that saw other tokens; ZeRO keeps one part of the sum."""
    if ask.shards == 1:
        return ()
    names = tuple(f"d_{name}" for name, _ in _weights(ask) if name != "norms")
    packed = Tensor("d_weights", ("weights",), "copied")
    names += tuple(name for name, _ in _weights(ask))
    if ask.sharding == "zero0":
        step = Step(
            name="sum gradients",
            formula="d_weights = all_reduce(all gradients) over dp x cp; the matrices end",
            tensors=(packed,),
            sends=(Send("all-reduce", _SHARDS, ("weights",)),),
            frees=names,
        )
        return (step,)
    step = Step(
        name="sum gradients",
        formula="d_weights_part = reduce_scatter(all gradients) over dp x cp; the matrices end",
        tensors=(packed, Tensor("d_weights_part", ("weights/dp/cp",), "received")),
        sends=(Send("reduce-scatter", _SHARDS, ("weights",)),),
        frees=(*names, "d_weights"),
    )
    return (step,)
