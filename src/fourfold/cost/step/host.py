"""Our engine where its device is a host's own cores: operators run one after another, each paid in
full, and nothing hides behind anything. Coefficients that begin with `cpu_` say so; only a profile
of a CPU has them (result/host_profile.py), of as many ranks at work at once.

Bytes are those that operators read and write, as counted of the engine (engine/microbench/host.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step.kernels import attention_s, linear_shapes
from fourfold.result.points import CPU_FLASH
from fourfold.spec.words import CP_KINDS

# Of a logit, in values read and written: logarithm of softmax, both ways, and the loss's gradient;
# cut by vocabulary, and by the lean loss, in separate operators.
_LOSS, _CUT_LOSS, _LEAN_LOSS = 6.0, 13.0, 22.0
_WRITTEN = 0.45  # of them
# What C's memory allocator keeps of one tensor is less; others go back to the system and come
# from it page by page.
_KEPT_BYTES = 2.0**25
# Of FSDP's smaller buffers, the share that goes back all the same: pages counted in steps of zero1
# and zero3.
_GIVEN_BACK = 0.45
_RING, _ALLGATHER = CP_KINDS.index("ring"), CP_KINDS.index("allgather")


def is_host(coef: Coefficients) -> bool:
    return "cpu_layer_s" in coef


def product_s(c: Columns, coef: Coefficients, m: Floats, n: Floats, k: Floats) -> Floats:
    """Multiplying, and laying operands side by side."""
    operands = c.act_bytes * (m * k + n * k + m * n)
    took = 2.0 * m * n * k / (c.peak * coef["cpu_product"]) + operands * coef["cpu_operand_s"]
    return took + _fresh_s(coef, c.act_bytes * m * n)


def _fresh_s(coef: Coefficients, size: Floats) -> Floats:
    """Of a new tensor of `size` bytes, whoever writes it."""
    return np.where(size >= _KEPT_BYTES, size * coef["cpu_fresh_s"], 0.0)


def linear_s(
    c: Columns, coef: Coefficients, *, tokens: Floats, wide: Floats, deep: Floats
) -> tuple[Floats, Floats]:
    """(forward, backward) of a linear layer deep -> wide."""
    backward = product_s(c, coef, tokens, deep, wide) + product_s(c, coef, wide, deep, tokens)
    return product_s(c, coef, tokens, wide, deep), backward


def layer_bytes(c: Columns, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of one layer between its products. RMSNorm is six operators on a CPU and
    goes with a gated MLP; LayerNorm is one."""
    gated, rope = c.gated > 0, np.where(c.rope > 0, 1.0, 0.0)
    hidden, q, kv = c.hidden / c.split, c.width / c.tp, c.kv_width / c.tp
    ffn = c.ffn / c.tp
    turned = 10.0 * rope * (q + kv)
    parted = 2.0 * c.fused_qkv * (q + 2.0 * kv)
    forward = np.where(gated, 20.0, 10.0) * hidden + turned + np.where(gated, 5.0, 2.0) * ffn
    backward = np.where(gated, 54.0, 12.0) * hidden + turned + parted
    backward = backward + np.where(gated, 13.0, 3.0) * ffn
    # Added to sums over ranks apart from the product; their gradients are sums over tokens.
    apart = np.where(c.tp > 1, 4.0 * hidden, 0.0)
    summed = q + 2.0 * kv + ffn + 2.0 * hidden
    forward, backward = forward + c.bias * apart, backward + c.bias * summed
    cp_forward, cp_backward = _cp_values(c, q, kv)
    each = tokens * c.act_bytes
    return each * (forward + cp_forward), each * (backward + cp_backward)


