"""One linear in fp8 against the same in bf16; and what is said where it can't run."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from fourfold.engine.jobs.train import utilisation_of
from fourfold.engine.parallel import products
from fourfold.errors import UserError
from fourfold.spec.run import run_of


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    return float((have.detach() - want.detach()).norm() / want.detach().norm())


def results(product, bias: torch.Tensor | None) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    x = torch.randn(2, 16, 64, generator=chance).bfloat16().requires_grad_()
    weight = torch.randn(48, 64, generator=chance).bfloat16().requires_grad_()
    y = product(x, weight, bias)
    y.backward(torch.randn(y.shape, generator=chance).bfloat16())
    assert x.grad is not None
    assert weight.grad is not None
    return [y, x.grad, weight.grad]


def test_all_three_products_round_to_eight_bits_and_no_more():
    bias = torch.ones(48, dtype=torch.bfloat16)
    eight = results(products.float8_product(emulate=True), bias)
    for have, want in zip(eight, results(F.linear, bias), strict=True):
        assert have.dtype == want.dtype == torch.bfloat16
        # Products of e4m3 (3 bits) with e4m3 or e5m2 (2 bits).
        assert 0.01 < relative(have, want) < 0.08


def test_without_torchao_the_way_out_is_said(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"precision=fp8 needs torchao.*pip install torchao"):
        products.float8_product(emulate=True)


def test_a_gpu_without_units_for_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(
        UserError, match=r"FP8 tensor cores: NVIDIA A100 .compute capability 8\.0. has none"
    ):
        products._emulates("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert products._emulates("cuda") is False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_layer_computes_the_same():
    product = products.float8_product(emulate=True)
    compiled = torch.compile(product, fullgraph=True, dynamic=False)
    for have, want in zip(results(compiled, None), results(product, None), strict=True):
        assert relative(have, want) < 0.02


def test_a_training_is_measured_against_the_peak_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are kept in 16 bits, its products are not."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    plain = {"model": "llama-tiny", "batch": {"seq_len": 128, "global_batch": 4}}
    mfu_pct = {}
    for compute in ("fp8", "bf16"):
        spec = run_of({**plain, "policy": {"precision": "bf16-pure", "compute_dtype": compute}})
        mfu_pct[compute] = utilisation_of(spec, torch.device("cuda"))(1e6)
    assert mfu_pct["bf16"] == pytest.approx(2 * mfu_pct["fp8"], rel=0.01)
