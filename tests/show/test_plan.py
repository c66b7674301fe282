"""What a plan's page says beside its table, and how it reads.

The page of a profile: what it says of the time in which it was measured.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import fourfold
from fourfold.errors import UserError
from fourfold.search.plan_answer import Alternative, PlanAnswer
from fourfold.show.machines import profile_page
from fourfold.show.plan import page
from fourfold.spec.layout import Layout
from fourfold.verbs.requests import PlanRequest
from tests.result.test_cpu_profile import profile

SMALL = PlanRequest(
    model="llama-3.2-1b", gpu="h100-80gb", gpus=4, seq_len=4096, global_batch=32, top=3
)


@pytest.fixture(scope="module")
def plan() -> PlanAnswer:
    return fourfold.plan(SMALL)


def other(plan: PlanAnswer, faster: float, **facts: float) -> Alternative:
    return Alternative(
        layout=Layout(shard=4), cp_kind="ring", sharding="zero1", recompute="none",
        virtual_stages=1, micro_batch=2, step_s=plan.best.step_s / faster, **facts,
    )  # fmt: skip


def said(plan: PlanAnswer) -> str:
    return "\n".join(part for part in page(plan, details=True) if isinstance(part, str))


def test_a_faster_layout_is_named_with_what_speaks_against_it(plan: PlanAnswer) -> None:
    assert plan.best is not None
    first = replace(plan.best, fit_chance=0.93)
    plan = replace(plan, ranked=(first, *plan.ranked[1:]))
    risky = replace(plan, faster=other(plan, 1.05, fit_chance=0.4))
    assert "4.8% less time than #1 but 40% likely to fit: pp1 dp4" in said(risky)


def test_what_is_probably_too_large_has_its_chance(plan: PlanAnswer) -> None:
    near = other(plan, 1.2, fit_chance=0.13, peak_bytes=96.4 * 2**30)
    text = said(replace(plan, near_miss=near))
    assert "faster, but probably too large: pp1 dp4" in text
    assert "about 96.4 of 80 GiB, 13% likely to fit" in text


def test_where_nothing_fits_the_page_says_what_needs_least() -> None:
    answer = fourfold.plan(replace(SMALL, model="llama-3.1-70b", gpus=2))
    text = said(answer)
    assert answer.best is None
    assert "No layout fits: the smallest (" in text
    assert "GiB on its fullest GPU, which has 80; use more GPUs" in text
    assert "intervals" not in text


def test_what_conditions_exclude_is_counted_in_ways_to_run_it() -> None:
    answer = fourfold.plan(replace(SMALL, where=("step_s < 1e-6",)))
    assert answer.reason == f"no layout is left: --where excludes all {answer.fitting:,} that fit"


@pytest.mark.parametrize("gpus", [0, -1, 2**20 + 1])
def test_a_number_of_gpus_that_cannot_be_is_refused_as_one(gpus: int) -> None:
    with pytest.raises(UserError, match=f"gpus={gpus} must be from 1 to 1048576"):
        fourfold.plan(replace(SMALL, gpus=gpus))


def test_layouts_named_beside_the_list_are_played_like_those_in_it() -> None:
    """Three micro batches in four stages of eight parts: the closed form hopes for half of what
    the events take."""
    request = replace(SMALL, model="llama-3.1-8b", gpus=64, global_batch=3)
    shy = fourfold.plan(request)
    assert shy.best is not None
    bold = fourfold.plan(replace(request, explore=True, top=40))
    layout = (shy.unproven_best.layout, shy.unproven_best.cp_kind)
    same = [row for row in bold.ranked if (row.layout, row.policy.cp_kind) == layout]
    assert [row.step_s for row in same] == [pytest.approx(shy.unproven_best.step_s)]


@pytest.mark.parametrize(("unsteady", "says"), [((0.1, 0.1, 0.1), False), ((0.1, 0.42, 0.1), True)])
def test_a_page_says_when_something_else_ran(unsteady: tuple[float, ...], says: bool) -> None:
    known = profile()
    points = zip(known.shared, unsteady, strict=True)
    page = profile_page(replace(known, shared=tuple(replace(p, unsteady=u) for p, u in points)))
    found = [part for part in page if isinstance(part, str) and "differed by 42%" in part]
    assert bool(found) == says
