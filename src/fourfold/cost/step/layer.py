"""Seconds of one transformer layer on one rank and one micro batch, both ways, part by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step import host
from fourfold.cost.step.kernels import (
    EXACT,
    adding_bytes,
    attention_s,
    elementwise_s,
    gemm_s,
    lean_bytes,
    linear_shapes,
)
from fourfold.cost.step.traffic import (
    context_s,
    floor,
    group_rate,
    half_collective_s,
    host_layer_s,
    ring_s,
)
from fourfold.spec.words import DTYPES

_FP8 = DTYPES.index("fp8")
_FP4 = DTYPES.index("fp4")
# torchtitan's 70B runs on H100: the same run with scales per row takes a third longer.
ROWWISE = 0.6
# Of a layer's element-wise passes: both norms and the activation, without residuals and rope.
NORM_AND_ACT = 0.6


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer and one micro batch; `total` is what the parts become together."""

    gemm: Floats
    attention: Floats
    elementwise: Floats
    recompute: Floats
    tp_comm: Floats
    cp_comm: Floats
    fsdp_comm: Floats
    host: Floats
    total: Floats
    launch_ratio: Floats  # the host's time to launch it against the device's to run it


def linear_s(
    c: Columns, coef: Coefficients, *, tokens: Floats, wide: Floats, deep: Floats, low: bool = True
) -> tuple[Floats, Floats]:
    """(forward, backward) of a linear layer deep -> wide."""
    rate = c.peak * c.clock * coef["gemm"]
    if low:
        is_low = (c.precision == _FP8) | (c.precision == _FP4)
        kernel = coef["fp8"] * np.where(c.row_scale > 0, ROWWISE, 1.0)
        rate = np.where(is_low, c.peak_low * c.clock * coef["gemm"] * kernel, rate)
    args = {"rate": rate, "hbm": c.hbm, "sms": c.sms, "coef": coef}
    forward = gemm_s(tokens, wide, deep, **args)
    backward = gemm_s(tokens, deep, wide, **args) + gemm_s(deep, wide, tokens, **args)
    return forward, backward


def layer_gemm_s(c: Columns, coef: Coefficients, *, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of the four linear layers: qkv, attention out, mlp in, mlp out."""
    shapes = linear_shapes(c)
    pairs = [linear_s(c, coef, tokens=tokens, wide=n, deep=k) for n, k in shapes]
    none = np.zeros(())
    return sum((f for f, _ in pairs), start=none), sum((b for _, b in pairs), start=none)


def head_s(c: Columns, coef: Coefficients, *, tokens: Floats) -> Floats:
    """Logits and loss, both ways; always in 16 bits. In chunks logits are computed twice."""
    if host.is_host(coef):
        return host.head_s(c, coef, tokens=tokens)
    wide = np.ceil(c.vocab / c.tp)
    forward, backward = linear_s(c, coef, tokens=tokens, wide=wide, deep=c.hidden, low=False)
    again = np.where((c.loss_chunks > 1) & (c.lean_loss < 1), forward, 0.0)
    lean = EXACT * lean_bytes(c, tokens)
    passes = np.where(c.own_kernels + c.lean_loss > 0, lean, 9.6 * tokens * wide)
    return forward + again + backward + passes * coef["elem"] / c.hbm


def layer_times(c: Columns, coef: Coefficients, *, micro: Floats) -> LayerTimes:
    """Everything one layer does for one micro batch."""
    if host.is_host(coef):
        return LayerTimes(**host.layer_parts(c, coef, micro=micro))
    tokens = micro * c.seq / c.cp
    gemm_f, gemm_b = layer_gemm_s(c, coef, tokens=tokens)
    attn_f, attn_b = attention_s(c, coef, micro=micro)
    elem_f, elem_b = elementwise_s(c, coef, tokens=tokens)
    half = half_collective_s(c, coef, 2.0 * tokens * c.hidden, size=c.tp, stride=np.ones_like(c.tp))
    half = half + np.where(c.tp > 1, coef["call_s"], 0.0)
    half = half * np.where(c.overlap_tp > 0, coef["tp_hidden"], 1.0)
    tp_f, tp_b = 4.0 * half, np.where(c.sp > 0, 5.0, 4.0) * half
    cp_f = context_s(c, coef, tokens=tokens, attention=attn_f, backward=False)
    cp_b = context_s(c, coef, tokens=tokens, attention=attn_b, backward=True)
    forward = gemm_f + attn_f + elem_f + tp_f + cp_f
    # Torch stops where a backward pass has all it needs: before the last product.
    last, _ = linear_s(c, coef, tokens=tokens, wide=c.hidden, deep=c.ffn / c.tp)
    again = forward - np.where(c.own > 0, last, 0.0)
    parts = c.attn_ckpt * attn_f + _modules_s(c, coef, elem_f=elem_f, tp_f=tp_f, tokens=tokens)
    recompute = c.full_ckpt * again + (1.0 - c.full_ckpt) * parts
    params = c.rank_layer_weights
    added = np.where(c.own_kernels > 0, adding_bytes(c, params), 10.0 * params)
    accumulate = added / c.hbm
    busy = forward + gemm_b + attn_b + elem_b + tp_b + cp_b + recompute + accumulate
    gathered = fsdp_s(c, coef, params=params, busy=busy)
    launch = host_layer_s(c, coef)
    total = floor(gathered, launch)
    return LayerTimes(
        gemm=gemm_f + gemm_b,
        attention=attn_f + attn_b,
        elementwise=elem_f + elem_b + accumulate,
        recompute=recompute,
        tp_comm=tp_f + tp_b,
        cp_comm=cp_f + cp_b,
        fsdp_comm=gathered - busy,
        host=total - gathered,
        total=total,
        launch_ratio=launch / gathered,
    )


def _modules_s(
    c: Columns, coef: Coefficients, *, elem_f: Floats, tp_f: Floats, tokens: Floats
) -> Floats:
    """Norms and the activation once more; under norm+mlp the MLP's first product too, with the
    gathering of its input."""
    if not np.any(c.norm_ckpt > 0):
        return np.zeros(())
    wide, _ = linear_s(c, coef, tokens=tokens, wide=(1.0 + c.gated) * c.ffn / c.tp, deep=c.hidden)
    return c.norm_ckpt * NORM_AND_ACT * elem_f + c.mlp_ckpt * (wide + tp_f / 4.0)


def fsdp_s(c: Columns, coef: Coefficients, *, params: Floats, busy: Floats) -> Floats:
    """Layer seconds under ZeRO-3: two weight gathers and a gradient scatter beside the compute."""
    paid = beside_s(c, coef, busy=busy, move=gathers_s(c, coef, params=params))
    return np.where((c.zero >= 3) & (c.shard > 1), paid, busy)


def gathers_s(c: Columns, coef: Coefficients, *, params: Floats) -> Floats:
    """Seconds of a layer's gathers and scatter alone; none where nobody shares the weights."""
    size = c.shard
    rate = group_rate(c, coef, size, c.tp)
    move = params * (2.0 * c.gather_bytes + c.grad_bytes) * (size - 1.0) / size / rate
    return move + 0.75 * ring_s(c, coef, size, c.tp)


def beside_s(c: Columns, coef: Coefficients, *, busy: Floats, move: Floats) -> Floats:
    """What both take; grows with either."""
    together = (busy**4 + move**4) ** 0.25 + 0.2 * coef["dp_exposed"] * move
    return np.where(c.prefetch > 0, together, busy + move)
