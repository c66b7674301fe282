"""Print results in published styles, from stored runs and from files of tables.

SOURCE is a store (a folder of runs) or a file of tables (.md, .csv, .json); the default is the
store of --runs. Styles: mpt, the 20 columns of the MPT benchmarks; topology, the columns of the
BLOOM notes; scaling, TFLOP/s by layout and GPU count. A configuration measured more than once is
shown with its newest figure, with the older ones below. The report ends with the accuracy of the
predictions made before the runs. --out NAME writes NAME.csv and NAME.md; --html FILE writes one
page with a table and charts that needs no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output, table_csv
from fourfold.result.files.run_file import INDEX, RUN_FILE
from fourfold.spec import check
from fourfold.tables.forms import write
from fourfold.verbs.requests import ReportRequest

EXAMPLES = """\
examples:
  fourfold report --style topology
  fourfold report --style mpt --out results
  fourfold report --html runs.html --open
  fourfold report runs/ colleague/runs published.md --style scaling --format md
"""
OPTIONS = (
    *options.of(ReportRequest),
    option("--out", "write NAME.csv and NAME.md", "NAME"),
    option("--html", "write one page with charts that opens anywhere", "FILE"),
    option("--open", "with --html: show the page in a browser", switch=True),
    options.FORCE,
    options.FORMAT,
)
# In Markdown the last line, in CSV the last column.
_MARKS = {"csv": ",about\n", "md": "Written by 'fourfold report'"}


def run(args: Any, show: OnEvent) -> Output:
    request = options.load(ReportRequest, args)
    check.that(not args.open or args.html, "--open", None, "needs --html", "add --html FILE")
    answer = _paged(args, request, show) if args.html else fourfold.report(request, on_event=show)
    if args.out:
        _write_both(answer, args.out, bool(args.force), show)
    style = args.format or "text"
    quiet = args.out or args.html
    page = write(answer.document, style) if style in ("text", "md") and not quiet else ""
    if quiet and style != "json":
        return Output(raw="")
    return Output(answer.plain, answer.styled_rows, lambda: [page])


def _paged(args: Any, request: ReportRequest, show: OnEvent) -> Any:
    from fourfold.page.document import check_page, write_page
    from fourfold.page.report import report_page
    from fourfold.page.run_details import report_command

    check_page(args.html, force=bool(args.force))
    answer = fourfold.report(request, on_event=show)
    text = report_page(answer, command=report_command(request))
    write_page(args.html, text, on_event=show, browser=bool(args.open))
    return answer


def _write_both(answer: Any, name: str, force: bool, show: OnEvent) -> None:
    stem = name.removesuffix(".csv").removesuffix(".md")
    is_name = Path(stem).name not in ("", INDEX, RUN_FILE)
    check.that(is_name, "out", name, "must be a file name", "use a name such as results")
    for ending, mark in _MARKS.items():  # both or none: asked before the first is written
        files.require_mine(f"{stem}.{ending}", mark=mark, force=force)
    page = write(answer.document, "md").rstrip("\n")
    texts = {"csv": table_csv(answer.styled_rows()), "md": f"{page}\n{_MARKS['md']}\n"}
    for ending, text in texts.items():
        files.write_text(f"{stem}.{ending}", text)
        show(Event(f"wrote {stem}.{ending}"))
