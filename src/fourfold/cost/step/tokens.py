"""Seconds of tokens on their way to experts of other ranks, by the dispatcher's kind: bytes inside
an NVLink domain and between domains, on links that work at the same time, and what a call takes
however little it sends."""

from __future__ import annotations

import numpy as np

from fourfold.cost import dispatch
from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.step.traffic import (
    crosses,
    half_collective_s,
    node_rate,
    ranks_within,
    wired_share,
)

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


def tokens_s(c: Columns, coef: Coefficients, data: Floats) -> Floats:
    """Of tokens with `data` bytes, one way. The fullest rank receives the most."""
    stride, size = c.etp, c.ep
    near, far = copies(c)
    beside = ranks_within(size, stride, c.domain)
    inside = np.minimum(coef["nvlink"], 0.98) * c.link * wired_share(c, size, stride)
    outside = node_rate(c, coef, size, beside) / c.node
    moved = np.maximum(near * data / inside, far * data / outside) * c.fullest
    moved = moved / (coef["exchange"] * dispatch.fact(c.dispatcher, "rate"))
    start = START_S + NEAR_S * (beside - 1.0) + FAR_S * (size - beside)
    took = moved + dispatch.fact(c.dispatcher, "calls") * start
    everybody = dispatch.is_kind(c.dispatcher, "all")
    if np.any(everybody):
        ring = half_collective_s(c, coef, data * size, size=size, stride=stride)
        took = np.where(everybody, ring + np.where(crosses(c, size, stride), START_S, 0.0), took)
    took = took * np.where(c.hides_exchange > 0, coef["exchange_hidden"], 1.0)
    return np.where(size > 1, took, 0.0)
