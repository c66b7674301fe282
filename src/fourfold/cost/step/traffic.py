"""Rates of groups of ranks, seconds of their exchanges, and a host's time to launch a layer. A rank
sends (n-1)/n of a buffer per half of a collective, as in NCCL; tp is innermost, then cp, dp, pp.

Seconds of tokens on their way to experts of other ranks, by the dispatcher's kind: bytes inside
an NVLink domain and between domains, on links that work at the same time, and what a call takes
however little it sends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fourfold.cost import dispatch
from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.kinds import KINDS
from fourfold.cost.ops.op import Op
from fourfold.spec.words import CP_KINDS

# Of an exchange: its start, and for each rank of the group inside a domain and outside of it
# (Primus' projection of all-to-all times).
START_S, NEAR_S, FAR_S = 5e-5, 2.5e-6, 0.45e-6


def copies(c: Columns) -> tuple[Floats, Floats]:
    """(inside its domain, to others) of a token, sent by a rank. Once for each chosen expert; or
    once to each domain and, there, to each rank that has any of them."""
    beside = ranks_within(c.ep, c.etp, c.domain)
    domains = np.ceil(c.ep / beside)
    near, far = c.top_k * (beside - 1.0) / c.ep, c.top_k * (c.ep - beside) / c.ep
    once = dispatch.is_kind(c.dispatcher, "node") & (c.ep > 1)
    if np.any(once):
        few = dispatch.parts_met(domains, c.experts, c.top_k) * (domains - 1.0) / domains
        each = dispatch.parts_met(c.ep, c.experts, c.top_k) * (beside - 1.0) / beside
        near, far = np.where(once, each, near), np.where(once, few, far)
    return near, far


def sent_copies(c: Columns) -> Floats:
    """Of a token, that leave a rank; of a gather all tokens of the group."""
    return np.where(dispatch.is_kind(c.dispatcher, "all"), c.ep, sum(copies(c)))


def tokens_s(c: Columns, coef: Coefficients, data: Floats) -> Floats:
    """Of tokens with `data` bytes, one way. The fullest rank receives the most."""
    stride, size = c.etp, c.ep
    near, far = copies(c)
    beside = ranks_within(size, stride, c.domain)
    inside = link_rate(c, coef, size, stride)
    outside = node_rate(c, coef, size, beside) / c.node
    moved = np.maximum(near * data / inside, far * data / outside) * c.fullest
    moved = moved / (coef["exchange"] * dispatch.fact(c.dispatcher, "rate"))
    start = START_S + NEAR_S * (beside - 1.0) + FAR_S * (size - beside)
    took = moved + dispatch.fact(c.dispatcher, "calls") * start
    everybody = dispatch.is_kind(c.dispatcher, "all")
    if np.any(everybody):
        ring = half_collective_s(c, coef, data * size, size=size, stride=stride)
        took = np.where(everybody, ring + np.where(crosses(c, size, stride), START_S, 0.0), took)
    known = dispatch.fact(c.overlap, "paid", dispatch.OVERLAPS)
    paid = np.where(known > 0, known, coef["exchange_hidden"])
    took = took * np.where(c.hides_exchange > 0, paid, 1.0)
    return np.where(size > 1, took, 0.0)


# All-reduces over 4 to 64 healthy nodes reach this share of the data sheet (nanotron table).
SLOW_SHARE = 0.45
SWITCHLESS = 4.0
USUAL_NET = 0.65  # of the data sheet, by a collective: `net` where nobody measured
HEALTHY = 1.0 / 3.0  # of the data sheet: a measured rate below holds between two nodes, too
PAIR = 2.0
BUCKET_BYTES = 100e6  # gradient reducers use 25 to 400 MB; this explains nanotron best
GRAPHED = 0.5  # of the launches of a layer with experts, where its router and attention are graphs
# Launches beyond those of a layer with plain attention and routed experts on whole ranks: of latent
# attention (queries, keys and values each from two products, a norm between), of shared experts, of
# a tensor group's collectives. At one sequence a micro batch a layer of Kimi-K2 takes 21 to 26 ms
# on hosts that launch one of Qwen3-235B in 11 to 15 (AWS, B300); Megatron's tests of tiny models
# take a sixth less for tp 1.
LATENT, SHARED, TENSOR = 0.5, 0.3, 0.2
# ... and of casts for products in fewer bits: layouts of Megatron-Bridge that are left out are
# predicted best so (of 0, 0.2 and 0.35).
CASTS = 0.2
NEAR_HOP = 0.2  # a hop over NVLink against one over the network


def ranks_within(size: ArrayLike, stride: ArrayLike, box: ArrayLike) -> Floats:
    """Members of a group of `size` ranks, `stride` apart, that share one box of `box` ranks."""
    return np.maximum(1.0, np.minimum(size, np.floor(np.divide(box, stride))))


def crosses(c: Columns, size: Floats, stride: Floats) -> np.ndarray:
    """True where the group, or the worst of its like, leaves its NVLink domain."""
    return (size > ranks_within(size, stride, c.domain)) | straddles(c, size, stride, c.domain)


def straddles(c: Columns, size: Floats, stride: Floats, box: Floats) -> np.ndarray:
    """True where groups that would fit into a box do not tile it: tp 3 on hosts of 8 puts ranks 6,
    7 and 8 into one group, and a step waits for the slowest group. Of a rack of 72 a job takes as
    many hosts as its groups fill (64 for groups of 32)."""
    span = size * stride
    racks = box > c.node
    return (size > 1) & (c.gpus > box) & (span <= box) & (np.mod(box, span) != 0) & ~racks


def together(c: Columns, size: Floats, stride: Floats, box: Floats) -> Floats:
    """Members that surely share a box with one: none but itself where groups do not tile it."""
    return np.where(straddles(c, size, stride, box), 1.0, ranks_within(size, stride, box))


def link_rate(c: Columns, coef: Coefficients, size: ArrayLike, stride: ArrayLike) -> Floats:
    """One-way bytes/s of a GPU to its group inside an NVLink domain."""
    return np.minimum(coef["nvlink"], 0.98) * c.link * wired_share(c, size, stride)


def wired_share(c: Columns, size: ArrayLike, stride: ArrayLike) -> Floats:
    """Share of a GPU's links that lead into its group.

    Boards of up to 4 GPUs have no switch: each pair owns an equal part of the links (HGX H100 and
    A100 4-GPU), so a pair of a board of 4 talks at a third of the rate.
    """
    peers = ranks_within(size, stride, c.domain) - 1.0
    direct = (c.domain <= SWITCHLESS) & (c.domain > 1)
    share = np.maximum(1.0, peers) / np.maximum(1.0, c.domain - 1.0)
    return np.where(direct, share, 1.0)


def ring_share(c: Columns, size: ArrayLike, stride: ArrayLike) -> Floats:
    """Of the rate of a long ring behind a switch: two ranks reach 0.71 to 0.77 of what eight do,
    four 0.91 to 0.95 (gathers and scatters of 512 MB by NCCL on A100 to GB300, aiconfigurator's
    public tables): 1 - 1 / n^2."""
    ranks = np.maximum(2.0, ranks_within(size, stride, c.domain))
    return np.where(c.domain > SWITCHLESS, 1.0 - ranks**-2.0, 1.0)


def group_rate(c: Columns, coef: Coefficients, size: Floats, stride: Floats) -> Floats:
    """One-way bytes/s of each rank in a ring over the group."""
    inside = link_rate(c, coef, size, stride)
    inside = inside * ring_share(c, size, stride)
    in_node = together(c, size, stride, c.node)
    outside = node_rate(c, coef, size, in_node) * in_node / c.node
    return np.where(crosses(c, size, stride), np.minimum(inside, outside), inside)


def node_rate(c: Columns, coef: Coefficients, size: Floats, in_node: Floats) -> Floats:
    """Bytes/s of a node for a group that has `in_node` members in it.

    A rate measured over the whole job is believed: a collective reaches it where it reaches the
    usual share of a data sheet. Two nodes exchange at full rate on a healthy fabric (nanotron
    table: 430 GB/s on 2 nodes, 180 on 4 to 64), not on one far below its data sheet. In the slow
    state the rate falls as one over the nodes, which is what a slow hop does to a ring, not a slow
    link; the hops are paid in `dp_hop_s`.
    """
    spans = np.maximum(1.0, size / in_node)
    healthy = (spans <= 2.0) & (c.net_seen > HEALTHY * c.net)
    seen = np.where(healthy, np.maximum(c.net_seen, c.net), c.net_seen) / USUAL_NET
    unseen = np.where(c.slow > 0, c.net * SLOW_SHARE, c.net)
    return np.where((c.net_seen > 0) & (c.slow <= 0), seen, unseen) * coef["net"]


def p2p_rate(c: Columns, coef: Coefficients, stride: Floats) -> Floats:
    """Bytes/s of one rank sending to the next pipeline stage; all ranks of a node send at once."""
    inside = link_rate(c, coef, PAIR, stride)
    share = node_rate(c, coef, 2.0 * np.ones_like(c.net), np.ones_like(c.net)) / c.node
    return np.where(stride >= c.domain, share, inside)


def half_collective_s(
    c: Columns, coef: Coefficients, data: Floats, *, size: Floats, stride: Floats
) -> Floats:
    """Seconds of an all-gather or reduce-scatter of `data` bytes over the group."""
    if not np.any(size > 1):
        return np.zeros(())
    move = data * (size - 1.0) / size / group_rate(c, coef, size, stride)
    return np.where(size > 1, move + (size - 1.0) * hop_s(c, coef, size, stride), 0.0)


def exchange_s(
    c: Columns, coef: Coefficients, sent: Floats, *, size: Floats, stride: Floats
) -> Floats:
    """Seconds of an all-to-all in which a rank sends `sent` bytes, as many to each other member.

    Unlike in a ring, all ranks of a host send to other hosts at once: each has its share of the
    host's network. Links of both levels work at the same time.
    """
    beside = together(c, size, stride, c.domain)
    near = (beside - 1.0) / np.maximum(1.0, size - 1.0)
    inside = link_rate(c, coef, size, stride)
    outside = node_rate(c, coef, size, beside) / c.node
    return np.maximum(sent * near / inside, sent * (1.0 - near) / outside)


def far_hops(c: Columns, size: Floats, stride: Floats) -> Floats:
    """Hops of a ring over the group that leave an NVLink domain: one for each domain but one."""
    return np.ceil(size / together(c, size, stride, c.domain)) - 1.0


def ring_s(c: Columns, coef: Coefficients, size: Floats, stride: Floats) -> Floats:
    """Latency of one pass around a large ring: most of its hops stay inside a domain."""
    far = far_hops(c, size, stride)
    return far * coef["net_latency_s"] + (size - 1.0 - far) * coef["latency_s"]


def hop_s(c: Columns, coef: Coefficients, size: Floats, stride: Floats) -> Floats:
    """Latency of one step of a ring; a ring that leaves the domain runs at its slowest hop."""
    return np.where(crosses(c, size, stride), coef["net_latency_s"], coef["latency_s"])


_ALLGATHER = CP_KINDS.index("allgather")
_ULYSSES = CP_KINDS.index("ulysses")


# Of a ring's hops this much is always paid, and that share of attention hides the rest.
RING_EXPOSED, RING_HIDES = 0.3, 0.7


def context_s(
    c: Columns, coef: Coefficients, data: Floats, halves: Floats, *, attention: Floats
) -> Floats:
    """Of `data` bytes that a rank has in the end, received as often as `halves`; `attention`:
    seconds of the layer's attention, under which a ring hides its hops."""
    rate = group_rate(c, coef, c.cp, c.tp)
    hops_s = (c.cp - 1.0) * hop_s(c, coef, c.cp, c.tp)
    sent = data * (c.cp - 1.0) / c.cp
    ring = halves * sent / rate + 4.0 * hops_s
    ring = RING_EXPOSED * ring + np.maximum(0.0, ring - RING_HIDES * attention)
    gather = halves * (sent / rate + hops_s)
    ulysses = exchange_s(c, coef, sent, size=c.cp, stride=c.tp) + 4.0 * coef["call_s"]
    paid = np.where(c.cp_kind == _ALLGATHER, gather, ring)
    paid = np.where(c.cp_kind == _ULYSSES, ulysses, paid)
    return np.where(c.cp > 1, paid, 0.0)