def _cp_values(c: Columns, q: Floats, kv: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) that context parallelism reads and writes for a token: keys and values
    laid side by side, blocks of attention joined, their gradients added up."""
    ring, gathered = c.cp_kind == _RING, c.cp_kind == _ALLGATHER
    forward = np.where(gathered, 14.4 * q + 4.0 * (1.0 + c.cp) * kv, 10.0 * q + 12.0 * kv)
    forward = np.where(ring, (6.8 + 3.8 * c.cp) * q + 4.0 * kv, forward)
    backward = np.where(gathered, 6.5 * q + (7.0 + 30.0 * c.cp) * kv, 10.0 * q + 24.0 * kv)
    backward = np.where(ring, (3.5 + 1.55 * c.cp) * q + (12.0 + 6.0 * c.cp) * kv, backward)
    return np.where(c.cp > 1, forward, 0.0), np.where(c.cp > 1, backward, 0.0)


def head_s(c: Columns, coef: Coefficients, *, tokens: Floats) -> Floats:
    """Logits and loss, both ways."""
    wide = np.ceil(c.vocab / c.tp)
    forward, backward = linear_s(c, coef, tokens=tokens, wide=wide, deep=c.hidden)
    again = np.where((c.loss_chunks > 1) & (c.lean_loss < 1), forward, 0.0)
    passes = np.where(c.lean_loss > 0, _LEAN_LOSS, np.where(c.tp > 1, _CUT_LOSS, _LOSS))
    logits = tokens * wide * np.maximum(c.act_bytes, 4.0)
    moved = passes * logits
    new = _WRITTEN * passes * c.loss_chunks * _fresh_s(coef, logits / c.loss_chunks)
    own = np.where((c.tied > 0) & (c.pp < 2), 0.0, wide * c.hidden)
    # Without a pipeline FSDP holds it together with the embedding.
    ends = np.where(c.pp > 1, _fsdp_end_s(c, coef, own), 0.0)
    elements = (moved + _added_bytes(c, own)) * coef["cpu_element_s"]
    return forward + again + backward + elements + new + ends


def embedding_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """Rows read and written; a gradient as large as the table, most of it zeros, and its sum."""
    table = np.ceil(c.vocab / c.tp) * c.hidden
    moved = c.act_bytes * (6.0 * tokens * c.hidden + table) + _added_bytes(c, table)
    # At both ends tensor parallelism exchanges as much as in one block of a layer, both ways.
    new = _fresh_s(coef, c.act_bytes * table)
    root = table * np.where((c.tied > 0) | (c.pp > 1), 1.0, 2.0)
    ends = _tp_s(c, coef, tokens) + _fsdp_end_s(c, coef, root)
    return moved * coef["cpu_element_s"] + new + ends


def _added_bytes(c: Columns, params: Floats) -> Floats:
    """Gradients of more micro batches are added up; those of the first are the sum. From zero2 on a
    rank adds up its shard."""
    share = np.where(c.zero < 2, 1.0, 1.0 / c.shards)
    later = (c.micros - 1.0) / np.maximum(c.micros, 1.0)
    return params * (c.act_bytes + 2.0 * c.acc_bytes) * share * later


def collective_s(
    coef: Coefficients, kind: str, data: Floats, size: Floats, ways: float = 1.0
) -> Floats:
    """Of `data` bytes over `size` ranks: start, hop by hop, and bytes that a rank sends. Gathering
    and scattering go through a buffer of torch's own."""
    moved = ways * data * (size - 1.0) / size
    took = (size - 1.0) * coef[f"cpu_{kind}_s"] + moved * coef[f"cpu_{kind}_byte_s"]
    between = _fresh_s(coef, data) if kind in ("gather", "scatter") else 0.0
    return np.where(size > 1, took + between, 0.0)


def _tp_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """What tensor parallelism exchanges in a layer's forward; its backward does the same."""
    data = c.act_bytes * tokens * c.hidden
    parts = collective_s(coef, "gather", data, c.tp) + collective_s(coef, "scatter", data, c.tp)
    whole = collective_s(coef, "reduce", data, c.tp, ways=2.0)
    calls = np.where(c.sp > 0, 4.0, 2.0) * coef["cpu_call_s"]
    return np.where(c.tp > 1, 2.0 * np.where(c.sp > 0, parts, whole) + calls, 0.0)


