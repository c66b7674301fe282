"""Are the fast activations the exact ones, to far below what 16 bits round?"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fourfold.engine.model.activations import (
    apply_fast_activations,
    fast_gelu,
    fast_gelu_of,
    fast_swiglu,
)
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.layers import Linear, plain_gelu_of, plain_swiglu
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.wrap import apply_compile, apply_recompute
from fourfold.spec.catalog import shape
from fourfold.spec.policy import Policy


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(value, slope) of the fast one, and of the exact one in fp64."""
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    value, truth = fast_gelu(mine), F.gelu(exact)
    value.sum().backward()
    truth.sum().backward()
    assert mine.grad is not None
    assert exact.grad is not None
    return value.detach(), mine.grad, truth.detach(), exact.grad


def test_values_and_slopes_are_exact_to_fp32():
    x = torch.cat([torch.linspace(-12.0, 12.0, 20_001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    value, slope, truth, true_slope = both(x)
    assert float((value - truth).abs().max()) < 1e-6
    assert float((slope - true_slope).abs().max()) < 1e-6
    # In the left tail values are small, and small by the right amount.
    tail = (x < -1.0) & (x > -4.0)
    assert float(((value - truth) / truth)[tail].abs().max()) < 1e-2


@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_in_16_bits_only_the_format_rounds(dtype, eps):
    x = torch.linspace(-6.0, 6.0, 5001).to(dtype)
    value, slope, truth, true_slope = both(x)
    assert value.dtype == slope.dtype == dtype
    assert bool(((value - truth).abs() <= eps * truth.abs() + 1e-6).all())
    assert bool(((slope - true_slope).abs() <= eps * true_slope.abs() + 1e-6).all())


def test_extremes_stay_finite():
    x = torch.tensor([-3e38, -100.0, 100.0, 3e38], dtype=torch.bfloat16)
    value, slope, _, _ = both(x)
    assert value.tolist() == [0.0, 0.0, float(x[2]), float(x[3])]
    assert slope.tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradient_are_those_of_torch_in_fp64(dtype):
    make = torch.Generator().manual_seed(0)
    gate_up = (3 * torch.randn(2, 5, 24, generator=make)).to(dtype)
    grad = torch.randn(2, 5, 12, generator=make).to(dtype)
    mine, exact = gate_up.clone().requires_grad_(), gate_up.double().requires_grad_()
    value, truth = fast_swiglu(mine), plain_swiglu(exact)
    value.backward(grad)
    truth.backward(grad.double())
    limit = 1e-6 if dtype == torch.float32 else 2**-7
    for found, right in ((value.detach(), truth.detach()), (mine.grad, exact.grad)):
        assert float((found - right).norm() / right.norm()) < limit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the kernel is Triton's")
@pytest.mark.parametrize("width", [8, 2048, 5000, 14336])
def test_the_gpu_kernel_of_swiglu_is_the_formula(width):
    make = torch.Generator().manual_seed(width)
    gate_up = torch.randn(33, 2 * width, generator=make).bfloat16()
    grad = torch.randn(33, width, generator=make).bfloat16()
    found = torch.ops.fourfold.swiglu_backward(gate_up.cuda(), grad.cuda()).cpu()
    right = torch.ops.fourfold.swiglu_backward(gate_up.float(), grad.float())
    assert float((found.float() - right).norm() / right.norm()) < 2**-7


def test_the_gradient_of_a_bias_goes_with_that_of_gelu():
    make = torch.Generator().manual_seed(1)
    up = Linear(16, (("up", 24),), bias=True)
    torch.nn.init.normal_(up.weight, generator=make)
    torch.nn.init.normal_(up.bias, generator=make)
    exact = copy.deepcopy(up).double()
    x, grad = (torch.randn(3, 700, size, generator=make) for size in (16, 24))
    fast_gelu_of(up, x).backward(grad)
    plain_gelu_of(exact, x.double()).backward(grad.double())
    for found, right in ((up.weight.grad, exact.weight.grad), (up.bias.grad, exact.bias.grad)):
        assert float((found - right).norm() / right.norm()) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("family", "kind"), [("llama", "full"), ("gpt", "full"), ("gpt", "none")])
def test_a_recomputed_layer_keeps_nothing_inside_when_compiled(family, kind):
    model = shape(family, layers=1, hidden=32, ffn=64, heads=4, vocab=64)
    decoder = Decoder(model, seq_len=16).to(torch.bfloat16)
    layer = decoder.blocks[0]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply_fast_activations(decoder, torch.bfloat16)
    apply_recompute(decoder, Policy(recompute=kind))
    apply_compile(decoder, enabled=True, backend="aot_eager_decomp_partition")
    x = torch.randn(1, 16, 32).to(torch.bfloat16).requires_grad_()
    tables = make_tables(model, torch.arange(16), range(4))
    given = {
        tensor.data_ptr() for tensor in (x, *layer.parameters(), *tables) if tensor is not None
    }
    kept: list[tuple[int, ...]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in given and tensor.is_floating_point():
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(x, tables).sum().backward()
    assert x.grad is not None
    assert bool(kept) == (kind == "none"), kept
