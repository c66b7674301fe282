"""Attention of some queries to some keys, with the logsumexp by which such blocks are joined.

B batch, H query heads, K key/value heads, S queries, T keys, C head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.engine.compat import flash_backward, flash_forward


@dataclass(frozen=True, slots=True)
class Span:
    """Queries [q0, q1) look at keys [k0, k1): all of them, or causally along the diagonal."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


def cut(x_BHSC: Tensor, span: tuple[int, int]) -> Tensor:
    return x_BHSC[:, :, span[0] : span[1]]


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    if bias is not None:
        return False
    fits = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0
    return q.device.type == "cpu" or (q.device.type == "cuda" and fits)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out [B,H,S,C], logsumexp [B,H,S])."""
    if _is_flash(q, bias):
        return flash_forward(q, k, v, causal=causal)
    scores = _scores(q, k, causal=causal, bias=bias)
    lse = scores.logsumexp(dim=-1)
    shares = (scores - lse[..., None]).exp()
    out = shares @ v.to(shares.dtype)[:, :, None]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block, where `out` and `lse` are those of all blocks joined."""
    q, k, v = inputs
    if _is_flash(q, bias):
        return flash_backward(grad, inputs, out, lse, causal=causal)
    wide, heads = _wide(q), k.shape[1]
    shares = _scores(q, k, causal=causal, bias=bias) - lse.unflatten(1, (heads, -1))[..., None]
    shares = shares.exp()
    grad_, out_ = _grouped(grad, heads, wide), _grouped(out, heads, wide)
    dv = (shares.transpose(-1, -2) @ grad_).sum(dim=2)
    delta = (grad_ * out_).sum(dim=-1, keepdim=True)
    dscores = shares * (grad_ @ v.to(wide)[:, :, None].transpose(-1, -2) - delta)
    dscores = dscores * q.shape[-1] ** -0.5
    dq = (dscores @ k.to(wide)[:, :, None]).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ _grouped(q, heads, wide)).sum(dim=2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _grouped(x_BHSC: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    return x_BHSC.unflatten(1, (kv_heads, -1)).to(dtype)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, *, causal: bool, bias: Tensor | None) -> Tensor:
    """[B, K, H/K, S, T]; the bias, where there is one, holds the causal mask too."""
    wide = _wide(q)
    grouped = _grouped(q, k.shape[1], wide)
    scores = (grouped @ k.to(wide)[:, :, None].transpose(-1, -2)) * q.shape[-1] ** -0.5
    if bias is not None:
        return scores + bias.to(wide).unflatten(0, (k.shape[1], -1))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


class JoinedBlocks:
    """Blocks of the same queries, joined by their logsumexp in fp32 (fp64 for fp64)."""

    def __init__(self, q: Tensor) -> None:
        wide = _wide(q)
        self.out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, span: Span, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the block of a span; (out, logsumexp) of it alone."""
        queries, keys = span.queries, span.keys
        out, lse = forward(
            cut(q, queries), cut(k, keys), cut(v, keys), causal=span.causal, bias=bias
        )
        old_out, old_lse = cut(self.out, queries), cut(self.lse, queries)
        new_lse = torch.logaddexp(old_lse, lse)
        keep, take = (old_lse - new_lse).exp(), (lse - new_lse).exp()
        old_out.mul_(keep[..., None]).add_(out * take[..., None])
        old_lse.copy_(new_lse)
        return out, lse


class BlockGradients:
    """Gradients of queries, keys and values, added up block by block in fp32 (fp64 for fp64)."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.grad, self.q, self.out, self.lse = grad, q, out, lse
        self.dq = torch.zeros_like(q, dtype=_wide(q))

    def add(self, k: Tensor, v: Tensor, span: Span, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of one span, (dk, dv) of its keys alone."""
        grad, q, out, lse = (cut(x, span.queries) for x in (self.grad, self.q, self.out, self.lse))
        inputs = (q, cut(k, span.keys), cut(v, span.keys))
        dq, dk, dv = backward(grad, inputs, out, lse, causal=span.causal, bias=bias)
        cut(self.dq, span.queries).add_(dq)
        return dk, dv
