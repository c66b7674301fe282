"""GPU kernels of GELU: each value read once and written once, and few enough instructions for it.

The formula is that of activations.py, with the hardware's own reciprocal. Apart from it, since
triton is imported only where there is a GPU.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]


@triton.jit
def _normal(x):
    """(share of a standard normal below x, its density times the root of 2 pi)."""
    bell = tl.exp2(x * x * -0.72134752)
    t = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + 0.231641888 * tl.abs(x)], tl.float32, True, 1
    )
    poly = -0.7265760135 + t * 0.5307027145
    poly = -0.142248368 + t * (0.7107068705 + t * poly)
    tail = t * (0.127414796 + t * poly) * bell
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
