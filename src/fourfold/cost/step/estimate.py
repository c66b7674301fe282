"""Seconds of a step, part by part: combines the formulas of this package.

    time = estimate(columns, coefficients)      # Times: arrays as long as the columns
    time.step_s                          # seconds per optimizer step
    time.parts["tp_comm"]                # exposed seconds of one part; the parts sum to step_s

`columns` is `fourfold.cost.columns.Columns`, `coefficients` maps every name of
`fourfold.cost.fit.coefficients` to a number, or to an array that broadcasts against the
columns (a (k, 1) array asks k questions at once; the fit does).
For memory see `fourfold.cost.memory.peak`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step.layer import LayerTimes, head_s, layer_times
from fourfold.cost.step.own_engine import update_bytes
from fourfold.cost.step.pipeline import pipeline_s, stage_layers
from fourfold.cost.step.traffic import crosses, group_rate, half_collective_s, p2p_rate

PARTS = (
    "gemm",
    "attention",
    "elementwise",
    "recompute",
    "tp_comm",
    "cp_comm",
    "fsdp_comm",
    "host",
    "head",
    "pp_comm",
    "bubble",
    "dp_comm",
    "optimizer",
    "fixed",
    "jitter",
)


BUCKET_BYTES = 100e6  # gradient reducers use 25 to 400 MB; this explains nanotron best


_OWN_FIXED = 0.1  # of what other engines do once per step: logging, clipping, waiting for a number


NEAR_HOP = 0.2  # a hop over NVLink against one over the network


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step and where they go."""

    step_s: Floats
    parts: dict[str, Floats]


def estimate(c: Columns, coef: Coefficients) -> Times:
    """Closed-form step time of every run."""
    whole = np.floor(c.share / c.micro)
    rest = c.share - whole * c.micro
    layer = layer_times(c, coef, micro=c.micro)
    main = _one_micro(c, coef, layer, c.micro)
    slots = whole
    if np.any(rest > 1e-9):
        # A smaller last micro batch (48 = 11+11+11+11+4) is priced by its own shapes.
        small = np.maximum(rest, 1e-6)
        other = _one_micro(c, coef, layer_times(c, coef, micro=small), small)
        slots = whole + np.where(rest > 1e-9, other["slowest"] / main["slowest"], 0.0)
    pipe = pipeline_s(
        c,
        first=main["first"],
        middle=main["middle"],
        last=main["last"],
        total=main["total"],
        slots=slots,
    )
    return _assemble(c, coef, layer, main, pipe=pipe, slots=slots)


def _one_micro(
    c: Columns, coef: Coefficients, layer: LayerTimes, micro: Floats
) -> dict[str, Floats]:
    """Seconds of one micro batch in the first, a middle, the last stage and in all of them."""
    tokens = micro * c.seq / c.cp
    head = head_s(c, coef, tokens=tokens)
    embed = embedding_s(c, tokens) + embedding_comm_s(c, coef, tokens)
    split = stage_layers(c)
    p2p = handover_s(c, coef, tokens)
    first = split.first * layer.total + embed + p2p
    middle = split.middle * layer.total + p2p
    last = split.last * layer.total + head + p2p
    total = c.layers * layer.total + head + embed + c.pp * p2p
    inner = np.where(c.pp > 2, middle, 0.0)
    slowest = np.where(c.pp > 1, np.maximum(np.maximum(first, last), inner), total)
    return {
        "first": first,
        "middle": middle,
        "last": last,
        "total": total,
        "slowest": slowest,
        "head": head + embed,
        "p2p": p2p,
    }


def embedding_s(c: Columns, tokens: Floats) -> Floats:
    """Rows read, written and added to, both ways."""
    return 12.0 * tokens * c.hidden / c.hbm


def embedding_comm_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """What tensor-parallel ranks exchange at the ends of the model."""
    data = 2.0 * tokens * c.hidden
    return 2.0 * half_collective_s(c, coef, data, size=c.tp, stride=np.ones_like(c.tp))


def handover_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """Of one micro batch between stages, both ways."""
    moved = 2.0 * tokens * c.hidden / np.where(c.sp > 0, c.tp, 1.0)
    both = 2.0 * moved / p2p_rate(c, coef, c.gpus / c.pp) + coef["micro_s"]
    return np.where(c.pp > 1, c.vpp * both, 0.0)


def optimizer_s(c: Columns, *, params: Floats, weights: Floats) -> Floats:
    """Update of `params` parameters, or of all `weights` where our own kernels are counted."""
    shards = np.where(c.zero >= 1, c.shard, 1.0)
    moved = np.where(
        c.own_kernels > 0, update_bytes(c, weights), c.update_traffic * params / shards
    )
    return moved / c.hbm


