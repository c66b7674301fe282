"""Which steps does the attention core of a layer take, forward and backward, by kind?

As the engine does them: Ulysses exchanges heads for tokens; all-gather and ring compute block by
block and join the blocks in fp32. Flash attention: 2 products forward, 5 backward, half the square.
"""

from __future__ import annotations

from fourfold.cost.trace.layer_ask import LayerAsk
from fourfold.cost.trace.step import Send, Step, Tensor

_C = "head_size"
_SQUARE = "tokens*tokens*heads*head_size/cp/tp"
_FORWARD = (f"2*{_SQUARE}",)
_BACKWARD = (f"5*{_SQUARE}",)


def forward(ask: LayerAsk) -> tuple[Step, ...]:
    """From q, k, v to `out`, and what backward needs."""
    if ask.cp == 1:
        return (*_bias(ask), _whole(ask))
    return {"ulysses": _ulysses, "allgather": _allgather, "ring": _ring}[ask.cp_kind](ask)


def backward(ask: LayerAsk) -> tuple[Step, ...]:
    """From d_out to d_q, d_k, d_v; ends what forward kept."""
    if ask.cp == 1:
        return (_whole_backward(ask),)
    kinds = {"ulysses": _ulysses_back, "allgather": _allgather_back, "ring": _ring_back}
    return kinds[ask.cp_kind](ask)


def _kept(ask: LayerAsk) -> tuple[str, ...]:
    """Rotated q and k are tensors of their own; else they are views of qkv, which v is anyway."""
    return ("q", "k") if ask.rope else ()


def _bias(ask: LayerAsk) -> tuple[Step, ...]:
    if ask.model.positions.kind != "alibi":
        return ()
    square = ("heads/tp", ask.here, ask.here)
    step = Step(
        name="alibi bias",
        formula="bias = slopes x distance, -inf where a query may not look",
        tensors=(
            Tensor("bias_fp32", ("2", *square), dtype="fp32"),
            Tensor("bias", square, "copied"),
        ),
        frees=("bias_fp32",),
    )
    return (step,)


def _whole(ask: LayerAsk) -> Step:
    return Step(
        name="attend",
        formula="out = attention(q, k, v)",
        tensors=(
            Tensor("out", (ask.here, "heads/tp", _C)),
            Tensor("lse", ("heads/tp", ask.here), dtype=ask.wide),
        ),
        flops=_FORWARD,
    )


def _gradients(ask: LayerAsk, queries: str, keys: str, heads: str, kv: str) -> tuple[Tensor, ...]:
    """dq is summed in fp32; grouped heads give dk and dv per query head before they are added."""
    grouped = ask.model.heads != ask.model.kv_heads
    spread = (Tensor("d_kv_spread", ("2", keys, heads, _C)),) if grouped else ()
    return (
        Tensor("d_q_fp32", (queries, heads, _C), dtype=ask.wide),
        *spread,
        Tensor("d_q", (queries, heads, _C)),
        Tensor("d_k", (keys, kv, _C)),
        Tensor("d_v", (keys, kv, _C)),
    )


