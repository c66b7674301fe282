"""Seconds of a step, part by part: the closed form. Coefficients may be arrays that broadcast
against the columns: a (k, 1) array asks k questions at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step import host
from fourfold.cost.step.kernels import update_bytes
from fourfold.cost.step.layer import LayerTimes, head_s, layer_times
from fourfold.cost.step.pipeline import StageTimes, pipeline_s, stage_layers
from fourfold.cost.step.traffic import (
    crosses,
    far_hops,
    group_rate,
    half_collective_s,
    p2p_rate,
)

LAYER_PARTS = ("gemm", "attention", "elementwise", "recompute", "tp_comm", "cp_comm", "fsdp_comm",
               "host")  # fmt: skip
PARTS = (*LAYER_PARTS, "head", "pp_comm", "bubble", "dp_comm", "optimizer", "fixed", "jitter")
BUCKET_BYTES = 100e6  # gradient reducers use 25 to 400 MB; this explains nanotron best
_OWN_FIXED = 0.1  # of what other engines do once per step: logging, clipping, waiting for a number
NEAR_HOP = 0.2  # a hop over NVLink against one over the network
# Of what interleaved stages send: the rest travels beside the chunks between. Without it rows of
# NeMo on H100 ask for 1.2 times the network they have.
SENT_ALONE = 0.2


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step and where they go."""

    step_s: Floats
    parts: dict[str, Floats]
    # Of one layer: where the device is the slower, a slower host shows in no part.
    launch_ratio: Floats

    def take(self, index: NDArray[np.intp]) -> Times:
        parts = {name: part[index] for name, part in self.parts.items()}
        return Times(self.step_s[index], parts, self.launch_ratio[index])


def estimate(c: Columns, coef: Coefficients) -> Times:
    """Closed-form step time of every run."""
    whole = np.floor(c.share / c.micro)
    rest = c.share - whole * c.micro
    layer = layer_times(c, coef, micro=c.micro)
    head, embed, handover = ends_s(c, coef, c.micro)
    stages = stage_times(c, layer.total, head, embed, handover)
    slots = whole
    if np.any(rest > 1e-9):
        # A smaller last micro batch (48 = 11+11+11+11+4) is priced by its own shapes.
        small = np.maximum(rest, 1e-6)
        other = stage_times(c, layer_times(c, coef, micro=small).total, *ends_s(c, coef, small))
        slots = whole + np.where(rest > 1e-9, other.slowest(c) / stages.slowest(c), 0.0)
    parts = {name: slots * (c.layers / c.pp) * getattr(layer, name) for name in LAYER_PARTS}
    parts |= {"head": slots * (head + embed) / c.pp, "pp_comm": slots * handover}
    pipe = pipe_s(c, coef, stages, slots)
    return _whole_step(c, coef, layer, pipe=pipe, slots=slots, parts=parts)


def pipe_s(c: Columns, coef: Coefficients, stages: StageTimes, slots: Floats) -> Floats:
    """Of all micro batches through all stages."""
    usual = pipeline_s(c, stages, slots)
    if host.is_host(coef):
        return host.crowded_s(c, coef, usual=usual, work=slots * stages.total / c.pp)
    return usual


