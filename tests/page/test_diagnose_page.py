"""The page of a diagnosis in a real browser: the timeline is zoomed and moved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold import cli
from tests.traces import simulated
from tests.traces.simulated import Shape

TITLE = re.compile(r"(?P<part>.*): (?P<ms>[\d.]+) ms at (?P<at>[\d.]+) ms")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnose")
    (folder / "trace.json").write_text(json.dumps(simulated.slower(Shape(), loader_s=0.02)))
    page = folder / "page.html"
    assert cli.main(["diagnose", str(folder / "trace.json"), "--html", str(page)]) == 0
    return page


def spans(shown: Any) -> list[tuple[str, float, float]]:
    """Of what is drawn: (part, ms, at ms)."""
    titles = shown.page.locator("#spans title").all_text_contents()
    found = [TITLE.fullmatch(title) for title in titles]
    return [(m["part"], float(m["ms"]), float(m["at"])) for m in found if m]


def limits(shown: Any) -> tuple[float, float]:
    """Of what is in sight, in ms."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", shown.text("#range"))]
    return (numbers[0], numbers[1]) if len(numbers) == 3 else (0.0, numbers[0])


def test_wheel_zooms_into_the_instant_under_the_pointer(view, page_file) -> None:
    shown = view(page_file)
    all_spans, (_, total) = spans(shown), limits(shown)
    assert sum(ms for _, ms, _ in all_spans) == pytest.approx(total, abs=0.1)
    box = shown.page.locator("#timeline").bounding_box()
    shown.page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 20)
    for _ in range(10):
        shown.page.mouse.wheel(0, -200)
        shown.settled()
    low, high = limits(shown)
    assert high - low < 0.02 * total
    assert low < 0.75 * total < high
    assert all(at + ms >= low - 0.1 and at <= high + 0.1 for _, ms, at in spans(shown))
    known = {part for part, _, _ in all_spans}
    assert {part for part, _, _ in spans(shown)} <= known


def test_keys_and_dragging_move_what_is_in_sight(view, page_file) -> None:
    shown = view(page_file)
    timeline, (_, total) = shown.page.locator("#timeline"), limits(shown)
    timeline.focus()
    for key in ("+", "+", "ArrowRight"):
        shown.page.keyboard.press(key)
        shown.settled()
    low, high = limits(shown)
    assert (low / total, high / total) == pytest.approx((7 / 16, 11 / 16), abs=0.01)
    box = timeline.bounding_box()
    shown.page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 20)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 20, steps=5)
    shown.page.mouse.up()
    shown.settled()
    moved = limits(shown)
    assert moved[0] / total == pytest.approx(5 / 16, abs=0.01)
    shown.page.keyboard.press("0")
    shown.settled()
    assert limits(shown) == (0.0, total)


def test_page_without_scripts_shows_the_step(view, chromium, page_file) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("#spans rect").count() > 10
    context.close()
