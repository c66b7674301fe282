"""Are experts by few passes over memory what a loop over experts computes, gradients included?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.model.grouped import grouped_experts
from fourfold.engine.model.router import best_experts, router_product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: the kernels are Triton's"))]  # fmt: skip


def loop(x: Tensor, scores: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=-1)
        rows = (F.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, rows * scores[token, choice][:, None])
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(37, 8, 2), (130, 16, 4), (1, 6, 3)])
def test_grouped_experts_are_a_loop_over_experts(device, tokens, experts, chosen) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    make = torch.Generator().manual_seed(tokens)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        values = scale * torch.randn(*shape, generator=make, dtype=torch.float64)
        return values.to(device, dtype).requires_grad_()

    x, gate_up, down = randn(tokens, 32), randn(experts, 48, 32), randn(experts, 32, 24)
    shares = torch.rand(tokens, experts, generator=make).to(device)
    ids = best_experts(shares, chosen)
    assert torch.equal(ids.long(), shares.topk(chosen).indices)
    scores = shares.gather(1, ids.long()).to(torch.float64 if device == "cpu" else torch.float32)
    inputs = (x, scores.requires_grad_(), gate_up, down)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    grad = randn(tokens, 32).detach()
    found, right = (
        grouped_experts(x, scores, ids, gate_up, down),
        loop(exact[0], exact[1], ids, *exact[2:]),
    )
    found.backward(grad)
    right.backward(grad.double())
    for ours, theirs in (
        (found, right),
        *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)),
    ):
        off = (ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm()
        assert off < (2e-2 if device == "cuda" else 1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_a_routers_narrow_inputs_are_multiplied_as_in_fp32(device: str) -> None:
    make = torch.Generator().manual_seed(3)
    x, weight = (
        torch.randn(*size, generator=make).to(device, torch.bfloat16).requires_grad_()
        for size in ((4, 33, 512), (24, 512))
    )
    grad = torch.randn(4, 33, 24, generator=make).to(device)
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    found, right = router_product(x, weight), F.linear(*exact)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
    found.backward(grad)
    right.backward(grad.double())
    for ours, theirs in zip((x, weight), exact, strict=True):
        assert theirs.grad is not None
        # As near as bf16 can say: gradients lose nothing before their last rounding.
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2**-8, atol=1e-3)
