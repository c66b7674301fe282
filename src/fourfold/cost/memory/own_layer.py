"""What one layer of our own engine keeps, and what its backward holds beside, in bytes. M tokens of
a micro batch, S of them between blocks (sequence parallelism divides them by tp), D hidden."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.spec.words import CP_KINDS, DTYPES, PRICED_ATTENTION

_UNFUSED = PRICED_ATTENTION.index("unfused")
_ALLGATHER, _ULYSSES = CP_KINDS.index("allgather"), CP_KINDS.index("ulysses")
_FP8 = DTYPES.index("fp8")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tensors of one micro batch on one rank, in bytes of the activations' format."""

    between: Floats  # [S, D]
    whole: Floats  # [M, D], gathered where sequence parallelism divides
    q: Floats
    kv: Floats
    ffn: Floats
    lse: Floats
    logits: Floats  # of one chunk of the loss
    bias: Floats  # ALiBi's [heads, S, S], one for all sequences
    twice: Floats  # 1: gathering along the sequence needs a second copy (more than one sequence)


def sizes(c: Columns) -> Sizes:
    tokens = c.tokens
    each = tokens * c.act_bytes
    divided = (c.sp > 0) & (c.tp > 1)
    kv = np.maximum(c.kv_width / c.tp, c.width / c.heads)
    return Sizes(
        between=each * c.hidden / np.where(divided, c.tp, 1.0),
        whole=each * c.hidden,
        q=each * c.width / c.tp,
        kv=each * kv,
        ffn=each * c.ffn / c.tp,
        lse=tokens * 4.0 * c.heads / c.tp,
        logits=np.ceil(tokens / c.loss_chunks) * np.ceil(c.vocab / c.tp),
        bias=c.alibi * c.heads / c.tp * (c.seq / c.cp) ** 2,
        twice=np.where(divided & (c.micro > 1), 1.0, 0.0),
    )


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes a layer keeps for its backward, its input among them; most that its backward holds
    beside that, when it was kept and when it is computed `again`; the same of a `split` backward,
    and what of it waits for gradients of weights."""

    sizes: Sizes
    kept: Floats
    backward: Floats
    again: Floats
    split: Floats
    late: Floats


def layer(c: Columns) -> LayerBytes:
    s = sizes(c)
    many = _mlp_widths(c) * s.ffn
    kept = 2.0 * s.between + np.where(_cheap(c), 0.0, 2.0 * s.whole) + _attended(c, s) + many
    kept = kept * np.where(c.attn_ckpt > 0, c.selective_share, 1.0)
    down = c.hidden * c.ffn / c.tp * c.act_bytes
    mlp = (2.0 + c.gated) * down
    # Sequence parallelism gathers the gradient that comes in.
    gathers = (c.tp > 1) & (c.sp > 0)
    whole = np.where(gathers, s.whole, 0.0)
    twice = s.whole * (1.0 + s.twice)
    # Through the last matrix, the product of gate and up, and out of the block's input, where the
    # gradient is summed over tp; then attention, the MLP's tensors gone and its gradients there.
    last = whole + down + s.ffn
    product = down + np.where(c.gated > 0, 2.0, 1.0) * s.ffn
    entry = mlp + twice - many
    gone = many + s.whole + s.between
    turned = np.where(c.rope > 0, 14.0 / c.act_bytes * s.q, s.q)
    attending = np.maximum(2.0 * s.q + 2.0 * s.kv, turned + s.q + 2.0 * s.kv)
    core = mlp + attending - gone
    end = c.rank_layer_weights * c.act_bytes - kept + 2.0 * s.whole
    inside = np.maximum.reduce(
        np.broadcast_arrays(last, product, entry, core, end, *_fp8_casts(c, s, whole, many))
    )
    # Split, no weight has a gradient yet, and inputs and gradients of products stay: beside the
    # activation's backward its output and what came in, in attention all of the MLP.
    acting = whole + (2.0 + c.gated) * s.ffn
    beyond = s.whole + whole - c.gated * s.ffn + attending
    # Gathering the gradient comes before a layer is computed again.
    return LayerBytes(
        sizes=s,
        kept=kept,
        backward=np.maximum(inside, np.where(gathers, twice, 0.0)) + s.between,
        again=np.maximum(inside, np.where(gathers, twice - many, 0.0)) + s.between,
        split=np.maximum(acting, beyond) + s.between,
        late=4.0 * s.whole + 2.0 * s.q + 2.0 * s.kv + (2.0 + c.gated) * s.ffn,
    )


def _cheap(c: Columns) -> NDArray[np.bool_]:
    """Compiled, casts to fp8 are fused with what makes their inputs: outputs of norms and of the
    activation are not kept but made again."""
    return (c.compiled > 0) & (c.precision == _FP8) & (c.tp == 1)


def _mlp_widths(c: Columns) -> Floats:
    """Widths of ffn that the MLP keeps: what its first product makes, the activation's output, and
    with a gate, uncompiled, the gate's own activation."""
    plain = 2.0 + np.where(c.compiled > 0, 1.0, 2.0) * c.gated
    return np.where(_cheap(c), 1.0 + c.gated, plain)