def _cp_s(c: Columns, coef: Coefficients, tokens: Floats) -> tuple[Floats, Floats]:
    """(forward, backward). A ring hands keys and values on, and backwards their gradients besides,
    once more to be home; they may be gathered and scattered; or heads and tokens change places."""
    keys = 2.0 * c.act_bytes * tokens * c.kv_width / c.tp
    queries = 2.0 * c.act_bytes * tokens * c.width / c.tp
    hop = coef["cpu_send_s"] + coef["cpu_call_s"] + keys * coef["cpu_send_byte_s"]
    called = coef["cpu_call_s"]
    gather = called + collective_s(coef, "gather", keys * c.cp, c.cp)
    scatter = called + collective_s(coef, "scatter", keys * c.cp, c.cp)
    moved = (queries + keys) / c.cp * coef["cpu_send_byte_s"]
    change = 3.0 * called + (c.cp - 1.0) * (3.0 * coef["cpu_send_s"] + moved)
    gathered = c.cp_kind == _ALLGATHER
    ring = c.cp_kind == _RING
    forward = np.where(ring, (c.cp - 1.0) * hop, np.where(gathered, gather, change))
    backward = np.where(ring, (2.0 * c.cp - 1.0) * hop, np.where(gathered, scatter, change))
    return np.where(c.cp > 1, forward, 0.0), np.where(c.cp > 1, backward, 0.0)


def handover_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """Of one micro batch between stages, both ways."""
    moved = c.act_bytes * tokens * c.hidden / c.split
    both = 2.0 * (coef["cpu_send_s"] + moved * coef["cpu_send_byte_s"])
    return np.where(c.pp > 1, c.vpp * both, 0.0)


def crowded_s(c: Columns, coef: Coefficients, *, usual: Floats, work: Floats) -> Floats:
    """Of a pipeline. Rates are of ranks that are all at work. Where they are more than cores, one
    that waits leaves its turn to the others: together they take as long as their `work` does, or as
    a pipeline whose ranks have a core each."""
    alone = np.maximum(work, coef["cpu_share"] * usual)
    return np.where(c.pp > 1, alone, usual)


def _buffer_s(coef: Coefficients, size: Floats) -> Floats:
    """Of the memory of one of FSDP's buffers."""
    return size * np.where(size >= _KEPT_BYTES, 1.0, _GIVEN_BACK) * coef["cpu_fresh_s"]


def gather_weights_s(c: Columns, coef: Coefficients, params: Floats) -> Floats:
    """FSDP gathers weights into a new buffer and copies them out; its own shard goes in."""
    data = params * c.act_bytes
    copies = 2.0 * data * (1.0 + 1.0 / c.shards)
    moved = copies * coef["cpu_element_s"] + _buffer_s(coef, data)
    return coef["cpu_wrap_s"] + collective_s(coef, "gather", data, c.shards) + moved


def scatter_gradients_s(c: Columns, coef: Coefficients, params: Floats) -> Floats:
    """FSDP copies gradients into a new buffer and sums them over shards, then over copies of a
    shard."""
    data = params * c.acc_bytes
    copies = params * (c.act_bytes + c.acc_bytes) + np.where(c.zero < 1, 5.0 * data, 0.0)
    others = c.dp * c.cp / c.shards
    summed = collective_s(coef, "scatter", data, c.shards)
    summed = summed + collective_s(coef, "reduce", data / c.shards, others, ways=2.0)
    moved = copies * coef["cpu_element_s"] + _buffer_s(coef, data)
    return coef["cpu_wrap_s"] + summed + moved


def _sharded(c: Columns) -> NDArray[np.bool_]:
    return (c.dp * c.cp > 1) | (c.zero >= 3)


def fsdp_layer_s(c: Columns, coef: Coefficients, params: Floats) -> Floats:
    """Of one layer and micro batch: what FSDP does with each of them. A stage's last layer stays
    for its backward pass."""
    times = 2.0 - np.minimum(1.0, c.pp / c.layers)
    return _fsdp_s(c, coef, params, times)