def _ring_hops(c: Columns, size: Floats, apart: Floats) -> Floats:
    """Of a data-parallel group, in hops across the network."""
    far = far_hops(c, size, apart)
    return far + NEAR_HOP * (size - 1.0 - far)


def gradient_s(c: Columns, coef: Coefficients, reduce: Op, gather: Op, *, window: Floats) -> Floats:
    """Exposed seconds of the gradient reduction (and ZeRO-1's weight gather) of a step; `window`:
    seconds of backward under which an overlapping engine hides it."""
    kind = KINDS[reduce.axis.removeprefix("dp")]
    size, shards, apart = kind.copies(c), kind.shards(c), kind.cut(c)
    # An all-reduce goes up a tree, bucket by bucket, but around a ring when the fabric is in its
    # slow state; ZeRO scatters and gathers layer by layer around rings.
    ring, turns = _ring_hops(c, size, apart), _ring_hops(c, shards, apart)
    up = np.log2(np.maximum(size, 1.0)) * np.where(crosses(c, size, apart), 1.0, NEAR_HOP)
    tree = np.where(c.slow > 0, 2.0 * ring, 2.0 * up)
    per_stage = c.layers / c.pp
    hops = np.where(reduce.halves > 1, tree * reduce.bytes / BUCKET_BYTES, ring * per_stage)
    hop = coef["dp_hop_s"] * np.where(c.slow > 0, coef["slow_hop"], 1.0)
    moved = reduce.halves * reduce.bytes * (size - 1.0) / size / group_rate(c, coef, size, apart)
    back = gather.bytes * (shards - 1.0) / shards / group_rate(c, coef, shards, apart)
    back = np.where(gather.times > 0, back + turns * per_stage * hop, 0.0)
    once = coef["dp_exposed"] * (moved + hops * hop)
    paid = once + coef["dp_exposed"] * back
    paid = np.where((c.zero < 1) | (c.overlap_dp > 0), _beside(paid, window), paid)
    # What ZeRO-2 scatters of earlier micro batches goes layer by layer, in any engine.
    paid = paid + np.maximum(0.0, reduce.times - 1.0) * _beside(once, window)
    return np.where(reduce.times > 0, paid, 0.0)


