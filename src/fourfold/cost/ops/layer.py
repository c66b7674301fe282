"""Operations of a layer and one micro batch, from top to bottom as engine/model/layers.py has them,
with its names; backward passes go the opposite way. Another kind of block is another list. Bytes
after Korthikanti et al. (arXiv 2205.05198, table 2), or counted of our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.blocks import block_input, gathered, linear, norm, passes, residual, summed
from fourfold.cost.ops.experts import experts, shared_out
from fourfold.cost.ops.op import NONE, Op, Sizes, Tensor
from fourfold.cost.ops.sequence import exchanged_bytes
from fourfold.cost.ops.weights import casts, weights
from fourfold.spec.words import CP_KINDS, PRICED_ATTENTION

_ALLGATHER, _ULYSSES = CP_KINDS.index("allgather"), CP_KINDS.index("ulysses")
_FUSED, _UNFUSED = (PRICED_ATTENTION.index(kind) for kind in ("fused-softmax", "unfused"))


def decoder_layer(c: Columns, micro: Floats) -> Iterator[Op]:
    """x + attention(norm(x)), then x + mlp(norm(x)); its casts, its weights, its launches."""
    for operations in LAYER:
        yield from operations(c, micro)


def mixer(c: Columns, micro: Floats) -> Iterator[Op]:
    """x + attention(norm(x))."""
    yield from attention(c, Sizes(c, micro))


def feed_forward(c: Columns, micro: Floats) -> Iterator[Op]:
    """x + mlp(norm(x)); and of the layer what depends on it: casts, weights, launches."""
    s = Sizes(c, micro)
    yield from (mlp(c, s) if not np.any(c.routed > 0) else routed_mlp(c, s))
    yield from casts(c, s)
    yield from weights(c)
    yield Op(name="launches", kind="host")


# By the parts of a LayerKind: the operations of a part follow from its word alone.
LAYER = (mixer, feed_forward)


def whole_core(c: Columns, s: Sizes) -> Iterator[Op]:
    """Yield what travels for attention as one message, and its kernels as one."""
    yield from context(c, s)
    yield from core(c, s)


def attention(
    c: Columns,
    s: Sizes,
    attend: Callable[[Columns, Sizes], Iterable[Op]] = whole_core,
) -> Iterator[Op]:
    """Yield x + attention(norm(x)); `attend`: from projections to what heads have mixed, as a step
    is priced or, forward, in every detail (cost/ops/sequence.py)."""
    yield from norm(c, s, "attention_norm", s.norm_again)
    yield from gathered(c, s, "attention.input_comm", s.all_again)
    yield from projections(c, s)
    yield from rotate(c, s)
    mixed = "out"
    for op in attend(c, s):
        yield op
        mixed = op.writes[-1].name if op.writes else mixed
    out = {"writes": (Tensor("output", (s.tokens, c.hidden)),), "reads": (mixed, "O")}
    kept = cast_input(c, s)
    yield from linear(c, s, "attention.out", c.hidden, s.width, s.all_again, keeps=kept, **out)
    yield from summed(c, s, "attention.out, sum")
    yield from residual(c, s, "attention.out, add")


def projections(c: Columns, s: Sizes) -> Iterator[Op]:
    """Queries, keys and values: of the hidden state, or of latents, the ways down to which are
    whole on every tensor rank."""
    heads, kv_heads, size = c.heads / c.tp, c.kv_heads / c.tp, c.head_size
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    qkv = linear(
        c,
        s,
        "attention.qkv",
        s.qkv,
        c.hidden,
        s.all_again,
        keeps=block_input(c, s),
        writes=tuple(Tensor(name, (s.tokens, count, size)) for name, count in counts.items()),
        reads=("input", "Q", "K", "V"),
    )
    if not np.any(c.latent > 0):
        yield from qkv
        return
    is_latent = np.where(c.latent > 0, 1.0, 0.0)
    yield from shared_out(qkv, 1.0 - is_latent)
    up_again = c.full_ckpt + (1.0 - c.full_ckpt) * c.latent_ckpt
    down, ranks = c.q_latent + c.latent + c.shared_key, c.q_latent + c.latent
    kept = {"keeps": s.tokens * ranks * c.saved_bytes}
    first = np.where(c.q_latent > 0, c.q_latent, c.hidden)
    made = (
        linear(c, s, "attention.down", down, c.hidden, s.all_again, keeps=block_input(c, s)),
        linear(c, s, "attention.q", c.width / c.tp, first, up_again, **kept),
        linear(c, s, "attention.kv", c.latent_width / c.tp, c.latent, up_again),
    )
    for ops in made:
        yield from shared_out(ops, is_latent)


def rotate(c: Columns, s: Sizes) -> Iterator[Op]:
    """Positions of queries and keys, or biases. The gradient of a bias is a sum over what its
    product's output hands back. Gradients are turned in fp32."""

    def counted() -> tuple[Floats, Floats]:
        turned = s.each * np.where(c.rope > 0, 2.0 * (c.width + c.kv_width), 0.0) / c.tp
        return turned, turned + s.each * c.bias * (s.qkv + 2.0 * s.between + s.wide)

    qkv = s.each * (s.width + 2.0 * s.kv)
    wide = np.where(c.rope > 0, (14.0 / c.act_bytes - 1.0) * s.each * s.width, 0.0)
    yield from passes(
        c,
        s,
        "attention.rotate",
        2.0 * s.each * s.qkv,
        counted,
        again=s.all_again,
        gives=qkv,
        holds=wide - qkv,
    )


