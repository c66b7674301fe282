"""GPU kernels: each value is read once and written once, where torch's own take twice that time.

Apart from the modules that use them, since triton is imported only where there is a GPU.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]

# GELU, by the formula of activations.py and the hardware's own reciprocal.


@triton.jit
def _normal(x):
    """(share of a standard normal below x, its density times the root of 2 pi)."""
    bell = tl.exp2(x * x * -0.72134752)
    t = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + 0.231641888 * tl.abs(x)], tl.float32, True, 1
    )
    poly = -0.7265760135 + t * 0.5307027145  # pyrefly: ignore [unsupported-operation]
    poly = -0.142248368 + t * (0.7107068705 + t * poly)  # pyrefly: ignore [unsupported-operation]
    tail = t * (0.127414796 + t * poly) * bell  # pyrefly: ignore [unsupported-operation]
    return tl.where(x < 0, tail, 1.0 - tail), bell


@triton.jit
def gelu(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    below, _ = _normal(value)
    tl.store(out + at, value * below, mask=inside)


@triton.jit
def gelu_backward(
    x, grad, out, sums, rows, width, ROWS: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS rows of a block of columns, and the sums of their gradients: a part of the bias's."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([TILE, COLUMNS], dtype=tl.float32)
    for first in range(0, ROWS, TILE):
        row = tl.program_id(1) * ROWS + first + tl.arange(0, TILE)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        below, bell = _normal(value)
        made = (slope * (below + value * bell * 0.39894228)).to(out.dtype.element_ty)
        tl.store(out + at, made, mask=inside)
        total += made.to(tl.float32)
    at = tl.program_id(1).to(tl.int64) * width + column
    tl.store(sums + at, tl.sum(total, axis=0), mask=column < width)


# SwiGLU.


@triton.jit
def swiglu_backward(gate_up, grad, out, width, BLOCK: tl.constexpr):
    """One row's block of columns: `gate_up` and `out` are rows of 2 x width, `grad` of width."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    left = row * 2 * width + column
    right = left + width
    gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + right, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(out + left, slope * up * (share + silu * (1.0 - share)), mask=inside)
    tl.store(out + right, slope * silu, mask=inside)


# The lean loss: logits are read for their sums, and become their own gradient in place.


@triton.jit
def row_sums(logits, column, logsum, chosen, width, BLOCK: tl.constexpr):
    """logsumexp of one row, and its target's logit or 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    top = float("-inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(value, axis=0))
        total = total * tl.exp(top - new) + tl.exp(value - new)
        top = new
    target = tl.load(column + row)
    hit = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    tl.store(logsum + row, top + tl.log(tl.sum(total, axis=0)))
    tl.store(chosen + row, tl.where(target < 0, 0.0, hit))


@triton.jit
def turn(logits, logsum, column, share, width, BLOCK: tl.constexpr):
    """One row's block of columns becomes its gradient."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(logits + row * width + at, mask=inside, other=0.0).to(tl.float32)
    softmax = tl.exp(value - tl.load(logsum + row))
    grad = tl.where(at == tl.load(column + row), softmax - 1.0, softmax)
    tl.store(logits + row * width + at, grad * tl.load(share + row), mask=inside)


# Gradients that add up, or travel, in a wider format than they come in.


@triton.jit
def add(total, fresh, out, count, BLOCK: tl.constexpr):
    """`out` may be `total`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    old = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(fresh + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, old + new, mask=inside)


@triton.jit
def widen(narrow, wide, width, stride, BLOCK: tl.constexpr):
    """One row's block of columns; rows of `wide` are `stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(narrow + row * width + at, mask=inside, other=0.0)
    tl.store(wide + row * stride + at, value, mask=inside)