def _temporary(tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    return tuple(t.name for t in tensors if t.name in ("d_q_fp32", "d_kv_spread"))


def _whole_backward(ask: LayerAsk) -> Step:
    tensors = _gradients(ask, ask.here, ask.here, "heads/tp", ask.kv)
    bias = ("bias",) if ask.model.positions.kind == "alibi" else ()
    return Step(
        name="attend, back",
        formula="d_q, d_k, d_v = attention'(d_out; q, k, v, out, lse)",
        tensors=tensors,
        flops=_BACKWARD,
        frees=(*_temporary(tensors), "d_out", "out", "lse", *_kept(ask), *bias),
    )


def _ulysses(ask: LayerAsk) -> tuple[Step, ...]:
    copies = "*kv_copies" if ask.kv_copies > 1 else ""
    kv = f"{ask.kv}{copies}"
    q_sent = ("cp", "heads/tp/cp", ask.here, _C)
    kv_sent = ("cp", "2", f"{kv}/cp", ask.here, _C)
    out_sent = ("cp", "heads/tp/cp", ask.here, _C)
    return (
        Step(
            name="pack",
            formula="kv = [k, v], KV heads repeated where they do not deal out",
            tensors=(Tensor("kv", ("2", kv, ask.here, _C), "copied"),),
        ),
        _turn("q", q_sent, ("heads/tp/cp", "tokens", _C), "tokens to heads"),
        _turn("kv", kv_sent, ("2", f"{kv}/cp", "tokens", _C), "tokens to heads, kv"),
        Step(
            name="attend",
            formula="out_heads = attention(q_turned, kv_turned)",
            tensors=(
                Tensor("out_heads", ("tokens", "heads/tp/cp", _C)),
                Tensor("lse", ("heads/tp/cp", "tokens"), dtype=ask.wide),
            ),
            flops=_FORWARD,
        ),
        _turn("out_heads", out_sent, ("heads/tp", ask.here, _C), "heads to tokens"),
        Step(
            name="join heads",
            formula="out = reorder(out_heads_turned); q, k, v are no longer needed",
            tensors=(Tensor("out", (ask.here, "heads/tp", _C), "copied"),),
            frees=("out_heads_turned", "kv", "qkv", *_kept(ask)),
        ),
    )


def _turn(name: str, sent: tuple[str, ...], got: tuple[str, ...], title: str) -> Step:
    """The engine's all-to-all: stack what each rank gets, exchange, join what came."""
    return Step(
        name=title,
        formula=f"{name}_turned = all_to_all({name}) over cp",
        tensors=(
            Tensor(f"{name}_sent", sent, "copied"),
            Tensor(f"{name}_received", sent, "received"),
            Tensor(f"{name}_turned", got, "copied"),
        ),
        sends=(Send("all-to-all", "cp", sent),),
        frees=(f"{name}_sent", f"{name}_received"),
    )


def _ulysses_back(ask: LayerAsk) -> tuple[Step, ...]:
    copies = "*kv_copies" if ask.kv_copies > 1 else ""
    kv = f"{ask.kv}{copies}"
    q_sent = ("cp", "heads/tp/cp", ask.here, _C)
    kv_sent = ("cp", "2", f"{kv}/cp", ask.here, _C)
    tensors = _gradients(ask, "tokens", "tokens", "heads/tp/cp", f"{kv}/cp")
    renamed = tuple(
        Tensor({"d_q": "d_q_heads"}.get(t.name, t.name), t.dims, t.how, t.dtype) for t in tensors
    )
    return (
        _turn("d_out", q_sent, ("heads/tp/cp", "tokens", _C), "tokens to heads, back"),
        Step(
            name="attend, back",
            formula="d_q_heads, d_k, d_v = attention'(d_out_turned; q, k, v, out, lse)",
            tensors=renamed,
            flops=_BACKWARD,
            frees=(
                *_temporary(tensors),
                "d_out",
                "d_out_turned",
                "out",
                "out_heads",
                "lse",
                "q_turned",
                "kv_turned",
            ),
        ),
        Step(
            name="pack, back",
            formula="d_kv = [d_k, d_v]",
            tensors=(Tensor("d_kv", ("2", f"{kv}/cp", "tokens", _C), "copied"),),
            frees=("d_k", "d_v"),
        ),
        _turn("d_q_heads", q_sent, ("heads/tp", ask.here, _C), "heads to tokens, back"),
        _turn("d_kv", kv_sent, ("2", kv, ask.here, _C), "heads to tokens, kv, back"),
        Step(
            name="unpack, back",
            formula="d_q, d_k, d_v of this rank's tokens; copies of a KV head added up",
            tensors=(
                Tensor("d_k", (ask.here, ask.kv, _C), "copied"),
                Tensor("d_v", (ask.here, ask.kv, _C), "copied"),
            ),
            frees=("d_q_heads", "d_kv", "d_kv_turned"),
            moves=(("d_q_heads_turned", "d_q"),),
        ),
    )


def _joined(ask: LayerAsk) -> tuple[Tensor, Tensor]:
    return (
        Tensor("out_fp32", ("heads/tp", ask.here, _C), dtype=ask.wide),
        Tensor("lse", ("heads/tp", ask.here), dtype=ask.wide),
    )


def _block(ask: LayerAsk, queries: str) -> tuple[Tensor, ...]:
    """A block's result and its fp32 share of the sum, beside the running one."""
    return (
        Tensor("block", ("heads/tp", queries, _C)),
        Tensor("block_fp32", ("heads/tp", queries, _C), dtype=ask.wide),
    )


def _cast(ask: LayerAsk, frees: tuple[str, ...]) -> tuple[Step, Step]:
    """The sum in the layer's dtype, kept for backward, and once more token by token."""
    cast = Step(
        name="cast",
        formula=f"out_heads = {ask.dtype}(out_fp32)",
        tensors=(Tensor("out_heads", ("heads/tp", ask.here, _C), "copied"),),
        frees=("out_fp32", *frees),
    )
    join = Step(
        name="join heads",
        formula="out = reorder(out_heads): heads of one token side by side",
        tensors=(Tensor("out", (ask.here, "heads/tp", _C), "copied"),),
        frees=gathered_ends(ask),
    )
    return cast, join


def gathered_ends(ask: LayerAsk) -> tuple[str, ...]:
    """Where keys and values were copied, their own ones end; q does too if it is not a view."""
    if ask.cp_kind == "allgather" and ask.rope:
        return ("qkv", "k")
    return ()


def _allgather(ask: LayerAsk) -> tuple[Step, ...]:
    whole = ("tokens", ask.kv, _C)
    gathered = ("2", *whole)
    blocks = _block(ask, f"{ask.here}/2")
    return (
        Step(
            name="gather keys, values",
            formula="kv_all = all_gather([k, v]) over cp; k_all, v_all in the order of tokens",
            tensors=(
                Tensor("kv", ("2", ask.here, ask.kv, _C), "copied"),
                Tensor("kv_all", gathered, "received"),
                Tensor("k_all", whole, "copied"),
                Tensor("v_all", whole, "copied"),
            ),
            sends=(Send("all-gather", "cp", gathered),),
            frees=("kv",),
        ),
        Step(
            name="attend",
            formula="out_fp32 = blocks of attention(q, k_all, v_all), joined by their row sums",
            tensors=(*_joined(ask), *blocks),
            flops=_FORWARD,
            frees=("block", "block_fp32"),
        ),
        *_cast(ask, ("kv_all",)),
    )


def _allgather_back(ask: LayerAsk) -> tuple[Step, ...]:
    whole = ("tokens", ask.kv, _C)
    sums = (
        Tensor("d_q_fp32", (ask.here, "heads/tp", _C), dtype=ask.wide),
        Tensor("d_kv_fp32", ("2", *whole), dtype=ask.wide),
        Tensor("d_q_block", (f"{ask.here}/2", "heads/tp", _C)),
        Tensor("d_kv_block", ("2", *whole)),
    )
    kept = ("q",) if ask.rope else ()
    return (
        Step(
            name="attend, back",
            formula="d_q, d_k_all, d_v_all: blocks added up in fp32",
            tensors=(
                *sums,
                Tensor("d_q", (ask.here, "heads/tp", _C)),
                Tensor("d_kv_all", ("2", *whole)),
            ),
            flops=_BACKWARD,
            frees=(
                *(t.name for t in sums),
                *("d_out", "out", "out_heads", "lse", "k_all", "v_all"),
                *kept,
            ),
        ),
        Step(
            name="sum keys, values",
            formula="d_k, d_v = reduce_scatter(d_kv_all) over cp",
            tensors=(
                Tensor("d_k", (ask.here, ask.kv, _C), "received"),
                Tensor("d_v", (ask.here, ask.kv, _C), "received"),
            ),
            sends=(Send("reduce-scatter", "cp", ("2", *whole)),),
            frees=("d_kv_all",),
        ),
    )


def _ring(ask: LayerAsk) -> tuple[Step, ...]:
    kv = ("2", ask.here, ask.kv, _C)
    blocks = _block(ask, ask.here)
    return (
        Step(
            name="pack",
            formula="kv = [k, v]: one message a round; the running sums start at 0",
            tensors=(Tensor("kv", kv, "copied"), *_joined(ask)),
        ),
        Step(
            name="rounds",
            formula="out_fp32 += attention(q, kv); meanwhile kv_next comes from the neighbour",
            tensors=(Tensor("kv_next", kv, "received"), *blocks),
            flops=("2*tokens*tokens*heads*head_size/cp/cp/tp",),
            sends=(Send("send", "cp", kv),),
            frees=("block", "block_fp32"),
            moves=(("kv_next", "kv"),),
            times=ask.cp - 1,
        ),
        Step(
            name="last round",
            formula="out_fp32 += attention(q, kv)",
            tensors=blocks,
            flops=("2*tokens*tokens*heads*head_size/cp/cp/tp",),
            frees=("block", "block_fp32"),
        ),
        *_cast(ask, ("kv",)),
    )


def _ring_back(ask: LayerAsk) -> tuple[Step, ...]:
    kv = ("2", ask.here, ask.kv, _C)
    round_flops = ("5*tokens*tokens*heads*head_size/cp/cp/tp",)
    block = (
        Tensor("d_q_block", (ask.here, "heads/tp", _C)),
        Tensor("d_kv_block", kv),
    )
    traveller = Send("send", "cp", kv, ask.wide)
    return (
        Step(
            name="pack, back",
            formula="kv = [k, v]; sums of gradients start at 0",
            tensors=(
                Tensor("kv", kv, "copied"),
                Tensor("d_q_fp32", (ask.here, "heads/tp", _C), dtype=ask.wide),
                Tensor("d_kv_fp32", kv, dtype=ask.wide),
            ),
        ),
        Step(
            name="rounds, back",
            formula="kv and its gradient travel on while the next block is computed",
            tensors=(Tensor("kv_next", kv, "received"), *block,
                     Tensor("d_kv_next", kv, "received", ask.wide)),
            flops=round_flops,
            sends=(Send("send", "cp", kv), traveller),
            frees=("d_q_block", "d_kv_block"),
            moves=(("kv_next", "kv"), ("d_kv_next", "d_kv_fp32")),
            times=ask.cp - 1,
        ),
        Step(
            name="last round, back",
            formula="the gradient's last hop brings it home",
            tensors=(*block, Tensor("d_kv_next", kv, "received", ask.wide),
                     Tensor("d_q", (ask.here, "heads/tp", _C)),
                     Tensor("d_k", (ask.here, ask.kv, _C)), Tensor("d_v", (ask.here, ask.kv, _C))),
            flops=round_flops,
            sends=(traveller,),
            frees=("d_q_block", "d_kv_block", "d_kv_next", "d_kv_fp32", "d_q_fp32", "kv", "d_out",
                   "out", "out_heads", "lse", *_kept(ask)),
        ),
    )  # fmt: skip
