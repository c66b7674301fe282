"""Do blocks of attention, joined, have the gradients of whole attention? Also where a kernel reads
its inputs without a look at their strides, as flash attention on CUDA reads the logsumexp.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine import compat
from fourfold.engine.parallel import blocks
from fourfold.engine.parallel.context import _Spans, spans_of

_BATCH, _HEADS, _KV_HEADS, _TOKENS, _SIZE = 2, 4, 2, 64, 16


def inputs(device: str) -> list[Tensor]:
    """Queries, keys, values, gradient of the output; fp64."""
    chance = torch.Generator().manual_seed(0)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
    shapes = [(_BATCH, count, _TOKENS, _SIZE) for count in heads]
    made = [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes]
    return [one.to(device) for one in made]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return tuple(torch.autograd.grad(out, leaves, grad))


def zigzag(x: Tensor, rank: int, ranks: int) -> Tensor:
    parts = x.chunk(2 * ranks, dim=2)
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], dim=2)


def far(have: Tensor, want: Tensor) -> float:
    return float((have.double() - want).abs().max() / want.abs().max())


def worst_gradient(ranks: int, dtype: torch.dtype, device: str) -> float:
    """Every rank's queries against all keys, as `allgather` computes them; no ranks needed."""
    q, k, v, grad = inputs(device)
    want = whole(q, k, v, grad)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    gaps = []
    for rank in range(ranks):
        mine = [x.to(dtype).requires_grad_() for x in (zigzag(q, rank, ranks), k, v)]
        group: Any = SimpleNamespace(rank=rank, size=ranks)
        spans = spans_of(group, _TOKENS // (2 * ranks))
        out = _Spans.apply(*mine, spans, (None,) * len(spans))
        found = torch.autograd.grad(out, mine, zigzag(grad, rank, ranks).to(dtype))
        gaps.append(far(found[0], zigzag(want[0], rank, ranks)))
        dk, dv = dk + found[1], dv + found[2]
    return max(*gaps, far(dk, want[1]), far(dv, want[2]))


class StrideBlind:
    """CUDA's flash operators as they are called, on CPU: the logsumexp is read from its first
    element on as if it were contiguous."""

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool
    ) -> tuple[Tensor, ...]:
        scores = blocks._scores(q, k, causal=causal, bias=None)
        lse = scores.logsumexp(dim=-1)
        out = (scores - lse[..., None]).exp() @ v[:, :, None]
        return out.flatten(1, 2), lse.flatten(1, 2)

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *more: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        blind = torch.as_strided(lse, lse.shape, torch.empty(lse.shape).stride())
        bias = q.new_zeros(q.shape[1], q.shape[2], k.shape[2])  # with one, no kernel is called
        if more[5]:
            bias = bias.masked_fill(torch.ones_like(bias).triu(1) > 0, -torch.inf)
        return blocks.backward(grad, (q, k, v), out, blind, causal=False, bias=bias)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kernel_that_ignores_strides_gets_a_contiguous_logsumexp(monkeypatch, ranks):
    monkeypatch.setattr(compat, "_on_host", lambda q: False)
    monkeypatch.setattr(compat, "_aten", StrideBlind())
    assert worst_gradient(ranks, torch.float64, "cpu") < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_joined_blocks_have_the_gradients_of_whole_attention(ranks):
    assert worst_gradient(ranks, torch.float64, "cpu") < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)],
)
def test_joined_blocks_have_the_gradients_of_whole_attention_on_a_gpu(dtype, limit):
    assert worst_gradient(2, dtype, "cuda") < limit