def context(c: Columns, s: Sizes) -> Iterator[Op]:
    """Keys and values of other ranks: passed round a ring, gathered, or exchanged with queries and
    outputs for whole sequences of fewer heads (Ulysses), to several ranks where KV heads are few.
    Backwards also their gradients."""
    whole = NONE
    for index, kind in enumerate(CP_KINDS):
        is_kind = (c.cp > 1) & (c.cp_kind == index)
        if np.any(is_kind):
            whole = np.where(is_kind, exchanged_bytes(c, s, kind), whole)
    keys = partial(Op, name="attention.core, keys", kind="collective", axis="cp", bytes=whole)
    halves = np.where(c.cp_kind == _ULYSSES, 1.0, 2.0)
    yield keys(m=s.micro, again=s.all_again)
    yield keys(m=s.micro, phase="inputs", halves=halves)


def core(c: Columns, s: Sizes) -> Iterator[Op]:
    """Scores, softmax and their product with values; it keeps all of these but what is made again,
    and the output."""
    queries = c.seq / c.cp * (c.core_width / c.tp)
    both = partial(Op, name="attention.core", kind="attention", m=s.micro, n=queries, k=c.reach)
    gives = s.each * (s.width + 2.0 * s.kv)
    yield both(again=s.core_again, keeps=_attended(c, s), gives=gives)
    yield both(phase="inputs")


def _attended(c: Columns, s: Sizes) -> Floats:
    """Projections and output; ours also turned queries and keys, since values are a view of the
    fused projection, which lives as long as they do; keys of other ranks; row sums."""
    usual = s.each * (s.qkv + s.width) + np.where(c.attn_ckpt > 0, 0.0, scores(c, s))
    if not np.any(c.fsdp2 > 0):
        return usual
    q, kv, shared = s.each * s.width, s.each * s.kv, c.cp > 1
    projected = np.where((c.fused_qkv > 0) | (c.rope < 1), q + 2.0 * kv, kv)
    local = projected + np.where(c.rope > 0, q + kv, 0.0)
    others = np.where(shared & (c.cp_kind == _ALLGATHER), 2.0 * kv * (c.cp - 1.0), 0.0)
    exchanged = 2.0 * q + 2.0 * kv * c.kv_copies
    keys = np.where(shared & (c.cp_kind == _ULYSSES), exchanged, local + others)
    sums = s.tokens * 4.0 * c.heads / c.tp
    pairs = np.where(c.attention == _UNFUSED, s.micro * c.heads / c.tp * c.seq**2 / c.cp, 0.0)
    made = np.where(c.attn_ckpt > 0, 0.0, sums + 2.0 * c.act_bytes * pairs)
    bias = c.alibi * c.heads / c.tp * (c.seq / c.cp) ** 2 * c.act_bytes
    return np.where(c.fsdp2 > 0, keys + q + made + bias, usual)


