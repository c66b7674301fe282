"""Do the GPU kernels compute what the formulas say, at every edge of their blocks?"""

from __future__ import annotations

import pytest
import torch

from fourfold.engine.model import activations, rows
from fourfold.engine.parallel import data, lean_loss

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: the kernels are Triton's"
)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    make = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=make).to(dtype).cuda()


def off(found: torch.Tensor, right: torch.Tensor) -> float:
    right = right.double()
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (257, 520), (600, 4096), (33, 5000)])
def test_gelu_and_its_gradient_and_that_of_the_bias(rows: int, width: int) -> None:
    pre, bias = (3 * randn(rows, width)).requires_grad_(), randn(width).requires_grad_()
    exact, added = (
        pre.detach().double().requires_grad_(),
        torch.zeros(width, device="cuda").double(),
    )
    added.requires_grad_()
    grad = randn(rows, width)
    value, truth = activations.fast_gelu(pre, bias), torch.nn.functional.gelu(exact + added)
    value.backward(grad)
    truth.backward(grad.double())
    assert pre.grad is not None
    assert bias.grad is not None
    assert off(value.detach(), truth.detach()) < 2**-8
    assert off(pre.grad, exact.grad) < 2**-8
    assert off(bias.grad, added.grad) < 2**-7


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (40, 8192), (17, 8193), (9, 50368)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_and_gradient_of_logits(rows: int, width: int, dtype: torch.dtype) -> None:
    logits = 5 * randn(rows, width, dtype=dtype)
    column = torch.arange(rows, device="cuda") * 7 % width
    column[0] = -1
    share = torch.rand(rows, device="cuda")
    logsum, chosen = lean_loss._gpu_sums(logits, column)
    right = lean_loss._sums(logits.double(), column)
    assert off(logsum, right[0]) < 1e-6
    assert off(chosen, right[1]) < 1e-6 or rows == 1
    wide = logits.double()
    lean_loss._turn(wide, right[0], column, share.double())
    lean_loss._gpu_turn(logits, logsum, column, share)
    assert off(logits, wide) < (2**-8 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("count", [1, 4096, 4097, 1_000_003])
def test_gradients_add_up_in_the_wide_format(count: int) -> None:
    first, second, third = (randn(count + i)[:count].clone() for i in range(3))
    total = data.add_gradient(first, second, torch.float32)
    assert torch.equal(total, first.float() + second.float())
    again = data.add_gradient(total, third, torch.float32)
    assert again is total
    assert torch.equal(total, first.float() + second.float() + third.float())


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (8, 4096), (3, 5001)])
def test_gradients_are_laid_side_by_side(rows: int, width: int) -> None:
    narrow, wide = randn(rows, width), torch.full((rows, 2 * width + 3), -1.0, device="cuda")
    data.widen(narrow, wide[:, 3 : 3 + width])
    assert torch.equal(wide[:, 3 : 3 + width], narrow.float())
    assert bool((wide[:, :3] == -1).all())
    assert bool((wide[:, 3 + width :] == -1).all())


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 2), (300, 3, 5), (4096, 8, 128)])
def test_rows_are_ordered_by_expert(tokens: int, top_k: int, experts: int) -> None:
    ids = (randn(tokens, top_k).abs() * 1e3).int() % experts
    found, right = rows.order_rows(ids, experts + 1), rows.order_rows(ids.cpu(), experts + 1)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize(("groups", "experts"), [(1, 1), (2, 3), (8, 16), (64, 4), (3, 200)])
@pytest.mark.parametrize("most", [0, 1, 37])
def test_rows_are_regrouped_by_expert(groups: int, experts: int, most: int) -> None:
    counts = (randn(groups, experts).abs() * 1e3).int() % (most + 1)
    total = int(counts.sum())
    found, right = rows.regroup_rows(counts, total), rows.regroup_rows(counts.cpu(), total)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.cpu(), other)
