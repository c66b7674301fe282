"""Positions of tokens: rotary tables, ALiBi slopes, and the global position of each local token.

Everything is indexed by `positions`, the global positions of the tokens at hand, so a rank that
holds any subset of a sequence computes what one device would for those tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold.spec.model import ModelShape, RopeScaling


class Tables(NamedTuple):
    """What layers know about places: positions [S], cos and sin [S, head size], slopes [H]."""

    positions: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    slopes: Tensor | None = None


def make_tables(
    shape: ModelShape, positions_S: Tensor, heads: range, dtype: torch.dtype = torch.float32
) -> Tables:
    """Tables of the tokens at `positions_S` and of the given range of global heads. In fp32
    whatever activations are in, in fp64 for fp64: a position of 100,000 has no bf16."""
    wide = torch.promote_types(dtype, torch.float32)
    if shape.positions.kind == "rope":
        pairs = frequencies(shape, positions_S.device, wide)
        angles = positions_S.to(wide)[:, None] * pairs
        angles = torch.cat([angles, angles], dim=-1)
        return Tables(positions_S, angles.cos(), angles.sin())
    if shape.positions.kind == "alibi":
        slopes = [alibi_slope(head, shape.heads) for head in heads]
        return Tables(
            positions_S, slopes=torch.tensor(slopes, dtype=wide, device=positions_S.device)
        )
    return Tables(positions_S)


def frequencies(
    shape: ModelShape, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rotary frequencies, one per pair of channels: theta^(-2i/D), stretched if scaled."""
    size = shape.latent.rope if shape.latent else shape.head_size
    pairs = torch.arange(0, size, 2, dtype=dtype, device=device)
    plain = 1.0 / (shape.positions.theta ** (pairs / size))
    scaling = shape.positions.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are divided by the factor, short ones kept, a ramp between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = scaling.original_length * plain / (2 * math.pi)
    smooth = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (smooth + (1.0 - smooth) / scaling.factor)


def rotate(x_BHSD: Tensor, tables: Tables) -> Tensor:
    """Rotary embedding, halves paired (as in Llama's published weights), computed in fp32."""
    assert tables.cos is not None
    assert tables.sin is not None
    wide = x_BHSD if x_BHSD.dtype == torch.float64 else x_BHSD.float()
    left, right = wide.chunk(2, dim=-1)
    turned = wide * tables.cos + torch.cat([-right, left], dim=-1) * tables.sin
    return turned.to(x_BHSD.dtype)


def alibi_slope(head: int, heads: int) -> float:
    """Press et al. 2022: 2^(-8 i / n); n not a power of two fills up with slopes of 2n."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return 2.0 ** (-8.0 * (head + 1) / power)
    return 2.0 ** (-4.0 * (2 * (head - power) + 1) / power)


def alibi_bias(slopes_H: Tensor, query_S: Tensor, key_T: Tensor) -> Tensor:
    """[H, S, T]: minus slope times distance where a query may look, -inf where it may not."""
    distance = (key_T[None, :] - query_S[:, None]).to(slopes_H.dtype)
    bias = slopes_H[:, None, None] * distance
    return bias.masked_fill((distance > 0)[None], float("-inf"))
