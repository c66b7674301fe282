"""GPU kernels of gradients that add up, or travel, in a wider format than they come in.

torch's own for two formats take about twice the time of the values' traffic. Apart from adding.py,
since triton is imported only where there is a GPU.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]


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
