"""Random values and orders as functions of a key and an index: any rank can make any part alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = 2**64 - 1
# splitmix64 (Steele, Lea, Flood 2014): the odd constant of its counter, two of its finaliser.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Four uniform 16-bit numbers add up to a nearly normal one: mean 4 (2^16 - 1) / 2, variance
# 4 (2^32 - 1) / 12. Its tails end at 3.46 standard deviations.
_MEAN = 2 * (2**16 - 1)
_SIGMA = ((2**32 - 1) / 3) ** 0.5


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def key(seed: int, *names: object) -> int:
    """A 64-bit key from a seed and any names; stable across runs, machines and Python versions."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift; torch shifts signed numbers arithmetically."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def bits(stream: int, index: Tensor) -> Tensor:
    """64 random bits for each index. Integer arithmetic only, so that CPU and GPU agree."""
    state = index * _signed(_GOLDEN) + _signed(stream)
    state = (state ^ _shift(state, 30)) * _signed(_MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(_MIX_2)
    return state ^ _shift(state, 31)


def below(stream: int, index: Tensor, bound: int) -> Tensor:
    """A whole number in [0, bound) for each index."""
    return _shift(bits(stream, index), 1) % bound


def normal(stream: int, index: Tensor, std: float) -> Tensor:
    """A nearly normal fp32 value for each index: an exact integer, then one multiplication."""
    word = bits(stream, index)
    field = (1 << 16) - 1
    total = (word & field) + (_shift(word, 16) & field) + (_shift(word, 32) & field)
    total = total + (_shift(word, 48) & field) - _MEAN
    return total.to(torch.float32) * (std / _SIGMA)


# Four rounds of a good round function give a pseudo-random permutation (Luby and Rackoff 1988).
_ROUNDS = 4


def shuffled(index: Tensor, size: int, stream: int) -> Tensor:
    """Where each index (int64, in [0, size)) comes to stand; `stream` names the permutation. A
    Feistel network, walked until the result is inside: no table that grows with the data."""
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
        mixed = bits(key(stream, turn), right) & mask
        left, right = right, left ^ mixed
    return (left << half) | right