def ends_s(c: Columns, coef: Coefficients, micro: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds of one micro batch in the head, in the embedding, and of handing it over."""
    tokens = micro * c.seq / c.cp
    head = head_s(c, coef, tokens=tokens)
    embed = embedding_s(c, tokens) + embedding_comm_s(c, coef, tokens)
    if host.is_host(coef):
        embed = host.embedding_s(c, coef, tokens)
    return head, embed, handover_s(c, coef, tokens)


def stage_times(
    c: Columns, layer_s: Floats, head: Floats, embed: Floats, handover: Floats
) -> StageTimes:
    """Seconds of one micro batch in the stages."""
    split = stage_layers(c)
    return StageTimes(
        first=split.first * layer_s + embed + handover,
        middle=split.middle * layer_s + handover,
        last=split.last * layer_s + head + handover,
        total=c.layers * layer_s + head + embed + c.pp * handover,
    )


def embedding_s(c: Columns, tokens: Floats) -> Floats:
    """Rows read, written and added to, both ways."""
    return 12.0 * tokens * c.hidden / c.hbm


def embedding_comm_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """What tensor-parallel ranks exchange at the ends of the model."""
    data = 2.0 * tokens * c.hidden
    return 2.0 * half_collective_s(c, coef, data, size=c.tp, stride=np.ones_like(c.tp))


def handover_s(c: Columns, coef: Coefficients, tokens: Floats) -> Floats:
    """Of one micro batch between stages, both ways."""
    if host.is_host(coef):
        return host.handover_s(c, coef, tokens)
    moved = 2.0 * tokens * c.hidden / c.split * np.where(c.vpp > 1, SENT_ALONE, 1.0)
    both = 2.0 * moved / p2p_rate(c, coef, c.gpus / c.pp) + coef["micro_s"]
    return np.where(c.pp > 1, c.vpp * both, 0.0)


def optimizer_s(c: Columns, *, params: Floats, weights: Floats) -> Floats:
    """Update of `params` parameters, or of all `weights` where our own kernels are counted."""
    usual = c.update_traffic * params / c.shards
    return np.where(c.own_kernels > 0, update_bytes(c, weights), usual) / c.hbm


def fixed_s(c: Columns, coef: Coefficients) -> Floats:
    """Nothing of a compiled step of torch's engines waits for its host once, whatever else happens
    between steps."""
    return coef["fixed_s"] * np.where((c.own > 0) & (c.compiled > 0), _OWN_FIXED, 1.0)


def waiting_s(
    c: Columns, coef: Coefficients, *, work: Floats, slots: Floats
) -> tuple[Floats, Floats]:
    """(waits, jitter): stages on different nodes meet at every micro batch and wait for the later
    one; everything grows with the nodes."""
    nodes = np.maximum(1.0, c.gpus / c.node)
    waits = np.where((nodes > 1) & (c.pp > 1), slots * coef["noise_s"] * np.log2(nodes), 0.0)
    return waits, (work + waits) * coef["jitter"] * np.log2(nodes)


def _ring_hops(c: Columns, size: Floats) -> Floats:
    """Of a data-parallel group, in hops across the network."""
    far = far_hops(c, size, c.tp)
    return far + NEAR_HOP * (size - 1.0 - far)


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
    ring = _ring_hops(c, size)
    up = np.log2(np.maximum(size, 1.0)) * np.where(crosses(c, size, c.tp), 1.0, NEAR_HOP)
    tree = np.where(c.slow > 0, 2.0 * ring, 2.0 * up)
    per_stage = c.layers / c.pp
    hops = np.where(whole, tree * params * c.grad_bytes / BUCKET_BYTES, ring * per_stage)
    gather = 2.0 * params * (c.shard - 1.0) / c.shard / group_rate(c, coef, c.shard, c.tp)
    turns = _ring_hops(c, c.shard) * per_stage
    hop = coef["dp_hop_s"] * np.where(c.slow > 0, coef["slow_hop"], 1.0)
    sharded = (c.zero >= 1) & (c.shard > 1)
    move = reduce + hops * hop + np.where(sharded, gather + turns * hop, 0.0)
    paid = coef["dp_exposed"] * move
    hidden = np.maximum(0.1 * paid, paid - 0.6 * window)
    paid = np.where((c.zero < 1) | (c.overlap_dp > 0), hidden, paid)
    return np.where((size > 1) & (c.zero < 3), paid, 0.0)


def last_rounds(c: Columns) -> Floats:
    """Passes of a stage from the end of its first chunk's gradients to that of its last one's: a
    round of micro batches goes through every chunk between."""
    return np.where(c.vpp > 1, 1.0 + (c.pp - 1.0) * (c.vpp - 1.0) / c.vpp, 1.0)


def first_stage_params(c: Columns) -> tuple[Floats, Floats]:
    """(its layers and the embedding: tied or not, the head's weights are as large; all weights)."""
    embed = c.vocab * c.hidden / c.tp
    params = c.layers / c.pp * c.rank_layer_weights + embed
    return params, params + np.where((c.tied < 1) & (c.pp == 1), embed, 0.0)


def end_of_step_s(c: Columns, coef: Coefficients, *, window: Floats) -> tuple[Floats, Floats]:
    """(gradients' traffic, update); `window`: seconds of a backward pass that hide traffic."""
    params, weights = first_stage_params(c)
    if host.is_host(coef):
        return host.gradient_s(c, coef, weights), host.optimizer_s(c, coef, weights)
    dp = gradient_s(c, coef, params=params, window=window)
    return dp, optimizer_s(c, params=params, weights=weights)


def _whole_step(
    c: Columns,
    coef: Coefficients,
    layer: LayerTimes,
    *,
    pipe: Floats,
    slots: Floats,
    parts: dict[str, Floats],
) -> Times:
    """Adds what happens once per step to the pipeline's seconds and their parts."""
    window = c.layers / c.pp * layer.total * last_rounds(c)
    dp, optimizer = end_of_step_s(c, coef, window=window)
    waits, jitter = waiting_s(c, coef, work=pipe + dp + optimizer, slots=slots)
    fixed = fixed_s(c, coef)
    step = pipe + dp + optimizer + waits + jitter + fixed
    once = {"dp_comm": dp, "optimizer": optimizer, "fixed": fixed, "jitter": jitter + waits}
    parts |= {name: seconds + np.zeros_like(step) for name, seconds in once.items()}
    parts["bubble"] = step - sum(parts.values())
    parts = {name: parts[name] for name in PARTS}
    return Times(step, parts, layer.launch_ratio + np.zeros_like(step))
