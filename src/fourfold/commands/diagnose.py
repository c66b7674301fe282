"""Tell why a traced run is slower than it should be: measured and expected seconds by part, causes
and remedies.

TRACE is a PyTorch profiler trace (Chrome JSON, plain or gzip), an nsys export (SQLite), or a folder
of ranks. Settings are read off the trace, each with its evidence; flags overrule them. Expected
seconds are the planner's for the same run on the same GPU, with an 80% interval.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.page.diagnose import diagnosis_page
from fourfold.page.document import check_page, write_page
from fourfold.show.diagnose import page
from fourfold.verbs.requests import DiagnoseRequest

EXAMPLES = """\
examples:
  fourfold diagnose trace.json.gz
  fourfold diagnose traces/ --what-if recompute=none --what-if micro_batch=2 --fix all
  fourfold diagnose rank0.json.gz --html diagnosis.html
  fourfold bench ... --trace own.json.gz && fourfold diagnose own.json.gz
"""
OPTIONS = (
    option("traces", "traces of one run: files, or a folder of ranks", "TRACE", nargs="+"),
    *options.of(DiagnoseRequest),
    option("--spec", "the run as a TOML file, where it is known", "FILE"),
    option("--settings", "also show every setting with its evidence", switch=True),
    option("--html", "write one page: bars and a timeline of a step", "FILE"),
    options.FORCE,
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    table = options.run_table(args) if args.spec else {}
    if args.html:
        check_page(args.html, force=bool(args.force), charts=False)
    request = options.load(DiagnoseRequest, args, spec=table)
    answer = fourfold.diagnose(args.traces, request, on_event=show)
    if args.html:
        write_page(args.html, diagnosis_page(answer), on_event=show)
    return Output.of(answer, lambda: page(answer, settings=bool(args.settings)))
