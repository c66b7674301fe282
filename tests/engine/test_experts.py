"""Experts on one device against their formulas, and what a run with experts says of itself."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fourfold.engine.model import rows
from fourfold.engine.model.experts import MoeMlp
from fourfold.engine.verify.plain_experts import Guess, PlainExperts, RoutedStep
from fourfold.spec import catalog


def made(name: str, capacity: float, dtype: torch.dtype) -> MoeMlp:
    shape = catalog.model(name)
    assert shape.moe is not None
    moe = replace(shape.moe, capacity=capacity)
    torch.manual_seed(0)
    mlp = MoeMlp(shape, moe, fused=True).to(dtype)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(0, 0.2)
    return mlp


@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-tiny"])
@pytest.mark.parametrize("capacity", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_compute_their_formulas(name: str, capacity: float, dtype: torch.dtype) -> None:
    """fp32 goes through grouped products, whose rows after the last are undefined."""
    x = torch.randn(2, 24, 64, dtype=dtype, generator=torch.manual_seed(1))
    results = []
    for plain in (False, True):
        mlp = made(name, capacity, dtype)
        reference = PlainExperts(mlp, Guess())
        reference.step = RoutedStep(48)
        mlp.router.tokens = 48
        given = x.clone().requires_grad_()
        y = reference(given) if plain else mlp(given)
        (y.square().sum() + (reference.step.loss(Guess()) if plain else 0)).backward()
        seen = reference.step.counts[0] if plain else mlp.router.seen
        assert (int(seen[-1]) > 0) is (capacity > 0)
        grads = {n: p.grad for n, p in mlp.named_parameters() if p.requires_grad}
        results.append((y.detach(), given.grad, grads, seen))
    (ours, our_grad, our_grads, our_seen), (y, grad, grads, seen) = results
    limit = 1e-4 if dtype == torch.float32 else 1e-11
    assert torch.equal(our_seen, seen)
    for have, want in ((ours, y), (our_grad, grad), *((our_grads[n], grads[n]) for n in grads)):
        assert have is not None
        assert (have - want).abs().max() <= limit * want.abs().max()


def test_a_run_tells_its_load_and_its_place(tmp_path: Path, cli) -> None:
    """Forced routing gives every expert as many tokens; ep is part of a stored run's layout."""
    words = (
        "bench --model mixtral-tiny --gpus 2 --ep 2 --seq-len 16 --global-batch 4 --micro-batch 2 "
        "--precision fp32 --steps 1 --warmup 1 --routing forced --set device=cpu --set settle=false"
    )
    told = cli.json(*words.split(), "--runs", tmp_path)
    assert [load["layer"] for load in told["experts"]] == [0, 1, 2, 3]
    assert all(load["largest"] == 1.0 and load["spread"] == 0.0 for load in told["experts"])
    assert told["routing"] == "forced"
    style = ("--style", "topology", "--format", "csv")
    (cells,) = csv.DictReader(io.StringIO(cli("report", "--runs", tmp_path, *style)))
    assert (cells["EP"], cells["Experts"]) == ("2", "8")


def test_routing_and_exchange_are_steps_of_a_trace(cli) -> None:
    words = "trace layer --model deepseek-tiny --tokens 32 --dp 2 --ep 2"
    told = cli.json(*words.split())
    names = [step["name"] for step in told["steps"]]
    for name in ("route", "rows to experts", "experts up", "experts down", "rows back"):
        assert any(step.startswith(name) for step in names), names
    assert "ep" in {group["name"] for group in told["groups"]}
    back = sum("rows back" in name for name in names)
    assert back >= 2  # forward, and again in the backward pass


def tables() -> st.SearchStrategy[list[list[int]]]:
    of = lambda width: st.lists(st.integers(0, 4), min_size=width, max_size=width)  # noqa: E731
    return st.integers(1, 5).flatmap(lambda width: st.lists(of(width), min_size=1, max_size=4))


@given(tables())
def test_rows_from_other_ranks_are_regrouped_by_expert(counts: list[list[int]]) -> None:
    """Each row is named by its rank, its expert and its number among those."""
    blocks = [(rank, e, n) for rank, row in enumerate(counts) for e, n in enumerate(row)]
    came = [(rank, expert, i) for rank, expert, size in blocks for i in range(size)]
    order, back, ends = rows.regroup_rows(torch.tensor(counts), len(came))
    now = [came[i] for i in order.tolist()]
    assert now == sorted(came, key=lambda name: (name[1], name[0], name[2]))
    assert [now[i] for i in back.tolist()] == came
    held = [sum(row[e] for row in counts) for e in range(len(counts[0]))]
    assert ends.tolist() == list(itertools.accumulate(held))
