"""Operations of what a layer with experts has in place of one MLP (engine/model/experts.py), from
top to bottom. Every rank routes its own tokens: with tensor parallelism those of its part of the
sequence. Rows are a token's copies, one for each of its experts; the fullest rank's are counted,
for which the others wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from fourfold.cost import dispatch
from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.op import EAGER, Op, Sizes

# Passes over a router's logits in fp32: softmax, choice, counts, balancing loss.
_LOGIT_PASSES = 8.0

# Experts with biases (GPT-OSS) add them by plain calls in fp32 around a gate that is clipped, and
# sum their gradients over rows: of what one fused activation moves.
_BIASED = 6.0

# Kernels around experts move more than the rows that they sort and activate: rows are padded to
# whole tiles, probabilities multiplied and their gradients summed in fp32. Sources left out are
# predicted best with twice the counted bytes (of 1 to 3).
_AROUND = 2.0

# Where a step is one graph, buffers have fixed sizes, and kernels around experts are fused with
# their products (Transformer Engine's op fuser): of what is moved and cast otherwise. Runs of
# Qwen3-30B whose hosts were no limit take 0.64 to 0.75 of the time (Megatron-Bridge 26.06).
_FUSED = 0.4


class ExpertSizes:
    """Of one micro batch on the fullest rank."""

    def __init__(self, c: Columns, s: Sizes) -> None:
        self.tokens = s.tokens / c.split
        self.local = np.maximum(1.0, c.experts / c.ep)  # experts of a rank
        self.rows = self.tokens * c.top_k * c.etp * c.fullest
        self.each = self.rows / self.local
        self.moved = self.tokens * c.hidden * c.act_bytes  # bytes of tokens, and of their copies
        self.whole = self.rows * c.hidden * c.act_bytes
        self.wide = (1.0 + c.gated) * c.expert_ffn / c.etp
        self.ffn = c.expert_ffn / c.etp
        self.again = c.full_ckpt + (1.0 - c.full_ckpt) * c.moe_ckpt
        made = np.maximum(c.moe_ckpt, np.maximum(c.moe_act_ckpt, c.norm_ckpt))
        self.act_again = c.full_ckpt + (1.0 - c.full_ckpt) * made
        self.kept = np.where(c.moe_ckpt > 0, 0.0, 1.0)
        self.act_kept = np.where(made > 0, 0.0, 1.0)


def shared_out(ops: Iterable[Op], share: Floats) -> Iterator[Op]:
    """Operations that only a share of the layers has."""
    return (op._replace(share=share) for op in ops)


def experts(c: Columns, s: Sizes) -> Iterator[Op]:
    """Router, dispatch, two grouped products with the activation between, combine."""
    e = ExpertSizes(c, s)
    yield from _router(c, e)
    yield from _exchange(c, e, "mlp.dispatch")
    keeps = e.kept * e.rows * c.hidden * c.saved_bytes
    yield from _grouped(c, e, "mlp.experts.gate_up", e.wide, c.hidden, e.again, keeps)
    yield from _activation(c, s, e)
    keeps = e.act_kept * e.rows * e.ffn * c.saved_bytes
    yield from _grouped(c, e, "mlp.experts.down", c.hidden, e.ffn, e.again, keeps)
    yield from _exchange(c, e, "mlp.combine")


def _router(c: Columns, e: ExpertSizes) -> Iterator[Op]:
    product = partial(Op, name="mlp.router", kind="product", narrow=False)
    logits = 4.0 * e.tokens * c.experts
    yield product(
        m=e.tokens,
        n=c.experts,
        k=c.hidden,
        again=e.again,
        keeps=2.0 * e.kept * logits,
        gives=e.tokens * c.hidden * c.act_bytes,
    )
    yield product(phase="inputs", m=e.tokens, n=c.hidden, k=c.experts)
    yield product(phase="weights", m=c.hidden, n=c.experts, k=e.tokens)
    scores = partial(Op, name="mlp.router, scores", kind="elementwise")
    yield scores(bytes=_LOGIT_PASSES * logits, again=e.again)
    yield scores(phase="inputs", bytes=_LOGIT_PASSES / 2.0 * logits)


def _exchange(c: Columns, e: ExpertSizes, name: str) -> Iterator[Op]:
    """Rows in order of their experts, to other ranks and, where slices of an expert lie on several,
    to all of these; back the other way round. Gradients take the same ways. A kernel of ours reads
    a token once for all of its copies, and writes their sum once."""
    passes = _around(c) * dispatch.fact(c.dispatcher, "passes")
    passes = passes - np.where(c.our_kernels > 0, 1.0 - 1.0 / np.maximum(1.0, c.top_k), 0.0)
    order = partial(Op, name=f"{name}, order", kind="elementwise", bytes=passes * e.whole / c.etp)
    sent = partial(Op, name=name, kind="collective", axis="ep", bytes=e.moved)
    slices = partial(Op, name=f"{name}, slices", kind="collective", axis="etp", bytes=e.whole)
    for op in (order, sent, slices):
        yield op(again=e.again)
        yield op(phase="inputs")


def _grouped(
    c: Columns, e: ExpertSizes, name: str, outs: Floats, ins: Floats, again: Floats, keeps: Floats
) -> Iterator[Op]:
    product = partial(Op, name=name, kind="grouped product", groups=e.local)
    yield product(
        m=e.each, n=outs, k=ins, again=again, keeps=keeps, gives=e.rows * ins * c.act_bytes
    )
    yield product(phase="inputs", m=e.each, n=ins, k=outs)
    yield product(phase="weights", m=ins, n=outs, k=e.each)


def _activation(c: Columns, s: Sizes, e: ExpertSizes) -> Iterator[Op]:
    passes = np.where(c.expert_bias > 0, _BIASED, np.where(c.eager > 0, EAGER, 1.0))
    there = _around(c) * e.rows * c.act_bytes * (e.wide + e.ffn)
    wide = e.rows * c.act_bytes * e.wide
    act = partial(Op, name="mlp.experts.activate", kind="elementwise")
    yield act(bytes=there * passes, again=e.act_again, keeps=e.kept * wide, gives=wide)
    yield act(phase="inputs", bytes=2.0 * there * passes)


def expert_casts(c: Columns, s: Sizes) -> Floats:
    """Values of rows that are cast for grouped products in fewer bits."""
    e = ExpertSizes(c, s)
    return _fused(c) * e.rows * (c.hidden + e.ffn)


def _around(c: Columns) -> Floats:
    """Of what rows need: kernels of our own move nothing else."""
    return np.where(c.our_kernels > 0, 1.0, _AROUND * _fused(c))


def _fused(c: Columns) -> Floats:
    return np.where(c.fused_host > 1, _FUSED, 1.0)
