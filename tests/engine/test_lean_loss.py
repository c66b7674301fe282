"""Does the lean loss compute torch's, and keep no second copy of the logits?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.model.decoder import IGNORE
from fourfold.engine.parallel.lean_loss import LeanLoss
from tests.sampling import examples

LEAN = LeanLoss(0, None, compiled=False)


def inputs(rows: int, vocab: int, hidden: int, dtype: torch.dtype, seed: int, masked: float):
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=make).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=make)
    return x, weight, torch.where(torch.rand(rows, generator=make) < masked, IGNORE, targets)


def truth(x, weight, targets, scale):
    """In fp64, from the same values."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x @ weight.t(), targets, ignore_index=IGNORE, reduction="sum")
    (loss * scale).backward()
    return loss.detach(), x.grad, weight.grad


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to 1 at least: what is left of p - 1 where p is nearly 1 is rounding."""
    return float((found.detach().double() - wanted).norm() / wanted.norm().clamp(min=1.0))


@settings(max_examples=examples(25))
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 70),
    chunks=st.integers(1, 5),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    block=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_those_of_torch_in_fp64(
    rows, vocab, chunks, masked, dtype, block, seed
):
    x, weight, targets = inputs(rows, vocab, 8, dtype, seed, masked)
    lean = LeanLoss(0, None, compiled=False)
    lean._most_values = block
    if chunks == 1:
        loss = lean(x @ weight.t(), targets)
    else:
        loss = lean.in_chunks(x, weight, targets, chunks)
    (loss * 0.25).backward()
    limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    wanted = truth(x, weight, targets, 0.25)
    for found, right in zip((loss, x.grad, weight.grad), wanted, strict=True):
        assert far(found, right) < limit


def test_the_gradient_takes_the_place_of_the_logits():
    x, weight, targets = inputs(16, 64, 8, torch.bfloat16, 0, 0.2)
    logits = x @ weight.t()
    before = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append((grad.data_ptr(), grad.dtype)))
    LEAN(logits, targets).backward()
    assert seen == [(before, torch.bfloat16)]


def test_a_second_backward_pass_is_refused_not_wrong():
    x, weight, targets = inputs(4, 16, 8, torch.float32, 0, 0.0)
    loss = LEAN(x @ weight.t(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
