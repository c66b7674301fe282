"""One self-contained HTML file: markup, style, scripts and data; nothing is fetched. Its name is
checked before minutes are spent on it; it is written whole, and shown in a browser.

The policy in the file's head names every script and style by its hash, so that no text of a run can
become one: what the browser was not given a hash for, it does not execute.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape
from importlib import resources, util
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.escape import json_text, visible
from fourfold.events import Event, OnEvent
from fourfold.text_table import Grid

CORE_SCRIPTS = ("core.js", "chart.js", "grid.js")
# plotly adds a style for maps under an id of 64 digits unless the page has one; it draws no maps.
_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
MARK = '<meta name="generator" content="fourfold">'


@cache
def plotly_script(field: str = "html") -> str:
    """The charting library as plotly's Python package has it; the package is not imported."""
    found = util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        raise UserError("needs plotly", field=field, hint="pip install 'fourfold[report]'")
    path = Path(next(iter(found.submodule_search_locations))) / "package_data" / "plotly.min.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"needs plotly's script, which cannot be read ({error.strerror})"
        hint = "pip install --force-reinstall plotly"
        raise UserError(rule, field=field, value=str(path), hint=hint) from None


@cache
def asset(name: str) -> str:
    return (resources.files("fourfold.page") / "files" / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def data_block(name: str, data: Any) -> str:
    """JSON that no script element ends early: every '<' is written as an escape."""
    text = json_text(data, indent=None).replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{name}">{text}</script>'


def document(
    *, title: str, body: str, data: Any, scripts: tuple[str, ...], connect: bool = False
) -> str:
    """The whole file. `body` is markup of this package; everything else is text and escaped.
    `connect`: of a server, which the page may ask for more."""
    plotly = plotly_script()
    texts = [plotly, *(asset(name) for name in (*CORE_SCRIPTS, *scripts))]
    style = asset("page.css")
    blank = "".join(f'<style id="{one}"></style>' for one in sorted({*_STYLE_ID.findall(plotly)}))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy(texts, [style, ""], connect)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(visible(title))}</title>
<style>{style}</style>{blank}
</head>
<body>
{body}
{data_block("data", data)}
{"".join(f"<script>{text}</script>" for text in texts)}
</body>
</html>
"""


def still_document(*, title: str, style: str, body: str, script: str = "") -> str:
    """A page that is complete without scripts; `script` may add to it. `body` is markup of this
    package, the title text."""
    policy = f"default-src 'none'; style-src {content_hash(style)}"
    if script:
        policy += f"; script-src {content_hash(script)}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style}</style></head><body>
{body}{f"<script>{script}</script>" if script else ""}</body></html>
"""


def grid_html(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in grid.headings)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in grid.rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def policy(scripts: list[str], styles: list[str], connect: bool) -> str:
    """plotly places its marks by style attributes, which carry no script."""
    allowed = " ".join(map(content_hash, scripts))
    asks = "connect-src 'self'; " if connect else ""
    worn = " ".join(map(content_hash, styles))
    return (
        f"default-src 'none'; {asks}script-src {allowed}; style-src-elem {worn}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def check_page(path: str, *, force: bool, charts: bool = True) -> None:
    """A page's name, what would be replaced, and (`charts`) the charting library."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        hint = "use a name like runs.html"
        raise UserError("must end in .html", field="html", value=path, hint=hint)
    files.require_mine(path, mark=MARK, force=force, field="html")
    if charts:
        plotly_script()


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
