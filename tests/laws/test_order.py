"""The order of a plan's rows follows one rule, stated again here from the rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import fourfold
from fourfold.search.choice import RISK, TIE
from fourfold.search.plan_answer import PlanAnswer, PlanRow
from fourfold.verbs.requests import PlanRequest
from tests.sampling import PROFILE

STEP = 1 if PROFILE == "all" else 3  # of four engines
ENGINES = ("megatron", "torchtitan", "fourfold", "accelerate")
MACHINES = {"a100-40gb": 8, "h100-80gb": 16, "b200": 8}
QUESTIONS = [
    PlanRequest(
        model=model, gpu=gpu, gpus=gpus, seq_len=4096, global_batch=128, stack=stack, top=40
    )
    for model in ("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b")
    for gpu, gpus in MACHINES.items()
    for stack in ENGINES
]


def model_ranks(row: PlanRow) -> int:
    layout = row.layout
    return layout.pp * layout.cp * max(layout.tp, layout.etp)


def place_in_tie(row: PlanRow) -> tuple[int, int, float]:
    return model_ranks(row), -round(100 * row.fit_chance), row.step_s


def eligible_rows(plan: PlanAnswer) -> list[PlanRow]:
    exported = [row for row in plan.ranked if row.exported] or list(plan.ranked)
    return [row for row in exported if row.fit_chance >= 1 - RISK]


def axes(row: PlanRow) -> tuple[int, ...]:
    """Return what tells layouts apart: groups that hold copies of shards do not."""
    layout = row.layout
    return layout.pp, layout.dp, layout.cp, layout.tp, layout.ep, layout.etp


def first_of_each_layout(rows: Sequence[PlanRow]) -> list[PlanRow]:
    return [row for i, row in enumerate(rows) if axes(row) not in {axes(r) for r in rows[:i]}]


@pytest.mark.parametrize(
    "request_", QUESTIONS[::STEP], ids=lambda r: f"{r.model} {r.gpu} {r.stack}"
)
def test_order_of_rows_follows_the_rule(request_: PlanRequest) -> None:
    plan = fourfold.plan(request_)
    eligible = eligible_rows(plan)
    if not eligible:
        pytest.skip("nothing is 90% likely to fit")
    first, pace_s = plan.ranked[0], min(row.step_s for row in eligible)
    tied = [row for row in eligible if row.step_s <= (1 + TIE) * pace_s]
    assert first == min(tied, key=place_in_tie)
    assert plan.tied == len(tied)
    assert [row for row in plan.ranked if row.tied] == (tied if len(tied) > 1 else [])
    best_of_layouts = first_of_each_layout(eligible)
    others = [row.step_s for row in best_of_layouts if row not in tied]
    assert others == sorted(others)
    for row in plan.ranked[1:]:
        if row.step_s < first.step_s:
            held = row.fit_chance < 1 - RISK, not row.exported and first.exported, row.tied
            words = "likely to fit" in row.note, "no export" in row.note, "a tie" in row.note
            assert any(held)
            assert held == words


@pytest.mark.parametrize("request_", QUESTIONS[::6], ids=lambda r: f"{r.model} {r.gpu} {r.stack}")
def test_explain_puts_ways_of_the_first_layout_in_its_order(request_: PlanRequest) -> None:
    request_ = replace(request_, top=4)
    best = fourfold.plan(request_).best
    if best is None:
        pytest.skip("nothing fits")
    explained = fourfold.explain(request_, best.layout).explanation
    row = explained.row
    assert row is not None
    assert (row.policy, row.micro_batch, row.step_s) == (best.policy, best.micro_batch, best.step_s)
    assert explained.held_back == ""