def _beside(traffic: Floats, window: Floats) -> Floats:
    """What is left to pay of gradients' traffic beside a backward pass of so many seconds."""
    return np.maximum(0.1 * traffic, traffic - 0.6 * window)


def host_layer_s(c: Columns, coef: Coefficients) -> Floats:
    """Launch time of one layer, forward and backward."""
    slow = c.slow > 0
    launch = coef["host_s"] * np.where(slow, coef["slow_host"], 1.0)
    if np.any(c.experts > 0):  # routing and exchange are many small kernels, some of them awaited
        # Experts that drop what is above a capacity have as many rows in every step: none to read.
        waits = (dispatch.fact(c.dispatcher, "waits") > 0) & (c.dropped_above == 0)
        fewer = (c.graphed > 0) & ~waits
        kind = dispatch.fact(c.dispatcher, "host") * np.where(fewer, GRAPHED, 1.0)
        more = LATENT * (c.latent > 0) + SHARED * (c.shared_ffn > 0) + TENSOR * (c.tp > 1)
        more = more + CASTS * (c.peak_low > c.peak)
        launch = (1.0 - c.routed) * launch + c.routed * coef["moe_host_s"] * kind * (1.0 + more)
    launch = launch * np.select([c.fused_host > 1, c.fused_host > 0], [0.0, 0.5], 1.0)
    launch = launch * (1.0 + c.full_ckpt / 3.0) * (1.0 + 0.15 * (c.cp - 1.0))
    far = np.where(crosses(c, c.tp, np.ones_like(c.tp)), coef["slow_far"], 1.0)
    return launch + np.where(slow, (c.tp - 1.0) * coef["slow_tp_s"] * far, 0.0)


def floor(busy: Floats, launch: Floats) -> Floats:
    """Smooth maximum of GPU time and host time (12-norm); of a stage without layers 0."""
    top = np.maximum(busy, launch)
    square = (np.minimum(busy, launch) / np.maximum(top, np.finfo(float).tiny)) ** 2
    return top * (1.0 + (square * square * square) ** 2) ** (1.0 / 12.0)


def floor_slopes(busy: Floats, launch: Floats) -> tuple[Floats, Floats]:
    """Derivatives of `floor`."""
    both = floor(busy, launch)
    return (busy / both) ** 11, (launch / both) ** 11
