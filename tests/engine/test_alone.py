"""Weights that nobody else shares: copies follow them, gradients add up, and all of it can go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import make_tables
from fourfold.engine.parallel.data import Alone
from fourfold.spec.catalog import model

SHAPE = model("llama-tiny")
SEQ = 8


def chunk(dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(SHAPE, SEQ).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return decoder


def backward(decoder: Decoder, alone: Alone, seed: int) -> torch.Tensor:
    tokens = torch.randint(0, 64, (2, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    tables = make_tables(SHAPE, torch.arange(SEQ), range(SHAPE.heads), torch.bfloat16)
    with alone.in_use():
        loss = decoder(tokens[:, :-1], tables, tokens[:, 1:])
        loss.backward()
    return loss.detach()


def mixed(decoder: Decoder) -> Alone:
    return Alone(decoder, computing=torch.bfloat16, adding=torch.float32)


def test_layers_see_copies_and_everybody_else_the_weights():
    decoder = chunk()
    alone = mixed(decoder)
    before = dict(decoder.named_parameters())
    with alone.in_use():
        inside = dict(decoder.named_parameters())
        for name, master in before.items():
            assert inside[name].dtype == torch.bfloat16
            assert torch.equal(inside[name], master.detach().bfloat16()), name
    assert all(now is before[name] for name, now in decoder.named_parameters())


def test_a_changed_weight_is_seen_by_the_next_pass_however_it_was_changed():
    decoder = chunk()
    alone = mixed(decoder)
    first = backward(decoder, alone, 0)
    with torch.no_grad():  # a checkpoint, an optimizer, a fault: through any view of it
        decoder.embedding.weight.detach()[3:40].copy_(torch.randn(37, SHAPE.hidden))
    second = backward(decoder, alone, 0)
    assert not torch.equal(first, second)
    copies = alone.copies
    assert all(torch.equal(c, w.detach().bfloat16()) for w, c in copies.items())


def test_copies_that_were_updated_with_the_weight_are_not_made_again():
    decoder = chunk()
    alone = mixed(decoder)
    backward(decoder, alone, 0)
    (weight, copy), *_ = alone.copies.items()
    with torch.no_grad():
        weight.add_(1.0)
        copy.fill_(7.0)  # not the weight's value: whoever marks is believed
    alone.mark_equal()
    with alone.in_use():
        assert bool((copy == 7.0).all())


@pytest.mark.parametrize("micros", [1, 2, 3])
def test_gradients_add_up_in_the_wide_format(micros):
    decoder = chunk()
    alone = mixed(decoder)
    each = []
    for seed in range(micros):
        lone = chunk()
        single = mixed(lone)
        backward(lone, single, seed)
        single.hand_over()
        each.append([p.grad for p in lone.parameters()])
        backward(decoder, alone, seed)
    alone.hand_over()
    for i, parameter in enumerate(decoder.parameters()):
        grad = parameter.grad
        # Of one micro batch there is nothing to add: it stays as it is.
        assert grad.dtype == (torch.bfloat16 if micros == 1 else torch.float32)
        wanted = each[0][i].to(grad.dtype)
        for more in each[1:]:
            wanted = wanted + more[i]
        assert torch.equal(grad, wanted)


def test_gradients_of_more_sums_are_as_wide_as_the_weight():
    decoder = chunk()
    alone = mixed(decoder)
    backward(decoder, alone, 0)
    first, *rest = decoder.parameters()
    alone.hand_over([first])
    assert first.grad.dtype == torch.float32
    assert {p.grad.dtype for p in rest} == {torch.bfloat16}


def test_weights_in_the_format_of_compute_have_no_copies():
    decoder = chunk(torch.bfloat16)
    alone = Alone(decoder, computing=torch.bfloat16, adding=torch.bfloat16)
    backward(decoder, alone, 0)
    alone.hand_over()
    assert alone.copies == {}
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in decoder.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_outlives_the_model(dtype):
    decoder = chunk(dtype)
    alone = mixed(decoder)
    backward(decoder, alone, 0)
    held = [weakref.ref(w.used) for w in alone.weights]
    held += [weakref.ref(p) for p in decoder.parameters()]
    del decoder, alone
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
