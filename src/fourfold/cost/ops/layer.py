"""Operations of a layer and one micro batch, from top to bottom as engine/model/layers.py has them,
with its names; backward passes go the opposite way. A kind of layer is a list here and a name in
LAYERS. Bytes after Korthikanti et al. (arXiv 2205.05198, table 2), or counted of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.op import NONE, Kind, Op, Phase, Sizes
from fourfold.spec.words import CP_KINDS, DTYPES

_FP8, _FP4 = DTYPES.index("fp8"), DTYPES.index("fp4")
_ULYSSES = CP_KINDS.index("ulysses")
# Plain framework calls read and write what a fused kernel keeps in registers (SwiGLU: 3 kernels of
# 2 to 3 passes against one of 3).
EAGER = 1.5


def decoder_layer(c: Columns, micro: Floats) -> list[Op]:
    """x + attention(norm(x)), then x + mlp(norm(x)); its casts, its weights, its launches."""
    s = Sizes(c, micro)
    return [
        *norm(c, s, "attention_norm", s.norm_again),
        *gathered(c, s, "attention.input_comm", s.all_again),
        *linear("attention.qkv", s.tokens, s.qkv, c.hidden, s.all_again),
        *rotate(c, s),
        *context(c, s),
        *core(s),
        *linear("attention.out", s.tokens, c.hidden, s.width, s.all_again),
        *summed(c, s, "attention.out, sum"),
        *residual(c, s, "attention.out, add"),
        *norm(c, s, "mlp_norm", s.norm_again),
        *gathered(c, s, "mlp.input_comm", s.up_again),
        *linear("mlp.gate_up", s.tokens, s.wide, c.hidden, s.up_again),
        *activation(c, s),
        *linear("mlp.down", s.tokens, c.hidden, s.ffn, s.last_again),
        *summed(c, s, "mlp.down, sum"),
        *residual(c, s, "mlp.down, add"),
        *casts(c, s),
        *weights(c, c.rank_layer_weights),
        Op(name="launches", kind="host"),
    ]


LAYERS: dict[str, Callable[[Columns, Floats], list[Op]]] = {"decoder": decoder_layer}


def linear(
    name: str,
    tokens: Floats,
    outs: Floats,
    ins: Floats,
    again: Floats = NONE,
    *,
    narrow: bool = True,
) -> Iterator[Op]:
    yield Op(name=name, kind="product", m=tokens, n=outs, k=ins, again=again, narrow=narrow)
    yield Op(name=name, kind="product", phase="inputs", m=tokens, n=ins, k=outs, narrow=narrow)
    yield Op(name=name, kind="product", phase="weights", m=ins, n=outs, k=tokens, narrow=narrow)


def norm(c: Columns, s: Sizes, name: str, again: Floats = NONE) -> Iterator[Op]:
    """Counted, with the residual: it reads that and what is added to it and writes both sums;
    backwards it reads the gradients of both and its input."""
    each = s.tokens * s.between * c.act_bytes
    yield from _passes(c, name, "norm", 2.0 * each, (4.0 * each, 4.0 * each), again)


def residual(c: Columns, s: Sizes, name: str) -> Iterator[Op]:
    """Adds, and dropout of models without a gate; without sequence parallelism every tensor rank
    repeats them, as it does norms. Counted with the next norm."""
    usual = (3.0 + (1.0 - c.gated)) * s.tokens * s.between * c.act_bytes
    yield from _passes(c, name, "elementwise", usual, (NONE, NONE), s.all_again)


def rotate(c: Columns, s: Sizes) -> Iterator[Op]:
    """Positions of queries and keys, or biases. The gradient of a bias is a sum over what its
    product's output hands back."""
    each = s.tokens * c.act_bytes
    turned = each * np.where(c.rope > 0, 2.0 * (c.width + c.kv_width), 0.0) / c.tp
    biases = each * c.bias * (s.qkv + 2.0 * s.between + s.wide)
    usual = 2.0 * each * s.qkv
    yield from _passes(
        c, "attention.rotate", "elementwise", usual, (turned, turned + biases), s.all_again
    )


def activation(c: Columns, s: Sizes) -> Iterator[Op]:
    each = s.tokens * c.act_bytes
    usual = each * (2.0 + c.gated) * s.ffn
    counted = each * (s.wide + s.ffn), each * (2.0 * s.wide + s.ffn)
    yield from _passes(c, "mlp.activation", "elementwise", usual, counted, s.norm_again)


def _passes(
    c: Columns, name: str, kind: Kind, usual: Floats, counted: tuple[Floats, Floats], again: Floats
) -> Iterator[Op]:
    """Over memory: of our kernels (forward, backward) as counted; of others as usual and, backward,
    twice that."""
    usual = usual * np.where(c.eager > 0, EAGER, 1.0)
    ours, exact = c.own_kernels > 0, c.own_kernels
    there, back = np.where(ours, counted[0], usual), np.where(ours, counted[1], 2.0 * usual)
    yield Op(name=name, kind=kind, bytes=there, again=again, counted=exact)
    yield Op(name=name, kind=kind, phase="inputs", bytes=back, counted=exact)