def _fsdp_end_s(c: Columns, coef: Coefficients, params: Floats) -> Floats:
    """Of an end of the model and one micro batch: it is gathered once for both passes."""
    return _fsdp_s(c, coef, params, np.ones(()))


def _fsdp_s(c: Columns, coef: Coefficients, params: Floats, times: Floats) -> Floats:
    gathers = np.where(c.zero >= 3, times * gather_weights_s(c, coef, params), 0.0)
    scatters = np.where(c.zero >= 2, scatter_gradients_s(c, coef, params), 0.0)
    return np.where(_sharded(c), gathers + scatters + coef["cpu_hook_s"], 0.0)


def gradient_s(c: Columns, coef: Coefficients, params: Floats) -> Floats:
    """What FSDP does once in a step, layer by layer and for both ends."""
    layers = c.layers / c.pp
    each = c.rank_layer_weights
    ends = np.maximum(0.0, params - layers * each)

    def once(size: Floats) -> Floats:
        gathered = np.where(c.zero < 3, gather_weights_s(c, coef, size), 0.0)
        return gathered + np.where(c.zero < 2, scatter_gradients_s(c, coef, size), 0.0)

    return np.where(_sharded(c), layers * once(each) + once(ends), 0.0)


def optimizer_s(c: Columns, coef: Coefficients, weights: Floats) -> Floats:
    """The norm of the gradients, which reads them, and the update."""
    each = c.param_bytes * coef["cpu_element_s"] + coef["cpu_update_s"]
    return weights / c.shards * each


def core_s(c: Columns, coef: Coefficients, *, micro: Floats) -> tuple[Floats, Floats]:
    """(forward, backward) of attention. A ring's blocks but the first have no mask, so that they
    make up for the shorter rows of the first."""
    forward, backward = attention_s(c, coef, micro=micro, shape=CPU_FLASH)
    short = CPU_FLASH.forward_keys
    cut = np.where(c.cp_kind == _RING, (c.seq + short) / (c.seq + short * c.cp), 1.0)
    return forward * cut, backward * cut


def layer_parts(c: Columns, coef: Coefficients, *, micro: Floats) -> dict[str, Floats]:
    """Seconds of one layer and one micro batch, by the names of LayerTimes."""
    tokens = micro * c.seq / c.cp
    shapes = linear_shapes(c)
    pairs = [linear_s(c, coef, tokens=tokens, wide=n, deep=k) for n, k in shapes]
    gemm_f, gemm_b = (sum(way, np.zeros(())) for way in zip(*pairs, strict=True))
    attn_f, attn_b = core_s(c, coef, micro=micro)
    params = c.rank_layer_weights
    elem_f, elem_b = (each * coef["cpu_element_s"] for each in layer_bytes(c, tokens))
    added = _added_bytes(c, params) * coef["cpu_element_s"]
    tp, (cp_f, cp_b) = _tp_s(c, coef, tokens), _cp_s(c, coef, tokens)
    launch = coef["cpu_layer_s"] * (1.0 + c.full_ckpt / 3.0)
    # A recomputed layer repeats its forward but for the last product.
    again = gemm_f - pairs[-1][0] + attn_f + elem_f + tp + cp_f
    recompute = c.full_ckpt * again + (1.0 - c.full_ckpt) * c.attn_ckpt * attn_f
    fsdp = fsdp_layer_s(c, coef, params)
    parts = {
        "gemm": gemm_f + gemm_b,
        "attention": attn_f + attn_b,
        "elementwise": elem_f + elem_b + added,
        "recompute": recompute,
        "tp_comm": 2.0 * tp,
        "cp_comm": cp_f + cp_b,
        "fsdp_comm": fsdp,
        "host": launch + np.zeros_like(tp),
    }
    total = sum(parts.values(), np.zeros(()))
    return parts | {"total": total, "launch_ratio": launch / total}
