"""Does a difference get its name? Faults planted in gradients of the reference itself."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.adapter import tiny_of
from fourfold.conformance.ranks.compare import figures, signature
from fourfold.conformance.ranks.reference import Elements, Tiny, held_norm, mean_of_means, train

TINY = Tiny(experts=4)
DEGREES = {"TP": 2, "PP": 1, "CP": 1, "EP": 4, "ETP": 0, "DP": 3, "targets": 48}


@cache
def _truth() -> dict:
    return train(TINY, 0)


def _got(**changes: float) -> dict:
    """The reference as an engine would return it, gradients of some kinds multiplied."""
    got = copy.deepcopy(_truth()) | {"spread": {}, "spread_after": {}}
    for kind, factor in changes.items():
        for name in got["grad"]:
            if kind in ("every", name.split(".")[-1]):
                got["grad"][name] *= factor
    squares = sum(float(value.pow(2).sum()) for value in got["grad"].values())
    return got | {"norm": [squares**0.5, *got["norm"][1:]]}


@pytest.mark.parametrize("text", ["tp3", "pp3 cp3 tp2", "dp5 ep5 fsdp experts", "tp6 etp3 experts"])
def test_degrees_of_any_size_divide_what_they_cut(text: str) -> None:
    cell = Cell.parse(text)
    for size in (0, 1):
        t = tiny_of(cell, size, ffn=50)
        assert t.hidden == t.heads * t.head_dim
        assert t.heads % t.kv_heads == t.kv_heads % cell.tp == t.vocab % cell.tp == 0
        assert t.seq % (2 * cell.cp * cell.tp) == t.batch % cell.dp == t.layers % cell.pp == 0
        assert t.ffn % (cell.etp or cell.tp) == t.experts % cell.ep == 0


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"every": 1 / 3}, "gradients of every weight / DP (3)"),
        ({"every": 48}, "gradients of every weight x targets (48)"),
        ({"egate": 4, "eup": 4, "edown": 4}, "gradients of the experts x EP (4)"),
        ({"router": 0.5}, "gradients of the router / TP (2)"),
        ({"every": 6}, "gradients of every weight x TP x DP (6)"),
    ],
)
def test_factors_are_named_by_axis_and_weights(changes: dict, line: str) -> None:
    assert signature(_got(**changes), _truth(), DEGREES) == [line]


def test_a_norm_says_what_it_leaves_out() -> None:
    def norm_without(*kinds: str) -> list[str]:
        got = _got()
        kept = [v for name, v in got["grad"].items() if name.split(".")[-1] not in kinds]
        got["norm"][0] = sum(float(value.pow(2).sum()) for value in kept) ** 0.5
        return signature(got, _truth(), DEGREES)

    assert norm_without("egate", "eup", "edown")[0].endswith("experts left out")
    assert norm_without("q")[0].endswith(": q left out")
    rank = _got()
    rank["norm"][0] = rank["held"] = 1.234
    assert signature(rank, _truth(), DEGREES)[0].endswith("what the rank itself holds is counted")
    half = _got()
    part = sum(float(v.pow(2).sum()) for name, v in half["grad"].items() if name != "embed")
    part += float(half["grad"]["embed"].chunk(2)[0].pow(2).sum())
    half["norm"][0] = part**0.5
    assert signature(half, _truth(), DEGREES)[0].endswith("only TP rank 0's part of embed counted")


def test_a_fault_of_one_layer_is_found_where_it_begins() -> None:
    got = _got()
    for name in got["grad"]:
        if name.startswith("0.") or name == "embed":
            got["grad"][name] += 0.1 * torch.randn(got["grad"][name].shape)
    assert signature(got, _truth(), DEGREES)[0].startswith("gradients go wrong in layer 0")


def test_copies_that_differ_and_later_steps_are_seen() -> None:
    agreeing = dict.fromkeys(_truth()["grad"], 0.0)
    got = _got() | {"spread": agreeing | {"0.router": 0.5, "1.router": 0.1}}
    line = "copies of the router differ in gradient by up to 0.5"
    assert signature(got, _truth(), DEGREES) == [line]
    parts = {f"{n}.router": (_truth()["grad"][f"{n}.router"], 2) for n in (0, 1)}
    told = signature(got | {"sums": parts}, _truth(), DEGREES)
    assert told == [f"{line}: of the router no sum over TP (2) was taken"]
    parts = {name: (3 * total, 3) for name, (total, _) in parts.items()}
    told = signature(got | {"sums": parts}, _truth(), DEGREES)
    assert told == [f"{line}: of the router no average over DP (3) was taken"]
    assert not figures(_got() | {"spread": {"0.router": 0.5}}, _truth())["equal"]
    late = _got()
    late["param"]["head"] += 0.1
    assert signature(late, _truth(), DEGREES)[0].startswith("after 3 steps head off")
    assert figures(_got(), _truth())["equal"]


def test_elements_go_back_to_their_place_and_copies_are_compared() -> None:
    elements = Elements(TINY, 0)
    numbers = elements.start["0.q"]
    halves = [(n, elements.flat[n] + r) for r, n in enumerate(numbers.chunk(2, 1))]
    whole, spread = elements.assemble([[halves[0]], [halves[1]]])
    assert torch.equal(whole["0.q"][:, 16:], elements.weights["0.q"][:, 16:] + 1)
    assert spread == {"0.q": 0.0}
    twice = [halves[0], halves[0], (torch.full((4,), -1), torch.ones(4))]
    assert held_norm(twice) == pytest.approx(float(halves[0][1].norm()))
    total, copies = elements.sums([[halves[0], halves[1]], [halves[0], halves[1]]])["0.q"]
    assert (copies, torch.equal(total, 2 * whole["0.q"])) == (2, True)
    _, spread = elements.assemble([[halves[0], halves[1]], [(halves[0][0], halves[0][1] * 1.1)]])
    assert 0.01 < spread["0.q"] < 0.2
    assert elements.assemble([[halves[0]]])[0] == {}  # half of it is on no rank


def test_the_mean_of_context_ranks_is_over_their_own_head_and_tail() -> None:
    loss, counts = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    assert float(mean_of_means(loss, counts, 1, 1)) == pytest.approx(11 / 3)
    assert float(mean_of_means(loss, counts, 1, 2)) == pytest.approx(((1 + 8) / 2 + 2) / 2)
