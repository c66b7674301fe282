"""Where a page goes: checked before minutes are spent on it, written whole, shown in a browser."""

from __future__ import annotations

from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.page.document import MARK, plotly_script


def check_page(path: str, *, force: bool, field: str = "html") -> None:
    """A page's name, what would be replaced, and the charting library."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise UserError(
            "must end in .html", field=field, value=path, hint="use a name like runs.html"
        )
    files.require_mine(path, mark=MARK, force=force, field=field)
    plotly_script(field)


def write_page(path: str, text: str, *, on_event: OnEvent, browser: bool = False) -> None:
    files.write_text(path, text, field="html")
    on_event(Event(f"page: {path} ({len(text.encode()) / 1e6:.1f} MB)"))
    if browser:
        show_page(path, on_event)


def show_page(path: str, on_event: OnEvent) -> None:
    """In this machine's browser; where there is none, that is said."""
    import webbrowser

    try:
        shown = webbrowser.open(Path(path).absolute().as_uri())
    except webbrowser.Error:
        shown = False
    if not shown:
        on_event(Event(f"no browser was found here; open {Path(path).absolute()} in one"))
