"""Does the optimizer of one pass do what torch's AdamW does after clipping?"""

from __future__ import annotations

import pytest
import torch

from fourfold.engine.training.optimizer import How, OnePassAdamW, OptimizerSettings, param_groups

SETTINGS = OptimizerSettings(lr=1e-2)


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = ((6, 5), (7,), (3, 4))
    return [torch.randn(s, generator=make).to(dtype).requires_grad_() for s in shapes]


def optimizer(tensors, dtype=torch.float32, copies=None) -> OnePassAdamW:
    for tensor in tensors:
        tensor.grad_dtype = None
    return OnePassAdamW(
        param_groups(tensors, SETTINGS),
        How(dtype=dtype, copies=copies or {}),
        lr=SETTINGS.lr,
        betas=SETTINGS.betas,
        eps=SETTINGS.eps,
    )


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_torch(grad_dtype):
    mine, theirs = leaves(), leaves()
    copies = {leaf: torch.zeros_like(leaf, dtype=torch.bfloat16) for leaf in mine}
    one_pass = optimizer(mine, copies=copies)
    groups = param_groups(theirs, SETTINGS)
    plain = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    make = torch.Generator().manual_seed(1)
    factor = torch.tensor(0.3)
    for step in range(4):
        for ours, other in zip(mine, theirs, strict=True):
            grad = torch.randn(ours.shape, generator=make).to(grad_dtype)
            ours.grad, other.grad = grad, grad.float() * factor
        for group in (*one_pass.param_groups, *plain.param_groups):
            group["lr"] = SETTINGS.lr / (step + 1)
        one_pass.factor = factor
        one_pass.step()
        plain.step()
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            one_pass.state[ours]["exp_avg_sq"], plain.state[other]["exp_avg_sq"]
        )
        assert torch.equal(copies[ours], ours.detach().bfloat16())
        assert float(one_pass.state[ours]["step"]) == 4


def test_an_overflow_changes_nothing_and_is_not_counted():
    mine = leaves()
    one_pass = optimizer(mine)
    before = [leaf.detach().clone() for leaf in mine]
    for leaf in mine:
        leaf.grad = torch.full_like(leaf, float("inf"))
    one_pass.overflow = torch.ones(())
    one_pass.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    assert float(one_pass.count) == 0
    assert all(not one_pass.state[leaf]["exp_avg"].any() for leaf in mine)
    for leaf in mine:
        leaf.grad = torch.ones_like(leaf)
    one_pass.overflow = torch.zeros(())
    one_pass.step()
    assert float(one_pass.count) == 1
    assert not any(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
    assert all(torch.isfinite(leaf).all() for leaf in mine)


def test_moments_may_be_narrower_than_weights():
    mine = leaves()
    one_pass = optimizer(mine, dtype=torch.bfloat16)
    for leaf in mine:
        leaf.grad = torch.ones_like(leaf)
    one_pass.step()
    assert all(one_pass.state[leaf]["exp_avg"].dtype == torch.bfloat16 for leaf in mine)
    assert all(leaf.dtype == torch.float32 for leaf in mine)
