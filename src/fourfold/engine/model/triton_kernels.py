"""GPU kernels: each value is read once and written once, where torch's own take twice that time.

Apart from the modules that use them, since triton is imported only where there is a GPU.

Of a layer with experts: who goes where, rows there and back, and the activation. N tokens, E
experts, K experts of a token, R = N x K rows in the order of experts.
"""

import triton  # pyrefly: ignore [missing-import]
import triton.language as tl  # pyrefly: ignore [missing-import]


@triton.jit
def best(scores, ids, tokens, experts, K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr):
    """The K largest of each token's scores, largest first; of equals the one with the lower id."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, E)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    at = token.to(tl.int64)[:, None] * experts + column[None, :]
    left = tl.load(scores + at, mask=inside, other=float("-inf")).to(tl.float32)
    for k in tl.static_range(K):
        top = tl.max(left, axis=1)
        chosen = tl.min(tl.where(left == top[:, None], column[None, :], E), axis=1)
        tl.store(ids + token.to(tl.int64) * K + k, chosen, mask=token < tokens)
        left = tl.where(column[None, :] == chosen[:, None], float("-inf"), left)


@triton.jit
def count(ids, counts, rows, blocks, E: tl.constexpr, ROWS: tl.constexpr):
    """Of each expert in this block of rows; `counts` is [E, blocks]."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids + row, mask=row < rows, other=E)
    hits = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    tl.store(counts + tl.arange(0, E) * blocks + block, tl.sum(hits, axis=0))


@triton.jit
def place(ids, ends, counts, place_of, row_of, rows, blocks, E: tl.constexpr, ROWS: tl.constexpr):
    """`ends` is the running sum of `counts`: where this block's rows of an expert end. Earlier rows
    come first."""
    block = tl.program_id(0)
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, E)
    expert = tl.load(ids + row, mask=inside, other=E)
    is_here = expert[:, None] == column[None, :]
    hits = is_here.to(tl.int32)
    at = column * blocks + block
    first = tl.load(ends + at) - tl.load(counts + at)
    where = tl.cumsum(hits, axis=0) - 1 + first[None, :]
    where = tl.sum(tl.where(is_here, where, 0), axis=1)
    tl.store(place_of + row, where, mask=inside)
    tl.store(row_of + where, row, mask=inside)


@triton.jit
def regroup(
    counts,
    order,
    back,
    ends,
    rows,
    groups,
    experts,
    G: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Where a row of one block of group and expert goes when blocks are ordered by expert first.
    Blocks are few: each program finds those of its rows among all."""
    group, expert = tl.arange(0, G)[:, None], tl.arange(0, E)[None, :]
    inside = (group < groups) & (expert < experts)
    size = tl.load(counts + group * experts + expert, mask=inside, other=0).to(tl.int32)
    of_group, of_expert = tl.sum(size, axis=1), tl.sum(size, axis=0)
    end = tl.cumsum(of_expert, axis=0)
    first = (tl.cumsum(of_group, axis=0) - of_group)[:, None] + tl.cumsum(size, axis=1) - size
    wanted = (end - of_expert)[None, :] + tl.cumsum(size, axis=0) - size
    shift = tl.reshape(wanted - first, [1, G * E])
    begin, over = tl.reshape(first, [1, G * E]), tl.reshape(first + size, [1, G * E])
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_here = (row[:, None] >= begin) & (row[:, None] < over)
    where = row + tl.sum(tl.where(is_here, shift, 0), axis=1)
    tl.store(back + row, where, mask=row < rows)
    tl.store(order + where, row, mask=row < rows)
    if tl.program_id(0) == 0:
        column = tl.arange(0, E)
        tl.store(ends + column, end, mask=column < experts)


@triton.jit
def take(x, place_of, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """A token goes to each of its K rows: read once, since reading is what misses the cache."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + token * width + column, mask=inside, other=0.0)
    for k in tl.static_range(K):
        row = tl.load(place_of + token * K + k).to(tl.int64)
        tl.store(rows + row * width + column, value, mask=inside)


@triton.jit
def put(rows, place_of, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """A token is the sum of its K rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place_of + token * K + k).to(tl.int64)
        total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total, mask=inside)


@triton.jit
def swiglu_rows(gate_up, scores, source, out, width, BLOCK: tl.constexpr):
    """silu(gate) x up x the row's score."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    left = row * 2 * width + column
    gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + left + width, mask=inside, other=0.0).to(tl.float32)
    score = tl.load(scores + tl.load(source + row)).to(tl.float32)
    tl.store(out + row * width + column, gate * tl.sigmoid(gate) * up * score, mask=inside)


@triton.jit
def swiglu_rows_backward(
    gate_up, scores, source, grad, grad_gate_up, again, grad_scores, width, BLOCK: tl.constexpr
):
    """One whole row: gradients of gate, up and score, and the activation once more (`again` may be
    `grad`, `grad_gate_up` may be `gate_up`: a value is read before its place is written)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    left = row * 2 * width + column
    gate = tl.load(gate_up + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + left + width, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    at = tl.load(source + row)
    score = tl.load(scores + at).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    tl.store(grad_scores + at, tl.sum(slope * silu * up, axis=0))
    tl.store(again + row * width + column, silu * up * score, mask=inside)
    slope = slope * score
    tl.store(grad_gate_up + left, slope * up * (share + silu * (1.0 - share)), mask=inside)
    tl.store(grad_gate_up + left + width, slope * silu, mask=inside)


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
