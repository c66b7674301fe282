"""Latent attention (MLA) as it trains: keys and values of all heads from a few numbers a token.

Shapes as in layers.py; N channels without positions, P with them. Tensor parallelism cuts heads;
the ways down to the latents stay whole on every rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.engine.model.layers import Core, Linear, Norm
from fourfold.engine.model.positions import Tables, rotate
from fourfold.spec.experts import Latent
from fourfold.spec.model import ModelShape


class LatentAttention(nn.Module):
    """`heads` are those at hand."""

    q_down: Linear | None
    q_norm: Norm

    def __init__(self, shape: ModelShape, latent: Latent) -> None:
        super().__init__()
        self.heads = self.kv_heads = shape.heads
        self.latent = latent
        self.input_comm: nn.Module = nn.Identity()
        hidden, q_from = shape.hidden, latent.q_rank or shape.hidden
        self.q_down = None
        if latent.q_rank:
            self.q_down = Linear(hidden, (("q_down", latent.q_rank),), bias=False)
            self.q_norm = Norm(shape, latent.q_rank)
        self.q = Linear(q_from, (("q", shape.attention_width),), bias=False)
        down = latent.kv_rank + latent.rope
        self.kv_down = Linear(hidden, (("kv_down", down),), bias=False)
        self.kv_norm = Norm(shape, latent.kv_rank)
        both = shape.heads * (latent.nope + latent.v)
        self.kv = Linear(latent.kv_rank, (("kv", both),), bias=False)
        self.core: nn.Module = Core()
        self.out = Linear(shape.value_width, (("out", hidden),), bias=False)

    def forward(self, x_BSD: Tensor, tables: Tables) -> Tensor:
        x_BSD, latent = self.input_comm(x_BSD), self.latent
        q = self.q(x_BSD if self.q_down is None else self.q_norm(self.q_down(x_BSD)))
        narrow, turning = self.kv_down(x_BSD).split([latent.kv_rank, latent.rope], dim=-1)
        kv = self._heads(self.kv(self.kv_norm(narrow)))
        q_still, q_turning = self._heads(q).split([latent.nope, latent.rope], dim=-1)
        k_still, v = kv.split([latent.nope, latent.v], dim=-1)
        k_turning = _turned(turning[:, :, None], tables).expand(-1, -1, self.heads, -1)
        # Tokens before heads in memory: what attention makes need not be copied for `out`.
        q = torch.cat([q_still, _turned(q_turning, tables)], dim=-1)
        k = torch.cat([k_still, k_turning], dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = self._attend(q, k, v, tables)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        """Context parallelism's cores want keys and values of one size."""
        lacking = q.shape[-1] - v.shape[-1]
        if isinstance(self.core, Core) or lacking <= 0:
            return self.core(q, k, v, tables)
        return self.core(q, k, F.pad(v, (0, lacking)), tables)[..., : v.shape[-1]]

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))


def _turned(x_BSHP: Tensor, tables: Tables) -> Tensor:
    """Adjacent channels are a pair, as in DeepSeek's published weights."""
    halves = x_BSHP.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(halves.transpose(1, 2), tables).transpose(1, 2)
