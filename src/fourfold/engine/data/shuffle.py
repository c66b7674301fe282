"""In which order are things visited? A permutation of 0 .. size - 1 from a key, index by index.

A Feistel network over the smallest even number of bits that holds `size`, walked until the result
is inside: no table, so no memory that grows with the data, and any index alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.engine.data import rng

# Four rounds of a good round function give a pseudo-random permutation (Luby and Rackoff 1988).
_ROUNDS = 4


def shuffled(index: Tensor, size: int, stream: int) -> Tensor:
    """Where each index (int64, in [0, size)) comes to stand; `stream` names the permutation."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    place = _network(index, half, stream)
    # The network permutes 2^(2 half) numbers, at most 4 x size: following a cycle from inside the
    # range comes back inside, after a few turns.
    outside = place >= size
    while bool(outside.any()):
        place = torch.where(outside, _network(place, half, stream), place)
        outside = place >= size
    return place


def _network(index: Tensor, half: int, stream: int) -> Tensor:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for turn in range(_ROUNDS):
        mixed = rng.bits(rng.key(stream, turn), right) & mask
        left, right = right, left ^ mixed
    return (left << half) | right
