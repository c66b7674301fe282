"""A real browser for the pages: Debian's chromium, driven by playwright. Where either is missing
the tests are skipped; with FOURFOLD_BROWSER=1 (as .ci/run sets it) they must run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MUST = os.environ.get("FOURFOLD_BROWSER") == "1"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


def _missing() -> str:
    try:
        import playwright.sync_api  # noqa: F401
        import plotly  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if CHROMIUM else "no chromium is installed (Debian: apt-get install chromium)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = _missing()
    for item in items:
        if (
            why
            and not MUST
            and HERE in item.path.parents
            and "view" in getattr(item, "fixturenames", ())
        ):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    assert not _missing(), _missing()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=0)
        yield browser
        browser.close()


class View:
    """A page and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page, self.problems, self.requests = page, [], []
        page.set_default_timeout(0)  # a busy machine is no fault: only the limit of a test ends it
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.add_init_script((HERE / "marks.js").read_text())

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def open(self, address: Path | str) -> View:
        self.page.goto(address if isinstance(address, str) else address.as_uri())
        return self.settled()

    def settled(self) -> View:
        """Until every chart in sight is drawn."""
        self.page.wait_for_selector("html[data-drawn=yes]", state="attached")
        return self

    def marks(self, chart: str) -> dict[str, Any]:
        """What is drawn in a chart, as places of marks and ticks; see marks.js."""
        self.page.locator(f"#{chart}").scroll_into_view_if_needed()
        # A chart out of sight keeps its old drawing until the browser reports it in sight.
        self.page.wait_for_selector(f"#{chart}[data-drawn=yes]", state="attached")
        self.page.wait_for_selector(f"#{chart} .plot svg.main-svg", state="attached")
        return self.page.evaluate("id => drawnMarks(document.getElementById(id))", chart)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()


@pytest.fixture(scope="module")
def view(chromium: Any) -> Iterator[Any]:
    """Makes views of a width and a theme. At the end: nothing was wrong, nothing was fetched."""
    opened: list[tuple[Any, View]] = []

    def make(address: Path | str, *, width: int = 1280, dark: bool = False) -> View:
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            is_mobile=width < 600,
            has_touch=width < 600,
        )
        shown = View(context.new_page())
        opened.append((context, shown))
        return shown.open(address)

    yield make
    for context, shown in opened:
        context.close()
        assert shown.problems == []
        assert all(
            url.startswith(("file:", "http://127.0.0.1", "data:", "blob:"))
            for url in shown.requests
        )