def fixed_s(c: Columns, coef: Coefficients) -> Floats:
    """Nothing of a compiled step waits for its host once, whatever else happens between steps."""
    return coef["fixed_s"] * np.where(c.own_kernels > 0, _OWN_FIXED, 1.0)


def waiting_s(
    c: Columns, coef: Coefficients, *, work: Floats, slots: Floats
) -> tuple[Floats, Floats]:
    """(waits, jitter): stages on different nodes meet at every micro batch and wait for the later
    one; everything grows with the nodes."""
    nodes = np.maximum(1.0, c.gpus / c.node)
    waits = np.where((nodes > 1) & (c.pp > 1), slots * coef["noise_s"] * nodes**0.75, 0.0)
    return waits, (work + waits) * coef["jitter"] * np.log2(nodes)


def gradient_s(c: Columns, coef: Coefficients, *, params: Floats, window: Floats) -> Floats:
    """Exposed seconds of the gradient reduction (and ZeRO-1's weight gather) of a step.

    `window`: seconds of backward under which an overlapping engine hides it.
    """
    size = c.dp * c.cp
    rate = group_rate(c, coef, size, c.tp)
    whole = (c.zero < 1) | (c.shard < size)  # every rank needs the whole sum: an all-reduce
    reduce = params * c.grad_bytes * np.where(whole, 2.0, 1.0) * (size - 1.0) / size / rate
    # An all-reduce goes up a tree, bucket by bucket, but around a ring when the fabric is in its
    # slow state; ZeRO scatters and gathers layer by layer around rings.
    ring = size - 1.0
    tree = np.where(c.slow > 0, 2.0 * ring, 2.0 * np.log2(np.maximum(size, 1.0)))
    per_stage = c.layers / c.pp
    hops = np.where(whole, tree * params * c.grad_bytes / BUCKET_BYTES, ring * per_stage)
    hops = hops * np.where(crosses(c, size, c.tp), 1.0, NEAR_HOP)
    gather = 2.0 * params * (c.shard - 1.0) / c.shard / group_rate(c, coef, c.shard, c.tp)
    turns = (c.shard - 1.0) * per_stage * np.where(crosses(c, c.shard, c.tp), 1.0, NEAR_HOP)
    hop = coef["dp_hop_s"] * np.where(c.slow > 0, coef["slow_hop"], 1.0)
    sharded = (c.zero >= 1) & (c.shard > 1)
    move = reduce + hops * hop + np.where(sharded, gather + turns * hop, 0.0)
    paid = coef["dp_exposed"] * move
    hidden = np.maximum(0.1 * paid, paid - 0.6 * window)
    paid = np.where((c.zero < 1) | (c.overlap_dp > 0), hidden, paid)
    return np.where((size > 1) & (c.zero < 3), paid, 0.0)


def _assemble(
    c: Columns,
    coef: Coefficients,
    layer: LayerTimes,
    main: dict[str, Floats],
    *,
    pipe: Floats,
    slots: Floats,
) -> Times:
    """Add what happens once per step, and name where the seconds went."""
    per_stage = c.layers / c.pp
    # first stage: its layers and the embedding; tied or not, the head's weights are as large
    params = per_stage * layer.params + c.vocab * c.hidden / c.tp
    window = per_stage * layer.total
    dp = gradient_s(c, coef, params=params, window=window)
    weights = params + np.where((c.tied < 1) & (c.pp == 1), c.vocab * c.hidden / c.tp, 0.0)
    optimizer = optimizer_s(c, params=params, weights=weights)
    waits, jitter = waiting_s(c, coef, work=pipe + dp + optimizer, slots=slots)
    fixed = fixed_s(c, coef)
    step = pipe + dp + optimizer + waits + jitter + fixed
    spent = slots * per_stage
    parts = {
        "gemm": spent * layer.gemm,
        "attention": spent * layer.attention,
        "elementwise": spent * layer.elementwise,
        "recompute": spent * layer.recompute,
        "tp_comm": spent * layer.tp_comm,
        "cp_comm": spent * layer.cp_comm,
        "fsdp_comm": spent * layer.fsdp_comm,
        "host": spent * layer.host,
        "head": slots * main["head"] / c.pp,
        "pp_comm": slots * main["p2p"],
        "dp_comm": dp + np.zeros_like(step),
        "optimizer": optimizer + np.zeros_like(step),
        "fixed": fixed + np.zeros_like(step),
        "jitter": jitter + waits,
    }
    known = sum(parts.values())
    parts["bubble"] = step - known
    return Times(step_s=step, parts={name: parts[name] for name in PARTS})
