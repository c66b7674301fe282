"""Fronts hold what nothing undercuts, the largest that fits is followed by one that does not, and
lost time and energy add up."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import fourfold
from fourfold.cost.memory.peak import memory
from fourfold.cost.power import IDLE_W, mean_power_w
from fourfold.cost.step.estimate import estimate
from fourfold.errors import UserError
from fourfold.search.ranking import rank_layouts
from fourfold.spec import catalog
from fourfold.spec.batch import Ramp
from fourfold.units import share_from
from fourfold.verbs.front import STEP, _fits, _longer, _wider, memory_front
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest

SMALL = PlanRequest(
    model="llama-3.2-1b", gpu="h100-80gb", gpus=4, seq_len=4096, global_batch=32, top=6,
    stack="megatron",
)  # fmt: skip
WORDS = ["plan", "--model", "llama-3.2-1b", "--gpu", "h100-80gb", "--gpus", "2", "--seq-len", "4k",
         "--global-batch", "8", "--stack", "megatron"]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [("gemma-2-2b", 0, "The largest model"), ("qwen3-30b-a3b", 2, "only dense shapes")],
)
def test_a_larger_model_of_any_family(cli, model, status, says) -> None:
    """Windows in some of its layers are in as many of the larger one's."""
    ask = ("plan", "--model", model, "--gpu", "h100-80gb", "--gpus", 1, "--seq-len", 8192)
    more = ("--global-batch", 4, "--stack", "fourfold", "--largest", "model", "--recompute", "full")
    assert says in cli(*ask, *more, status=status)


def test_a_front_against_memory_is_that_of_all_points() -> None:
    query, _ = resolved(replace(SMALL, model="llama-3.1-8b", gpus=8))
    ranking = rank_layouts(query)
    front = memory_front(ranking, 20)
    every = ranking.bounds.table.points(np.flatnonzero(ranking.ranked))
    c = query.columns(every)
    step_s = estimate(c, query.resolved.entry.coefficients).step_s
    peak_bytes = memory(c, query.resolved.entry.coefficients).worst_bytes
    left, wanted = np.ones(len(c), dtype=bool), []
    while left.any():
        best = np.lexsort((peak_bytes, np.where(left, step_s, np.inf)))[0]
        wanted.append((step_s[best], peak_bytes[best]))
        left &= peak_bytes < peak_bytes[best] - STEP * query.resolved.cluster.device.memory_bytes
    found = zip(front.closed_s.tolist(), front.points["peak_bytes"].tolist(), strict=True)
    assert len(wanted) > 3
    assert list(found) == wanted[:20]


def test_a_front_against_gpus_is_the_plan_of_each_number() -> None:
    front = fourfold.front(replace(SMALL, gpus=8, tokens=10**10), "gpus")
    assert [one.gpus for one in front.points] == [8, 4, 2, 1]
    for one in front.points:
        alone = fourfold.plan(replace(SMALL, gpus=one.gpus, tokens=10**10, top=1))
        assert alone.best == one.row
    seconds = [one.row.step_s for one in front.points]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("of", ["sequence", "model"])
def test_the_largest_that_fits_is_followed_by_one_that_does_not(of) -> None:
    request = replace(SMALL, gpus=1, global_batch=2, layout="tp1 cp1 pp1", micro_batch=1, top=1)
    found = fourfold.largest(request, of)
    assert found.plan.best is not None
    base = catalog.model(str(request.model))
    if of == "sequence":
        eighths, change = found.seq_len // 128, _longer
        assert found.seq_len > request.seq_len
    else:
        eighths, change = round(found.params / 12.5e6), _wider
        assert found.params > 1.3e9
    # The next eighth of its doubling, or a little more where a shape can't be made.
    step = max(1, 2 ** (eighths.bit_length() - 1) // 8)
    more = [change(request, base, eighths + n * step) for n in (2, 3)]
    assert not any(_fits(one) for one in more if one is not None)


def test_nothing_that_fits_is_an_error() -> None:
    request = replace(SMALL, gpus=1, where=("mem_gib < 1",))
    with pytest.raises(UserError, match="nothing fits"):
        fourfold.largest(request, "sequence")


def test_lost_time_is_a_share_of_the_whole() -> None:
    ramp = Ramp(start=8, increment=8, samples=4000)
    plain = fourfold.plan(replace(SMALL, tokens=10**9, price=2.0, ramp=ramp, lost=0.0)).best
    lossy = fourfold.plan(replace(SMALL, tokens=10**9, price=2.0, ramp=ramp, lost=0.2)).best
    for name in ("training_s", "gpu_hours", "cost"):
        assert getattr(lossy, name) == pytest.approx(getattr(plain, name) / 0.8)
    assert lossy.step_s == plain.step_s
    with pytest.raises(UserError, match="below 1"):
        replace(SMALL, lost=1.0)


def test_energy_of_a_token_is_the_power_of_all_gpus() -> None:
    row = fourfold.plan(SMALL).best
    tokens_s = SMALL.seq_len * SMALL.global_batch / row.step_s
    assert row.joule_per_token == pytest.approx(row.power_w * 4 / tokens_s)
    device = catalog.device("h100-80gb")
    assert IDLE_W < row.power_w <= device.power_w
    assert mean_power_w(device, 0.0) == IDLE_W
    assert mean_power_w(device, 1e18) == device.power_w


def test_shares_are_read_as_people_write_them() -> None:
    assert share_from("10%") == share_from(" 0.1 ") == 0.1
    for text in ("110%", "-1%", "ten", "", "nan"):
        with pytest.raises(UserError, match="is not a share"):
            share_from(text)


def test_table_of_a_front_has_gpus_for_ranks_and_compares_nothing(cli) -> None:
    lines = cli(*WORDS, "--front", "gpus", "--tokens", "1B", "--price", "2").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("GPUs  layout"))
    table = lines[start : lines.index("", start)]
    assert "vs #1" not in table[0]
    assert max(map(len, table)) <= 100


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--front", "memory"], "the fastest layouts for less and less memory"),
        (["--front", "gpus", "--tokens", "1B"], "the first choice on fewer and fewer GPUs"),
        (["--largest", "model", "--safe", "--micro-batch", "1"], "; it fits with a chance of 9"),
        (["--tokens", "1B", "--lost", "10%"], "GPU-hours, .*goodput 90.0%"),
        (["--tokens", "1B", "--price", "2"], "30,518 steps take .* GPU-hours, .*cost "),
    ],
)
def test_each_question_has_a_page(words, says, cli) -> None:
    assert re.search(says, " ".join(cli(*WORDS, *words).split()))
    if "--price" in words:
        return
    assert "step_s" in cli(*WORDS, *words, "--format", "csv").splitlines()[0]
