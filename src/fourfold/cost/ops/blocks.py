"""Operations that layers of any kind are made of: products, norms, passes over memory, and what a
tensor group exchanges around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.op import NONE, Kind, Op, Part, Phase, Sizes, Tensor
from fourfold.spec.words import DTYPES

_FP8 = DTYPES.index("fp8")
# Products that keep what a norm made, of which engines keep more or less.
_BLOCK_INPUTS = ("attention.qkv", "mlp.gate_up")


def linear(
    c: Columns,
    s: Sizes,
    name: str,
    outs: Floats,
    ins: Floats,
    again: Floats = NONE,
    *,
    keeps: Floats = NONE,
    parts: Floats | float = 1.0,
    narrow: bool = True,
    writes: tuple[Tensor, ...] = (),
    reads: tuple[str | Part, ...] = (),
    function: str = "",
) -> Iterator[Op]:
    """`parts`: matrices that engines may hold apart."""
    apart = np.where(c.fused_qkv > 0, 1.0, parts)
    product = partial(Op, name=name, kind="product", narrow=narrow)
    yield product(
        m=s.tokens,
        n=outs,
        k=ins,
        again=again,
        keeps=keeps,
        habit="kept_hidden" if name in _BLOCK_INPUTS else "",
        gives=s.each * ins,
        holds=_casting(c, s, outs / apart, ins),
        writes=writes,
        reads=reads,
        function=function,
    )
    yield product(phase="inputs", m=s.tokens, n=ins, k=outs)
    yield product(phase="weights", m=ins, n=outs, k=s.tokens)


def block_input(c: Columns, s: Sizes) -> Floats:
    """What a block's first product keeps: the norm's output, of which our engine has the gathered
    one instead."""
    kept = s.tokens * s.between * c.saved_bytes
    return np.where(s.made_again | ((c.fsdp2 > 0) & s.parted), 0.0, kept)


def _casting(c: Columns, s: Sizes, outs: Floats, ins: Floats) -> Floats:
    """Uncompiled, a product in fp8 casts its operands by way of two copies in fp32: its gradient,
    the matrix, then, the input's gradient made, its own gradient again and the input."""
    plain = (c.fsdp2 > 0) & (c.precision == _FP8) & (c.compiled < 1)
    if not plain.any():
        return NONE
    grad, matrix, given = s.tokens * outs, outs * ins, s.tokens * ins
    then = grad + matrix + np.maximum(9.0 * grad, grad + 9.0 * given)
    return np.where(plain, np.maximum(grad + 9.0 * matrix - given * c.act_bytes, then), 0.0)


def norm(c: Columns, s: Sizes, name: str, again: Floats = NONE) -> Iterator[Op]:
    """Counted, with the residual: it reads that and what is added to it and writes both sums;
    backwards it reads the gradients of both and its input. Unfused, it keeps its input twice."""
    each = s.each * s.between
    kept = each * np.where(c.fused_norm > 0, 1.0, 2.0)
    yield from passes(
        c,
        s,
        name,
        2.0 * each,
        lambda: (4.0 * each, 4.0 * each),
        kind="norm",
        again=again,
        keeps=kept,
        habit="kept_hidden",
        holds=each,
    )


def residual(c: Columns, s: Sizes, name: str) -> Iterator[Op]:
    """Adds, and dropout of models without a gate; without sequence parallelism every tensor rank
    repeats them, as it does norms. Counted with the next norm."""
    usual = (3.0 + (1.0 - c.gated)) * s.each * s.between
    yield from passes(c, s, name, usual, lambda: (NONE, NONE), again=s.all_again)


def gathered(c: Columns, s: Sizes, name: str, again: Floats) -> Iterator[Op]:
    """Sequence parallelism gathers a block's input, scatters its gradient, and gathers one of the
    two inputs once more for gradients of weights; without it gradients are summed."""
    often, between = np.where(c.sp > 0, 1.0, 0.0), s.each * s.between
    kept = np.where(s.parted, s.tokens * c.hidden * c.saved_bytes, 0.0)
    holds = np.where(s.parted, s.copied, -between)
    yield _tp(
        s,
        name,
        "forward",
        often,
        again,
        keeps=kept,
        habit="gathered",
        gives=between,
        holds=holds,
        writes=(Tensor("input", (s.tokens, c.hidden)),),
        reads=("input_part",),
        function="all-gather",
    )
    yield _tp(s, name, "inputs", 2.0 - often)
    yield _tp(s, name, "weights", 0.5 * often)


def summed(c: Columns, s: Sizes, name: str) -> Iterator[Op]:
    """Outputs are summed over tp, or scattered, and their gradients gathered."""
    often = np.where(c.sp > 0, 1.0, 0.0)
    whole = np.where(s.parted, s.message, 0.0)
    yield _tp(
        s,
        name,
        "forward",
        2.0 - often,
        s.all_again,
        gives=whole,
        holds=s.copied,
        writes=(Tensor("output", (s.tokens / c.split, c.hidden)),),
        reads=("partial",),
        function="reduce-scatter" if np.all(c.sp > 0) else "all-reduce",
    )
    yield _tp(s, name, "inputs", often)


def _tp(
    s: Sizes, name: str, phase: Phase, halves: Floats, again: Floats = NONE, **memory: Any
) -> Op:
    return Op(
        name=name,
        kind="collective",
        phase=phase,
        axis="tp",
        bytes=s.message,
        halves=halves,
        again=again,
        **memory,
    )


def passes(
    c: Columns,
    s: Sizes,
    name: str,
    usual: Floats,
    counted: Callable[[], tuple[Floats, Floats]],
    *,
    kind: Kind = "elementwise",
    **fields: Any,
) -> Iterator[Op]:
    """Over memory: of our kernels (forward, backward) as counted; of others as usual and, backward,
    twice that."""
    there = usual * s.passes
    back = 2.0 * there
    if s.is_counted:
        ours, bytes_moved = c.our_kernels > 0, counted()
        there, back = (
            np.where(ours, own, other)
            for own, other in zip(bytes_moved, (there, back), strict=True)
        )
    yield Op(name=name, kind=kind, bytes=there, counted=c.our_kernels, **fields)
    yield Op(name=name, kind=kind, phase="inputs", bytes=back, counted=c.our_kernels)