def _attended(c: Columns, s: Sizes) -> Floats:
    """What attention keeps: projections, turned queries and keys, output and its logsumexp."""
    # Values are a view of the fused projection, which lives as long as they do.
    projected = np.where((c.fused_qkv > 0) | (c.rope < 1), s.q + 2.0 * s.kv, s.kv)
    turned = np.where(c.rope > 0, s.q + s.kv, 0.0)
    local = projected + turned
    allgather = np.where(c.cp > 1, local + 2.0 * s.kv * (c.cp - 1.0), local)
    kind = np.where((c.cp > 1) & (c.cp_kind == _ALLGATHER), allgather, local)
    repeated = np.where(np.mod(c.kv_heads / c.tp, c.cp) == 0, 1.0, c.cp)
    kind = np.where((c.cp > 1) & (c.cp_kind == _ULYSSES), 2.0 * s.q + 2.0 * s.kv * repeated, kind)
    scores = np.where(c.attention == _UNFUSED, c.micro * c.heads / c.tp * c.seq**2 / c.cp, 0.0)
    scores = scores * 2.0 * c.act_bytes
    lse = np.where(c.attn_ckpt > 0, 0.0, s.lse)
    return kind + s.q + lse + s.bias * c.act_bytes + np.where(c.attn_ckpt > 0, 0.0, scores)


def _fp8_casts(c: Columns, s: Sizes, whole: Floats, many: Floats) -> list[Floats]:
    """Uncompiled, a product in fp8 casts its operands by way of two copies in fp32: of the MLP's
    last matrix and of its first, beside what is there then. Gate and up are one matrix or two, of
    which up goes back first, while the gate waits for its activation's gradient."""
    width = c.ffn / c.tp
    weights = c.hidden * width * c.act_bytes
    one, both = (_cast_bytes(c, n * width, c.hidden) for n in (1.0, 1.0 + c.gated))
    fused = weights + (1.0 + c.gated) * s.ffn - many + both
    up = weights + 3.0 * s.ffn - many + one
    gate = 2.0 * weights + s.ffn - many + s.whole + one
    first = np.where((c.fused_qkv > 0) | (c.gated < 1), fused, np.maximum(up, gate))
    plain = (c.precision == _FP8) & (c.compiled < 1)
    moments = (whole + _cast_bytes(c, c.hidden, width), first)
    return [np.where(plain, moment, -np.inf) for moment in moments]


def _cast_bytes(c: Columns, rows: Floats, columns: Floats) -> Floats:
    """The most that the backward of a product in fp8 by such a matrix adds: its gradient is cast,
    the matrix, then, the input's gradient made, its own gradient again and the input."""
    grad, matrix, given = c.tokens * rows, rows * columns, c.tokens * columns
    then = grad + matrix + given * c.act_bytes
    return np.maximum(grad + 9.0 * matrix, then + np.maximum(9.0 * grad, grad + 9.0 * given))


def logits_bytes(c: Columns, s: Sizes) -> Floats:
    """Logits in their format and three times in fp32 (cut by vocabulary), or two and a half."""
    wide = np.maximum(4.0, c.act_bytes)
    return s.logits * np.where(c.tp > 1, c.act_bytes + 3.0 * wide, 3.0 * wide)


def loss_bytes(c: Columns, s: Sizes, embed: Floats) -> Floats:
    """The most that the loss holds, forwards or backwards."""
    all_logits = logits_bytes(c, s)
    # In parts the gradient of the head's weights is added up: old, new and sum.
    head = embed * c.act_bytes
    parts = np.maximum(all_logits + head, 2.0 * s.logits * c.act_bytes + 3.0 * head)
    plain = np.where(c.loss_chunks > 1, parts + s.whole, all_logits)
    # The lean one: the gradient takes the logits' place; in parts it makes the weights' at once.
    lean = s.logits * c.act_bytes + np.where(c.loss_chunks > 1, head + s.whole, 0.0)
    plain = np.where(c.compiled_loss > 0, 2.0 * s.logits * c.act_bytes, plain)
    return np.where(c.lean_loss > 0, lean, plain)
