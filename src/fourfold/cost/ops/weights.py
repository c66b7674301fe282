"""Operations on a layer's weights: casts of operands, gathers, and sums of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.kinds import DENSE, kinds_of
from fourfold.cost.ops.experts import expert_casts
from fourfold.cost.ops.op import Op, Sizes
from fourfold.spec.words import DTYPES

_FP8, _FP4 = DTYPES.index("fp8"), DTYPES.index("fp4")


def casts(c: Columns, s: Sizes) -> Iterator[Op]:
    """Operands of products in fp8 or fp4: read, written with their transpose, by the kind of their
    scales. Counted: each is read for its largest value, read again and written, inputs and
    weights once more in the backward pass."""
    low = np.where((c.precision == _FP8) | (c.precision == _FP4), 1.0, 0.0)
    if not low.any():
        return
    values = s.tokens * (2.0 * s.between + s.width + s.ffn)
    if np.any(c.experts > 0):
        inner = s.tokens * (s.between + s.width + c.shared_ffn / c.tp) + expert_casts(c, s)
        values = s.dense * values + c.routed * inner
    usual = values * low * c.cast_bytes
    ins = s.tokens * (2.0 * c.hidden + s.width + s.ffn)
    outs = s.tokens * (s.qkv + 2.0 * c.hidden + s.wide)
    fp8, ours = np.where(c.precision == _FP8, 1.0, 0.0), c.our_kernels > 0
    matrices = DENSE.on_rank(c)
    there = fp8 * 5.0 * (ins + matrices)
    back = fp8 * (3.0 * (ins + matrices) + 6.0 * outs)
    cast = partial(Op, name="casts", kind="cast", counted=c.our_kernels)
    yield cast(bytes=np.where(ours, there, usual), again=s.norm_again)
    yield cast(phase="inputs", bytes=np.where(ours, back, 2.0 * usual))


def weights(c: Columns) -> Iterator[Op]:
    """ZeRO-3 gathers a layer before either pass and scatters its gradients; they are added up over
    micro batches, and over replicas. Each kind has ranks of its own."""
    held = np.zeros(())
    for kind in kinds_of(c):
        whose, params, ranks = kind.name, kind.on_rank(c), kind.shards(c)
        held = held + params
        sharded = np.where((c.zero >= 3) & (ranks > 1), 1.0, 0.0)
        summed = np.where((c.zero >= 3) & (ranks < kind.copies(c)), 1.0, 0.0)
        if sharded.any():
            gather = partial(Op, kind="collective", axis=f"shard{whose}", times=sharded)
            whole = partial(gather, name=f"weights{whose}, gather", bytes=params * c.gather_bytes)
            yield whole()
            yield whole(phase="inputs")
            yield gather(
                name=f"gradients{whose}, scatter", phase="weights", bytes=params * c.grad_bytes
            )
        if summed.any():
            yield Op(
                name=f"gradients{whose}, sum",
                kind="collective",
                axis=f"replicas{whose}",
                phase="weights",
                bytes=params * c.grad_bytes / ranks,
                halves=np.array(2.0),
                times=summed,
            )
    yield Op(name="gradients, add", kind="copy", phase="weights", bytes=_added_bytes(c, held))


def _added_bytes(c: Columns, params: Floats) -> Floats:
    """Mean over micro batches; counted, without FSDP the first one's gradients are the sum."""
    micros = c.micros
    share = np.where(c.is_alone, (micros - 1.0) / np.maximum(micros, 1.0), 1.0)
    counted = params * (c.act_bytes + 2.0 * c.acc_bytes) * share
    return np.where(c.our_kernels > 0, counted, 10.0 * params)
