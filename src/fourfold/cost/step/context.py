"""What does context parallelism cost in traffic? Exposed seconds of one layer and micro batch.

Ring (Liu et al., arXiv 2310.01889): c - 1 hops of keys and values, hidden behind attention.
All-gather (Llama 3, arXiv 2407.21783): keys and values gathered once, in the open.
Ulysses (Jacobs et al., arXiv 2309.14509): all-to-all of q, k, v and the output. Broadcasts.
"""

from __future__ import annotations

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.step.gemm import Coefficients, Floats
from fourfold.cost.step.traffic import group_rate, hop_s
from fourfold.spec.words import CP_KINDS

_ALLGATHER = CP_KINDS.index("allgather")
_ULYSSES = CP_KINDS.index("ulysses")


# Of a ring's hops this much is always paid, and that share of attention hides the rest.
RING_EXPOSED, RING_HIDES = 0.3, 0.7


def context_s(
    c: Columns, coef: Coefficients, *, tokens: Floats, attention: Floats, backward: bool
) -> Floats:
    """`attention`: seconds of the layer's attention, under which a ring hides its hops."""
    rate = group_rate(c, coef, c.cp, c.tp)
    hop = hop_s(c, coef, c.cp, c.tp)
    keys = 4.0 * tokens * c.kv_width / c.tp  # k and v of this rank
    ways = 2.0 if backward else 1.0  # backward sends keys and values, and their gradients
    ring = (c.cp - 1.0) * (ways * keys / rate + 4.0 * hop)
    ring = RING_EXPOSED * ring + np.maximum(0.0, ring - RING_HIDES * attention)
    gather = ways * (c.cp - 1.0) * (keys / rate + hop)
    shares = (c.cp - 1.0) / c.cp
    exchanged = (keys + 4.0 * tokens * c.width / c.tp) * shares  # k, v and q, output
    ulysses = exchanged / rate + 4.0 * coef["call_s"]
    paid = np.where(c.cp_kind == _ALLGATHER, gather, ring)
    paid = np.where(c.cp_kind == _ULYSSES, ulysses, paid)
    return np.where(c.cp > 1, paid, 0.0)
