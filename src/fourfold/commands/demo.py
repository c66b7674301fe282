"""Calibrate, plan and measure a small model on this machine, in about two minutes.

Measures the machine briefly, plans a small model on it, runs the best layouts for a few steps, and
compares predicted with measured times. On a CPU four ranks share the cores (gloo); with GPUs each
GPU is one rank (NCCL). The runs and a page with charts of them are left in a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fourfold
from fourfold import options
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.runs import demo_page
from fourfold.verbs.requests import ReportRequest

EXAMPLES = """\
examples:
  fourfold demo --open
  fourfold demo --layouts 2 --steps 4
"""
OPTIONS = (
    option("--layouts", "layouts to run (default 3)", "N", read=int),
    option("--steps", "timed steps per layout (default 6)", "N", read=int),
    option("--out", "folder for the runs and their page (default fourfold-demo)", "FOLDER"),
    option("--open", "show the page in a browser", switch=True),
    options.FORMAT,
)
PAGE, RUNS = "demo.html", "runs"


def run(args: Any, show: OnEvent) -> Output:
    out = Path(args.out or "fourfold-demo")
    given = options.given(args, "layouts", "steps")
    answer = fourfold.demo(**given, store=str(out / RUNS), on_event=show)
    for row in answer.runs:
        if row.failure:
            show(Event(f"{row.layout} {row.outcome}: {row.failure}"))
    _write_page(out, show, browser=bool(args.open))
    all_ok = all(row.outcome == "ok" for row in answer.runs)
    return Output.of(answer, lambda: demo_page(answer), status=0 if all_ok else 1)


def _write_page(out: Path, show: OnEvent, *, browser: bool) -> None:
    """Of this demo's runs and earlier ones; without plotly the demo has only its table."""
    from fourfold.page.document import check_page, write_page
    from fourfold.page.report import report_page
    from fourfold.page.run_details import report_command

    request = ReportRequest(runs=str(out / RUNS))
    path = str(out / PAGE)
    try:
        check_page(path, force=False)
    except UserError as error:
        show(Event(f"no page: {error}", "warning"))
        return
    text = report_page(fourfold.report(request), command=report_command(request))
    write_page(path, text, on_event=show, browser=browser)