def scores(c: Columns, s: Sizes) -> Floats:
    """Of each: the softmax; unfused, scores and masked scores, too; of gpt-like models also a mask
    of dropout and what it leaves."""
    drop = np.where(c.gated > 0, 0.0, 3.0)
    each = np.where(c.attention == _FUSED, 2.0 + drop, 0.0)
    each = np.where(c.attention == _UNFUSED, 7.0 + drop, each)
    return s.tokens * each * c.heads * c.seq / c.tp


def cast_input(c: Columns, s: Sizes) -> Floats:
    """Attention keeps its output; a product in fewer bits keeps that once more in them."""
    return np.where(c.saved_bytes < c.act_bytes, s.tokens * s.width * c.saved_bytes, 0.0)


def routed_mlp(c: Columns, s: Sizes) -> Iterator[Op]:
    """Experts in `routed` of the layers, with a shared one where the model has any; one MLP in the
    others."""
    if np.any(s.dense > 0):
        yield from shared_out(mlp(c, s), s.dense)
    yield from shared_out(norm(c, s, "mlp_norm", s.norm_again), c.routed)
    yield from shared_out(experts(c, s), c.routed)
    has_shared = c.routed * np.where(c.shared_ffn > 0, 1.0, 0.0)
    if np.any(has_shared):
        wide, ffn = ((1.0 + c.gated) * c.shared_ffn / c.tp, c.shared_ffn / c.tp)
        again, kept = s.up_again + (1.0 - s.up_again) * c.moe_ckpt, s.tokens * ffn
        beside = (
            *gathered(c, s, "mlp.shared.input_comm", s.up_again),
            *linear(c, s, "mlp.shared.gate_up", wide, c.hidden, again, keeps=kept * c.act_bytes),
            *linear(c, s, "mlp.shared.down", c.hidden, ffn, again, keeps=2.0 * kept * c.act_bytes),
            *summed(c, s, "mlp.shared.down, sum"),
        )
        yield from shared_out(beside, has_shared)
    yield from shared_out(residual(c, s, "mlp, add"), c.routed)


def mlp(c: Columns, s: Sizes) -> Iterator[Op]:
    rows = (s.tokens, s.ffn)
    gate = (Tensor("up", rows),) if np.any(c.gated > 0) else ()
    up = {
        "keeps": block_input(c, s),
        "parts": 1.0 + c.gated,
        "writes": (Tensor("intermediate", rows), *gate),
        "reads": ("input", "W1", *(["W3"] if gate else [])),
        "function": "act",
    }
    down = {
        "writes": (Tensor("partial", (s.tokens, c.hidden)),),
        "reads": ("intermediate", "W2"),
    }
    yield from norm(c, s, "mlp_norm", s.norm_again)
    yield from gathered(c, s, "mlp.input_comm", s.up_again)
    yield from linear(c, s, "mlp.gate_up", s.wide, c.hidden, s.up_again, **up)
    yield from activation(c, s)
    yield from linear(
        c, s, "mlp.down", c.hidden, s.ffn, s.last_again, keeps=activated(c, s), **down
    )
    yield from summed(c, s, "mlp.down, sum")
    yield from residual(c, s, "mlp.down, add")


def activation(c: Columns, s: Sizes) -> Iterator[Op]:
    """Plain calls keep the activated gate besides what it was made of."""
    each, wide = s.each, s.each * s.wide
    gate = np.where(s.made_again, 0.0, each * c.eager * c.gated * s.ffn)
    yield from passes(
        c,
        s,
        "mlp.activation",
        each * (2.0 + c.gated) * s.ffn,
        lambda: (wide + each * s.ffn, 2.0 * wide + each * s.ffn),
        again=s.norm_again,
        keeps=np.where(c.mlp_ckpt > 0, 0.0, wide) + gate,
        gives=wide,
        reads=("intermediate", "up") if np.any(c.gated > 0) else (),
        function="*=",
    )


def activated(c: Columns, s: Sizes) -> Floats:
    return np.where(s.made_again, 0.0, s.tokens * s.ffn * c.saved_bytes)
