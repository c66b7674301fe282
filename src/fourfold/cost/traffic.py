"""How fast do the ranks of a group talk? Bytes/s and seconds by link level.

Ring and tree collectives as in NCCL: a rank sends (n-1)/n of the buffer per half (reduce-scatter
or all-gather). A level has a rate and a latency; groups that share a node share its network.
Ranks are placed tp innermost, then cp, dp, pp. Broadcasts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fourfold.cost.columns import Columns
from fourfold.cost.gemm import Floats, Knobs


def ranks_within(size: ArrayLike, stride: ArrayLike, box: ArrayLike) -> Floats:
    """Members of a group of `size` ranks, `stride` apart, that share one box of `box` ranks."""
    return np.maximum(1.0, np.minimum(size, np.floor(np.divide(box, stride))))


def crosses(c: Columns, size: Floats, stride: Floats) -> np.ndarray:
    """True where the group, or the worst of its like, leaves its NVLink domain."""
    return (size > ranks_within(size, stride, c.domain)) | straddles(c, size, stride, c.domain)


def straddles(c: Columns, size: Floats, stride: Floats, box: Floats) -> np.ndarray:
    """True where groups that would fit into a box do not tile it: tp 3 on hosts of 8 puts ranks 6,
    7 and 8 into one group, and a step waits for the slowest group. Of a domain of 72 a job takes
    equal shares: 128 GPUs are 64 in each of two."""
    span = size * stride
    used = c.gpus / np.ceil(c.gpus / box)
    return (size > 1) & (c.gpus > box) & (span <= used) & (np.mod(used, span) != 0)


def group_rate(c: Columns, knobs: Knobs, size: Floats, stride: Floats) -> Floats:
    """One-way bytes/s of each rank in a ring over the group."""
    inside = np.minimum(knobs["nvlink"], 0.98) * c.link
    here = np.where(straddles(c, size, stride, c.node), 1.0, ranks_within(size, stride, c.node))
    outside = node_rate(c, knobs, size, here) * here / c.node
    return np.where(crosses(c, size, stride), np.minimum(inside, outside), inside)


def node_rate(c: Columns, knobs: Knobs, size: Floats, here: Floats) -> Floats:
    """Bytes/s of a node for a group that has `here` members in it.

    A rate measured over the whole job is used where there is one. In the slow state it falls with
    the number of nodes spanned, so a smaller group gets back what it does not span. Two nodes
    exchange at full rate in either state (nanotron table: 430 GB/s on 2 nodes, 180 on 4 to 64).
    """
    spans = np.maximum(1.0, size / here)
    nodes = np.maximum(1.0, c.gpus / c.node)
    regained = np.minimum(c.net_seen * nodes / spans, c.net)
    seen = np.where(c.slow > 0, regained, c.net_seen)
    seen = np.where(spans <= 2.0, np.maximum(seen, c.net), seen)
    return np.where(c.net_seen > 0, seen, c.net) * knobs["net"]


def p2p_rate(c: Columns, knobs: Knobs, stride: Floats) -> Floats:
    """Bytes/s of one rank sending to the next pipeline stage; all ranks of a node send at once."""
    inside = np.minimum(knobs["nvlink"], 0.98) * c.link
    share = node_rate(c, knobs, 2.0 * np.ones_like(c.net), np.ones_like(c.net)) / c.node
    return np.where(stride >= c.domain, share, inside)


def half_collective_s(
    c: Columns, knobs: Knobs, data: Floats, *, size: Floats, stride: Floats
) -> Floats:
    """Seconds of an all-gather or reduce-scatter of `data` bytes over the group."""
    move = data * (size - 1.0) / size / group_rate(c, knobs, size, stride)
    return np.where(size > 1, move + (size - 1.0) * hop_s(c, knobs, size, stride), 0.0)


def hop_s(c: Columns, knobs: Knobs, size: Floats, stride: Floats) -> Floats:
    """Latency of one step of a ring; a ring that leaves the domain runs at its slowest hop."""
    return np.where(crosses(c, size, stride), knobs["net_latency_s"], knobs["latency_s"])
