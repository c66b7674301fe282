"""Offloaded activations: the same gradients, fewer bytes on the device, nothing sent twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fourfold.engine.jobs.dryrun import count_rank
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel import wrap
from fourfold.engine.parallel.wrap import apply_compile, apply_recompute
from fourfold.spec.catalog import shape
from fourfold.spec.policy import Policy
from tests.specs import run_spec

MODEL = shape("llama", layers=6, hidden=128, ffn=256, heads=4, kv_heads=2, vocab=64)


def counted(layout: str = "dp1", **policy):
    run = run_spec(MODEL, layout, seq_len=4096, micro_batch=2, global_batch=2, **policy)
    away = replace(run, policy=replace(run.policy, offload="activations"))
    return count_rank(run, 0), count_rank(away, 0)


@pytest.mark.parametrize("layout", ["dp1", "tp2"])
def test_a_device_holds_two_layers_of_activations_instead_of_all(layout):
    stay, away = counted(layout)
    assert away.flops == stay.flops
    assert away.activation_bytes < 0.45 * stay.activation_bytes


def test_with_recompute_the_inputs_of_layers_go():
    stay, away = counted(recompute="full")
    inputs = 2 * 4096 * 128 * 2
    saved = stay.peak_bytes - away.peak_bytes
    # All but that of the layer at work and the one on its way back.
    assert (MODEL.layers - 3) * inputs < saved <= MODEL.layers * inputs


class Log:
    """Packed, with a note of every tensor that went."""

    def __init__(self, monkeypatch) -> None:
        self.sent: list[torch.Tensor] = []
        original = wrap.Packed.__init__

        def noted(packed, tensor, side, *, strided) -> None:
            self.sent.append(tensor.detach())
            original(packed, tensor, side, strided=strided)

        monkeypatch.setattr(wrap.Packed, "__init__", noted)


def grads(decoder: Decoder) -> list[torch.Tensor]:
    decoder.zero_grad()
    tokens = torch.randint(0, 64, (2, 16), generator=torch.manual_seed(1))
    tables = make_tables(MODEL, torch.arange(16), range(4))
    decoder(tokens, tables, tokens.roll(-1, 1)).backward()
    return [parameter.grad.clone() for parameter in decoder.parameters()]


def built() -> Decoder:
    torch.manual_seed(2)
    decoder = Decoder(MODEL, 16)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return decoder


@pytest.mark.parametrize("way", ["plain", "recompute", "compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_gradients_are_the_same_and_no_weight_goes(way, monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    log = Log(monkeypatch)
    decoder = built()
    want = grads(decoder)
    if way == "recompute":
        apply_recompute(decoder, Policy(recompute="full"))
    apply_compile(decoder, enabled=way == "compiled", backend="aot_eager")
    wrap.apply_offload(decoder, Policy(offload="activations"), "cpu")
    for have, wanted in zip(grads(decoder), want, strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-5, atol=1e-6)
    assert log.sent
    if way == "recompute":
        assert [tuple(one.shape) for one in log.sent] == [(2, 16, 128)] * MODEL.layers
    weights = {p.untyped_storage()._cdata for p in decoder.parameters()}
    assert not [one for one in log.sent if one.untyped_storage()._cdata in weights]
    views = {(one.data_ptr(), tuple(one.shape), one.stride()) for one in log.sent}
    assert len(views) == len(log.sent)


def test_compiled_code_gets_views_back_with_their_strides():
    part = torch.arange(48.0).view(4, 12)[:, :8]
    for strided in (False, True):
        back = wrap.Packed(part, None, strided=strided).take()
        assert torch.equal(back, part)
        assert (back.stride() == part.stride()) is strided
