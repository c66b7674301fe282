"""GPU kernels of the lean loss: logits are read once for their sums, and read and written once as
their gradient.

Apart from lean_loss.py, since triton is imported only where there is a GPU.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]


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
