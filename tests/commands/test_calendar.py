"""`calendar` and `plan --deadline`: one answer from both ends, phases of a file, clear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fourfold
from fourfold import CalendarRequest, PlanRequest, TrainingPhase
from fourfold.errors import UserError
from tests.cli import Cli

PLAN = PlanRequest(
    model="llama-3.2-1b", gpu="h100-80gb", seq_len=4096, global_batch=512, stack="torchtitan",
    tokens=10**12, price=2.0, policy={"recompute": "none"}, layout="pp1 cp1 tp1", micro_batch=4,
)  # fmt: skip


@pytest.mark.parametrize(("days", "chance"), [(4.0, 0.8), (9.0, 0.95)])
def test_a_deadline_and_its_gpus_agree(days: float, chance: float) -> None:
    request = CalendarRequest(plan=PLAN, deadline=days, chance=chance)
    assert fourfold.calendar(request).best is not None
    _must_agree(days, chance, 10**12)


def test_a_deadline_that_no_number_of_gpus_meets_says_how_near_they_come() -> None:
    """The guess is beyond what the batch can feed: none of the larger ones has a layout."""
    asked = replace(PLAN, tokens=2 * 10**12)
    found = fourfold.calendar(CalendarRequest(plan=asked, deadline=2.0, chance=0.6))
    assert found.best is None
    nearest = max((one for one in found.points if not one.reason), key=lambda one: one.gpus)
    assert nearest.days > 2.0


def test_calendar_interval_contains_deepseek_v3_and_names_its_seconds(cli: Cli) -> None:
    """2,664,000 H800-hours for 14.8T tokens on 2,048 GPUs (arXiv 2412.19437, table 1)."""
    words = ("calendar", "--model", "deepseek-v3", "--gpu", "h800", "--gpus", "2048", "--seq-len",
             "4096", "--global-batch", "15360", "--stack", "hai-llm", "--precision", "fp8",
             "--tokens", "14.8T")  # fmt: skip
    best = cli.json(*words)["best"]
    assert best["days_low"] < 2_664_000 / 2048 / 24 < best["days_high"]
    assert "hai-llm: no measured runs of this stack here" in best["step_times"][0]
    assert best["step_times"][0] in cli(*words)


def test_muon_is_named_with_the_format_of_its_iterations(cli: Cli) -> None:
    model = ("--model", "llama-3.2-1b", "--gpu", "h100-80gb", "--gpus", "8", "--seq-len", "4096")
    words = (*model, "--global-batch", "64", "--set", "policy.optimizer=muon", "--micro-batch", "1")
    fixed = ("--pp", "1", "--cp", "1", "--tp", "1")
    assert "; muon, iterations in bf16" in cli("calendar", *words, *fixed, "--tokens", "1T")
    wider = ("--set", "policy.muon.dtype=fp32")
    assert "optimizer muon, iterations in fp32" in cli("plan", *words, *wider, "--explain", "dp8")
    tiny = ("--model", "llama-tiny", "--gpus", "1", "--seq-len", "64", "--global-batch", "2")
    counted = cli("dryrun", *tiny, "--set", "policy.optimizer=muon")
    assert "llama-tiny on 1 rank, pp1 dp1 cp1 tp1, muon, iterations in bf16; per rank" in counted


@pytest.mark.slow
@settings(max_examples=20)
@given(
    days=st.floats(2.0, 40.0),
    chance=st.floats(0.3, 0.99),
    tokens=st.integers(10**11, 3 * 10**12),
)
def test_any_deadline_and_its_gpus_agree(days: float, chance: float, tokens: int) -> None:
    _must_agree(days, chance, tokens)


def _must_agree(days: float, chance: float, tokens: int) -> None:
    """The fewest GPUs end in time with the wanted chance; asked about directly they say the same,
    as does a plan with that many tokens; the next smaller number does not, and half of the tokens
    end in time more surely."""
    asked = replace(PLAN, tokens=tokens)
    found = fourfold.calendar(CalendarRequest(plan=asked, deadline=days, chance=chance))
    best = found.best
    if best is None:  # more GPUs than the batch can feed
        assert all((one.in_time or 0.0) < chance for one in found.points)
        return
    assert best.in_time is not None
    assert best.in_time >= chance
    smaller = [one for one in found.points if one.gpus < best.gpus and not one.reason]
    assert all((one.in_time or 0.0) < chance for one in smaller)

    fixed = CalendarRequest(plan=replace(asked, gpus=best.gpus), deadline=days)
    assert fourfold.calendar(fixed).best == best
    planned = fourfold.plan(replace(asked, gpus=best.gpus, top=1)).ranked[0]
    assert (planned.training_s or 0.0) / 86400 == pytest.approx(best.days)
    assert (planned.training_s_high or 0.0) / 86400 == pytest.approx(best.days_high)
    assert planned.gpu_hours == pytest.approx(best.gpu_hours)
    half = CalendarRequest(plan=replace(asked, gpus=best.gpus, tokens=tokens // 2), deadline=days)
    assert (fourfold.calendar(half).points[0].in_time or 0.0) > best.in_time or best.in_time == 1.0


def test_a_budget_is_kept_and_may_be_too_small(cli: Cli) -> None:
    found = fourfold.calendar(CalendarRequest(plan=PLAN, budget=40_000, chance=0.7))
    assert (found.best.in_budget or 0.0) >= 0.7
    others = [one for one in found.points if (one.in_budget or 0.0) >= 0.7]
    assert found.best.days == min(one.days for one in others)
    asked = ["--model", "llama-3.2-1b", "--gpu", "h100-80gb", "--seq-len", "4096", "--tokens", "1T",
             "--global-batch", "512", "--price", "2", "--stack", "torchtitan", "--tp", "1",
             "--pp", "1", "--cp", "1", "--micro-batch", "4"]  # fmt: skip
    said = cli("plan", *asked, "--deadline", "9d", "--budget", "1k", status=1)
    assert "No number of GPUs trains 1.00T tokens" in said
    assert "9 days and a budget of 1,000" in said


def test_phases_of_a_file_add_up(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "training.toml"
    file.write_text(
        'model = "llama-3.2-1b"\ngpus = 64\ngpu = "h100-80gb"\nprice = 2.0\n'
        'stack = "megatron"\nlayout = "pp1 cp1 tp1"\n'
        "[batch]\nseq_len = 4096\nglobal_batch = 512\n"
        '[[phases]]\ntokens = "900B"\nramp = "128,128,512000"\n'
        '[[phases]]\ntokens = "100B"\nseq_len = 16384\nglobal_batch = 128\n'
        '[assumptions]\ndetect_s = "2min"\nspare_hosts = 2\n'
    )
    answer = cli.json("calendar", file)
    assert cli.json("calendar", "--spec", file) == answer
    (point,) = answer["points"]
    assert answer["tokens"] == 10**12
    assert len(point["layouts"]) == len(point["step_s"]) == 2
    assert answer["assumptions"]["detect_s"]["value"] == 120.0
    assert point["spare_hosts"] == 2
    assert sum(point["shares"].values()) == pytest.approx(1.0)
    alone = [
        fourfold.calendar(
            CalendarRequest(
                plan=PlanRequest(
                    model="llama-3.2-1b", gpu="h100-80gb", gpus=64, seq_len=4096, global_batch=512,
                    stack="megatron", layout="pp1 cp1 tp1",
                ),
                phases=(phase,),
                assumptions={"detect_s": 120, "spare_hosts": 2},
            )
        ).points[0]
        for phase in (
            TrainingPhase(tokens=900 * 10**9),
            TrainingPhase(tokens=100 * 10**9, seq_len=16384, global_batch=128),
        )
    ]  # fmt: skip
    assert point["days"] > sum(one.days for one in alone)  # small batches of the ramp cost more
    assert point["days"] == pytest.approx(sum(one.days for one in alone), rel=0.01)

    page = cli("calendar", file)
    assert "where the time goes" in page
    assert "assumed: detect_s=120" in page
    assert max(map(len, page.splitlines())) <= 140


def test_assumptions_are_listed_with_their_sources(cli: Cli) -> None:
    page = cli("calendar", "--assume", "list")
    assert "466 in 54 days" in page
    with pytest.raises(UserError, match="detect_s"):
        CalendarRequest(plan=PLAN, assumptions={"detect_s": -1}).assumed()


@pytest.mark.parametrize("failures", [1e3, 1e300])
def test_calendar_refuses_a_training_that_never_ends(failures: float) -> None:
    assumed = {"failures_per_gpu_day": failures}
    with pytest.raises(UserError, match="this training does not end"):
        fourfold.calendar(CalendarRequest(plan=replace(PLAN, gpus=64), assumptions=assumed))


def test_a_chance_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="needs a deadline or a budget"):
        CalendarRequest(plan=PLAN, chance=0.9)


def test_plan_and_calendar_count_the_same_gpu_hours_and_cost(cli: Cli) -> None:
    words = ["--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "16", "--seq-len", "8k",
             "--global-batch", "64", "--stack", "megatron", "--tokens", "1T"]  # fmt: skip
    point = cli.json("calendar", *words, "--price", "$2")["best"]
    answer = cli.json("plan", *words, "--price", "2 USD/h")
    row = answer["ranked"][0]
    assert point["gpu_hours"] == pytest.approx(row["gpu_hours"])
    assert point["cost"] == pytest.approx(row["cost"]) == pytest.approx(2 * row["gpu_hours"])
    assert point["goodput"] == pytest.approx(1 - answer["training"]["lost_share"])
    assert point["spare_cost"] == pytest.approx(point["cost"] / 2)  # one host beside two
    text = cli("calendar", *words, "--price", "2", "--deadline", "12 weeks")
    assert "within 84 days" in text
    spare_hours = f"{point['gpu_hours'] / 2:,.0f} GPU-hours"
    assert f"not counted: 1 spare host kept ready ({spare_hours}" in text
    assert f"goodput {100 * point['goodput']:.1f}%" in cli("plan", *words)