def core(s: Sizes) -> Iterator[Op]:
    """Scores, softmax and their product with values."""
    yield Op(name="attention.core", kind="attention", m=s.micro, again=s.core_again)
    yield Op(name="attention.core", kind="attention", phase="inputs", m=s.micro)


def context(c: Columns, s: Sizes) -> Iterator[Op]:
    """Keys and values of other ranks: passed round a ring, gathered, or exchanged with queries and
    outputs for whole sequences of fewer heads (Ulysses). Backwards also their gradients."""
    is_exchange = c.cp_kind == _ULYSSES
    moved = 2.0 * c.act_bytes * s.tokens * (c.kv_width / c.tp + np.where(is_exchange, s.width, 0.0))
    keys = partial(Op, name="attention.core, keys", kind="collective", axis="cp", bytes=moved)
    yield keys(m=s.micro, again=s.all_again)
    yield keys(m=s.micro, phase="inputs", halves=np.where(is_exchange, 1.0, 2.0))


def gathered(c: Columns, s: Sizes, name: str, again: Floats) -> Iterator[Op]:
    """Sequence parallelism gathers a block's input, scatters its gradient, and gathers one of the
    two inputs once more for gradients of weights; without it gradients are summed."""
    parted = np.where(c.sp > 0, 1.0, 0.0)
    yield _tp(s, name, "forward", parted, again)
    yield _tp(s, name, "inputs", 2.0 - parted)
    yield _tp(s, name, "weights", 0.5 * parted)


def summed(c: Columns, s: Sizes, name: str) -> Iterator[Op]:
    """Outputs are summed over tp, or scattered, and their gradients gathered."""
    parted = np.where(c.sp > 0, 1.0, 0.0)
    yield _tp(s, name, "forward", 2.0 - parted, s.all_again)
    yield _tp(s, name, "inputs", parted)


def _tp(s: Sizes, name: str, phase: Phase, halves: Floats, again: Floats = NONE) -> Op:
    return Op(name=name, kind="collective", phase=phase, axis="tp", bytes=s.message, halves=halves,
              again=again)  # fmt: skip


def casts(c: Columns, s: Sizes) -> Iterator[Op]:
    """Operands of products in fp8 or fp4: read, written with their transpose; scales per block need
    a second look. Counted: each is read for its largest value, read again and written, inputs and
    weights once more in the backward pass."""
    low = np.where((c.precision == _FP8) | (c.precision == _FP4), 1.0, 0.0)
    if not low.any():
        return
    usual = s.tokens * (2.0 * s.between + s.width + s.ffn) * low * (4.0 + 2.0 * c.block_scale)
    ins = s.tokens * (2.0 * c.hidden + s.width + s.ffn)
    outs = s.tokens * (s.qkv + 2.0 * c.hidden + s.wide)
    fp8, ours = np.where(c.precision == _FP8, 1.0, 0.0), c.own_kernels > 0
    there = fp8 * 5.0 * (ins + c.rank_layer_weights)
    back = fp8 * (3.0 * (ins + c.rank_layer_weights) + 6.0 * outs)
    cast = partial(Op, name="casts", kind="cast", counted=c.own_kernels)
    yield cast(bytes=np.where(ours, there, usual), again=s.norm_again)
    yield cast(phase="inputs", bytes=np.where(ours, back, 2.0 * usual))


def weights(c: Columns, params: Floats) -> Iterator[Op]:
    """ZeRO-3 gathers a layer before either pass and scatters its gradients; they are added up over
    micro batches."""
    sharded = np.where((c.zero >= 3) & (c.shard > 1), 1.0, 0.0)
    if sharded.any():
        gather = partial(Op, kind="collective", axis="shard", times=sharded)
        whole = partial(gather, name="weights, gather", bytes=params * c.gather_bytes)
        yield whole()
        yield whole(phase="inputs")
        yield gather(name="gradients, scatter", phase="weights", bytes=params * c.grad_bytes)
    yield Op(name="gradients, add", kind="copy", phase="weights", bytes=_added_bytes(c, params))


def _added_bytes(c: Columns, params: Floats) -> Floats:
    """Mean over micro batches; counted, without FSDP the first one's gradients are the sum."""
    micros = c.micros
    share = np.where(c.is_alone, (micros - 1.0) / np.maximum(micros, 1.0), 1.0)
    counted = params * (c.act_bytes + 2.0 * c.acc_bytes) * share
    return np.where(c.own_kernels > 0, counted, 10.0 * params)
