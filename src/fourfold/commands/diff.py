"""Compare two stored runs: settings, environment, results, and whether the times differ.

A and B are run folders, or the start of a run's id in the store of --runs ('3fa2', or '3fa2#1' for
one repeat). Without '#' all repeats of a run count. The verdict needs repeats, of these runs or of
others on the same device; without any it is "can't tell".
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.bench import oom_page
from fourfold.show.table import Grid, Part
from fourfold.units import show_bytes, show_seconds
from fourfold.verbs.requests import RunFilter

EXAMPLES = """\
examples:
  fourfold diff 3fa2 91bc
  fourfold diff '3fa2#0' '3fa2#1' --format json
  fourfold diff runs/3fa2..._0 colleague/runs/3fa2..._0
"""
OPTIONS = (
    option("a", "a run", "A"),
    option("b", "another run", "B"),
    *options.of(RunFilter, "runs"),
    options.FORMAT,
)


def run(args: Any) -> Output:
    answer = fourfold.diff(args.a, args.b, store=args.runs or "runs", on_event=Stderr())
    return Output.of(answer, lambda: _page(answer))


def _page(answer: Any) -> list[Part]:
    rows = [["setting", name, _text(a), _text(b)] for name, a, b in answer.settings]
    rows += [["environment", name, _text(a), _text(b)] for name, a, b in answer.environment]
    rows += [["result", name, _told(name, a), _told(name, b)] for name, a, b in answer.result]
    headings = ["what", "name", f"A ({answer.names[0]})", f"B ({answer.names[1]})"]
    said = answer.verdict
    ratio = f"B takes {said.ratio:.4f} x A's time; " if said.ratio else ""
    parts: list[Part] = [Grid(headings, rows), "", f"{said.verdict}: {ratio}{said.why}"]
    for name, oom in answer.post_mortem.items():
        blank, moment, *tables = oom_page(oom)
        parts += [blank, f"{name.upper()} {moment}", *tables]
    return parts


def _text(value: Any) -> str:
    return "-" if value is None else str(value)[:60]


def _told(name: str, value: Any) -> str:
    if value is None or value == "":
        return "-"
    if name.startswith("link_"):
        return f"{value / 1e9:,.2f} GB/s"
    if name.endswith(("_s", "_low", "_high")):
        return show_seconds(value)
    if name.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
