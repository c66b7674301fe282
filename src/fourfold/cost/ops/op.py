"""One operation of a rank, as columns over runs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.spec.words import DTYPES

Kind = Literal[
    "product",
    "grouped product",
    "iteration product",
    "attention",
    "norm",
    "elementwise",
    "cast",
    "copy",
    "view",
    "collective",
    "send",
    "host",
    "held",
]
# A product's backward pass is two: gradients of its inputs and of its weights.
Phase = Literal["forward", "inputs", "weights", "update"]
_FP8 = DTYPES.index("fp8")
# Plain framework calls read and write what a fused kernel keeps in registers (SwiGLU: 3 kernels of
# 2 to 3 passes against one of 3).
EAGER = 1.5
NONE: Any = np.float64(0.0)  # a number is a column of all runs
_ONE: Any = np.float64(1.0)
Dim = Any  # a column of runs, or a number, which may know its symbol (cost/trace/symbols.py)
_Count = TypeVar("_Count", int, Floats)


class Tensor(NamedTuple):
    """A tensor that an operation writes on one rank. `wide`: in fp32 at least; `brief`: gone when
    the operation is over."""

    name: str
    dims: tuple[Dim, ...]
    wide: bool = False
    brief: bool = False


class Part(NamedTuple):
    """A part of a tensor, as an operation reads it: one of the tensors that are stacked in it, the
    early or the late half of its tokens, or all of it with rows and columns exchanged."""

    name: str
    index: int | None = None
    half: Literal["", "early", "late"] = ""
    transposed: bool = False

    def __str__(self) -> str:
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.half} {self.name}{index}{'^T' if self.transposed else ''}".lstrip()


class Op(NamedTuple):
    """`m, n, k`: of a product; of attention `m` is the sequences, `n` the numbers of a sequence's
    queries, `k` the keys that a query looks at, with those behind the causal mask. `bytes`: read
    and written by a kernel, or the whole buffer of a message. `axis`: of a message; `halves`: how
    many gathers or scatters it is worth (an all-reduce: 2). `again`: the share of layers whose
    backward pass does it once more, `share` of those that have it at all. `groups`: products of a
    grouped one.
    `counted`: 1 where bytes are those of our kernels, 0 where they are the usual ones of an engine.
    `narrow`: in the precision that was asked for, else in 16 bits.

    What a trace prints and runs: the tensors that the operation `writes` and `reads` (a product its
    input, then a matrix for each tensor it writes) and the `function` that it is, such as
    all-gather; of a product, the function of its first output.

    Bytes of memory stand with the forward pass: `keeps` until its backward pass is over (`habit`:
    the coefficient of engines that keep more or less of it); there it `gives` a gradient of its
    input, which the operation before reads, and `holds` so much more for a moment (less, where what
    it gives is what it got)."""

    name: str
    kind: Kind
    phase: Phase = "forward"
    m: Floats = NONE
    n: Floats = NONE
    k: Floats = NONE
    bytes: Floats = NONE
    axis: str = ""
    halves: Floats = _ONE
    times: Floats = _ONE
    again: Floats = NONE
    share: Floats = _ONE
    groups: Floats = _ONE
    counted: Floats = NONE
    narrow: bool = True
    keeps: Floats = NONE
    habit: str = ""
    gives: Floats = NONE
    holds: Floats = NONE
    writes: tuple[Tensor, ...] = ()
    reads: tuple[str | Part, ...] = ()
    function: str = ""

    @property
    def flops(self) -> Floats:
        return flops(self.kind, self.phase, self.groups * self.m * self.n * self.k)


def flops(kind: Kind, phase: Phase, multiply_adds: _Count) -> _Count:
    """Return the FLOPs of products: two per multiply-add; of attention's the half of two products
    that a causal mask leaves, and backward of four."""
    return multiply_adds * (4 if kind == "attention" and phase != "forward" else 2)


def of_one(column: Any) -> float:
    """The number of a single run, or of the first."""
    return float(np.reshape(column, -1)[0])


class Sizes:
    """Of one micro batch in a layer of one rank: tokens, widths, and what a backward pass computes
    again."""

    def __init__(self, c: Columns, micro: Floats) -> None:
        self.micro = micro
        self.tokens = micro * c.seq / c.cp
        self.each = self.tokens * c.act_bytes  # bytes of a value of every token
        self.message = self.each * c.hidden  # what a tensor group exchanges
        self.between = c.hidden / c.split  # values of a token between blocks
        self.qkv = c.qkv_width / c.tp
        self.width = c.values / c.tp
        self.wide = (1.0 + c.gated) * c.ffn / c.tp
        self.ffn = c.ffn / c.tp
        self.kv = np.maximum(c.kv_width / c.tp, c.width / c.heads)
        self.dense = 1.0 - c.routed  # share of layers with an MLP in place of experts
        self.parted = (c.sp > 0) & (c.tp > 1)  # sequences, between blocks
        # Gathering along the sequence needs a second copy of more than one.
        self.copied = np.where(self.parted & (micro > 1), self.message, 0.0)
        self.is_counted = bool(np.any(c.our_kernels > 0))  # of any run: passes of our own kernels
        self.passes = np.where(c.eager > 0, EAGER, 1.0)
        rest = 1.0 - c.full_ckpt
        self.all_again = c.full_ckpt
        # Torch stops where a backward pass has all it needs: before the last product.
        self.last_again = c.full_ckpt * np.where(c.fsdp2 > 0, 0.0, 1.0)
        self.core_again = c.full_ckpt + rest * c.attn_ckpt
        self.norm_again = c.full_ckpt + rest * c.norm_ckpt  # norms and the activation
        self.up_again = c.full_ckpt + rest * c.mlp_ckpt
        # Outputs of norms and of the activation are made again, not kept; a compiler does so where
        # it fuses them with casts to fp8.
        fuses = (c.fsdp2 > 0) & (c.compiled > 0) & (c.precision == _FP8) & (c.tp == 1)
        self.made_again = (c.norm_ckpt > 0) | fuses
