"""The page of a plan in a real browser: bars with error bars, limits, settings to copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import cli

from .reading import Axis, name_at
from .test_report_page import violations

ASKED = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100-80gb", "--gpus", "16", "--seq-len",
         "8192", "--global-batch", "128", "--stack", "megatron", "--tokens",
         "1000000000000", "--price", "2.5"]  # fmt: skip
GIB = 2**30


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    assert cli.main([*ASKED, "--html", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def answer() -> dict:
    import fourfold
    from fourfold.verbs.requests import PlanRequest

    return fourfold.plan(
        PlanRequest(
            model="llama-3.1-8b", gpu="h100-80gb", gpus=16, seq_len=8192, global_batch=128,
            stack="megatron", tokens=10**12, price=2.5,
        )
    )  # fmt: skip


def test_layouts_are_bars_with_intervals(view, page_file, answer) -> None:
    shown = view(page_file)
    for chart, unit, value, low, high in (
        ("steps", 1.0, "step_s", "step_s_low", "step_s_high"),
        ("memory", GIB, "peak_bytes", "peak_bytes_low", "peak_bytes_high"),
    ):
        marks = shown.marks(chart)
        x = Axis(marks["xticks"])
        ends = {name_at(marks["yticks"], py): x.value(px) for px, py in marks["points"]}
        spans = {
            name_at(marks["yticks"], (top + bottom) / 2): (x.value(left), x.value(right))
            for left, top, right, bottom in marks["errors"]
        }
        bars: dict[str, float] = {}
        for _, top, right, bottom in marks["bars"]:
            name = name_at(marks["yticks"], (top + bottom) / 2)
            bars[name] = max(bars.get(name, 0.0), x.value(right))
        assert len(ends) == len(answer.ranked)
        for row in answer.ranked:
            name = f"#{row.rank} {row}"
            near = 2.5 * x.pixel
            assert ends[name] == pytest.approx(getattr(row, value) / unit, abs=near)
            assert bars[name] == pytest.approx(getattr(row, value) / unit, abs=near)
            assert spans[name][0] == pytest.approx(getattr(row, low) / unit, abs=near)
            assert spans[name][1] == pytest.approx(getattr(row, high) / unit, abs=near)


def test_the_page_says_the_answer_and_how_to_run_it(view, page_file, answer) -> None:
    shown = view(page_file, width=390, dark=True)
    assert f"as {answer.best}, micro batch" in shown.text("#answer")
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.text("#command pre") == " ".join(["fourfold", *ASKED[:3], *ASKED[5:11],
                                                   *ASKED[3:5], *ASKED[11:]])  # fmt: skip
    engines = shown.page.locator("#exports summary").all_inner_texts()
    assert [name.partition(":")[0] for name in engines] == [
        "megatron", "torchtitan", "torchtitan-0.2", "torchrun",
    ]  # fmt: skip
    shown.page.locator("#exports summary").first.click()
    assert "--tensor-model-parallel-size" in shown.text("#exports pre >> nth=0")
    assert shown.page.locator("#grid tbody tr").count() == len(answer.ranked)
    assert violations(shown.page) == []


def test_a_plan_that_fits_nowhere_still_makes_a_page(view, tmp_path) -> None:
    page = tmp_path / "none.html"
    words = ["plan", "--model", "llama-3.1-405b", "--gpu", "h100-80gb", "--gpus", "8", "--seq-len",
             "8192", "--global-batch", "8", "--stack", "megatron"]  # fmt: skip
    assert cli.main([*words, "--html", str(page)]) == 1
    assert "No layout fits" in view(page).text("#answer")


def test_timelines_have_every_action() -> None:
    from fourfold.page.run_details import draw_runs

    from .sample import specs

    piped = next(
        spec
        for spec in specs(60)
        if spec.layout.pp == 4 and spec.batch.micro_count(spec.layout.dp) <= 64
    )
    (drawing,) = draw_runs([piped], ["NVIDIA H100 80GB HBM3"], most_events=10_000)
    micros = piped.batch.micro_count(piped.layout.dp)
    data = drawing["timeline"]
    assert len(data["events"]) == 2 * 4 * micros
    assert max(event[5] for event in data["events"]) == 1_000_000
    assert [name for name, _ in drawing["stages"]] == [
        "stage 0", "fullest of stages 1 to 2", "stage 3",
    ]  # fmt: skip


def test_the_page_says_what_is_planned_and_compares(view, page_file, answer) -> None:
    shown, best = view(page_file), answer.best
    facts = shown.text("#facts")
    assert "8.03 billion parameters: 32 layers, hidden 4,096" in facts
    assert "16 GPUs, 2 hosts of 8 x NVIDIA H100" in facts
    assert "1,000 billion tokens" in facts
    assert f"{best.cost:,.0f} (80%: " in facts
    assert "in the currency of the price, 2.5 per GPU-hour" in facts
    words = shown.text("#words")
    assert all(word in words for word in str(best.layout).split())
    engines = [
        cell.inner_text() for cell in shown.page.locator("#engine-grid td:nth-child(1)").all()
    ]
    assert {"megatron", "torchtitan", "torchrun"} <= set(engines)
    sizes = shown.page.evaluate("F.data.sizes.map((one) => [one.gpus, one.step_s])")
    assert [16, best.step_s] in sizes
    assert min(gpus for gpus, _ in sizes) < 16
    assert shown.marks("sizes")["lines"] == 2
