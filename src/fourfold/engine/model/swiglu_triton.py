"""The GPU kernel of SwiGLU's backward pass: each value read once and written once.

Apart from activations.py, since triton is imported only where there is a GPU.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]


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
