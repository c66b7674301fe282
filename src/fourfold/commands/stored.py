"""Stored runs and published tables: listed, compared, printed, checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.cost.count.flops import DEFAULT, convention
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output, table_csv
from fourfold.result.files.run_file import INDEX, RUN_FILE
from fourfold.result.files.store import require_store
from fourfold.show.bench import page
from fourfold.show.runs import diff_page, runs_page
from fourfold.spec import check
from fourfold.tables.forms import write
from fourfold.text_table import Grid, Part
from fourfold.units import counted
from fourfold.verbs.requests import PlanRequest, ReportRequest, RunFilter, RunsRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments
    from fourfold.verbs.report import Findings, Report

_RUNS = """\
examples:
  fourfold runs
  fourfold runs --where 'tp == 2 and micro_batch > 1' --outcome ok --sort step_s
  fourfold runs --tag first-try --format json
  fourfold runs show 3fa2
"""


@command(
    option("run_id", "start of the run's id, or its folder", "RUN"),
    *options.of(RunsRequest, "runs"),
    *options.of(PlanRequest, "convention"),
    line="one run in full",
)
def show_one(args: Arguments, show: OnEvent) -> Output:
    """Print one run in full, as 'bench' does."""
    rule = convention(args.convention or DEFAULT).id
    answer = fourfold.show_run(args.run_id, store=args.runs or "runs", on_event=show)
    return Output.of(answer, lambda: page(answer, rule))


@command(*options.of(RunsRequest), examples=_RUNS, actions={"show": show_one})
def runs(args: Arguments, show: OnEvent) -> Output:
    """List stored runs with outcome, speed and memory; failed ones too.

    --where may use dp tp cp pp ep etp vp micro_batch global_batch seq_len gpus nodes layers hidden
    heads mem_gib step_s; a run without a value (a failed run has no step_s) does not match. 'runs
    show RUN' prints one run in full.
    """
    request = options.load(RunsRequest, args)
    require_store(request.runs)
    answer = fourfold.runs(request, on_event=show)
    return Output.of(answer, lambda: runs_page(answer, request.runs))


_DIFF = """\
examples:
  fourfold diff 3fa2 91bc
  fourfold diff '3fa2#0' '3fa2#1' --format json
  fourfold diff runs/3fa2..._0 colleague/runs/3fa2..._0
"""


@command(
    option("a", "a run", "A"),
    option("b", "another run", "B"),
    *options.of(RunFilter, "runs"),
    examples=_DIFF,
)
def diff(args: Arguments, show: OnEvent) -> Output:
    """Compare two stored runs: settings, environment, results, and whether the times differ.

    A and B are run folders, or the start of a run's id in the store of --runs ('3fa2', or '3fa2#1'
    for one repeat). Without '#' all repeats of a run count. The verdict needs repeats, of these
    runs or of others on the same device; without any it is "can't tell".
    """
    answer = fourfold.diff(args.a, args.b, store=args.runs or "runs", on_event=show)
    return Output.of(answer, lambda: diff_page(answer))


_REPORT = """\
examples:
  fourfold report --style topology
  fourfold report --style mpt --out results
  fourfold report --html runs.html --open
  fourfold report runs/ colleague/runs published.md --style scaling --format md
"""
# In Markdown the last line, in CSV the last column.
_MARKS = {"csv": ",about\n", "md": "Written by 'fourfold report'"}


@command(
    *options.of(ReportRequest),
    option("--out", "write NAME.csv and NAME.md", "NAME"),
    option("--html", "write one page with charts that opens anywhere", "FILE"),
    option("--open", "with --html: show the page in a browser", switch=True),
    options.FORCE,
    examples=_REPORT,
)
def report(args: Arguments, show: OnEvent) -> Output:
    """Print results in published styles, from stored runs and from files of tables.

    SOURCE is a store (a folder of runs) or a file of tables (.md, .csv); the default is the
    store of --runs. Styles: mpt, the 20 columns of the MPT benchmarks; topology, the columns of the
    BLOOM notes; scaling, TFLOP/s by layout and GPU count. A configuration measured more than once
    is shown with its newest figure, with the older ones below. The report ends with the accuracy of
    the predictions made before the runs. --out NAME writes NAME.csv and NAME.md; --html FILE writes
    one page with a table and charts that needs no network.
    """
    request = options.load(ReportRequest, args)
    check.that(not args.open or args.html, "--open", None, "needs --html", "add --html FILE")
    if args.html:
        from fourfold.page.report import write_report

        force, browser = bool(args.force), bool(args.open)
        answer = write_report(request, args.html, browser=browser, force=force, on_event=show)
    else:
        answer = fourfold.report(request, on_event=show)
    if args.out:
        _write_both(answer, args.out, bool(args.force), show)
    style = args.format or "text"
    quiet = args.out or args.html
    page = write(answer.document, style) if style in ("text", "md") and not quiet else ""
    if quiet and style != "json":
        return Output(raw="")
    return Output(answer.plain, answer.styled_rows, lambda: [page])


def _write_both(answer: Report, name: str, force: bool, show: OnEvent) -> None:
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


_LINT = """\
examples:
  fourfold lint results.md
  fourfold lint notes.md --format json
  fourfold lint results.csv --ignore memory-order --ignore heading-count
  fourfold lint --rules
"""


@command(
    option("files", "tables in .md or .csv", "FILE", nargs="*"),
    option("--ignore", "ignore a rule", "RULE", repeated=True),
    option("--rules", "list the rules and exit", switch=True),
    examples=_LINT,
)
def lint(args: Arguments, show: OnEvent) -> Output:
    """Find rows of published tables that cannot be right, and suggest the repair.

    Reads Markdown or CSV with tables of the MPT, topology, scaling and reference styles, any
    number of them in a file, with the text between. Exit code: 0 nothing found, 1 findings, 2 no
    table.
    """
    if args.rules:
        known = fourfold.lint_rules()
        return Output.of(known, lambda: [Grid(["rule", "what must hold"], [*known.rules.items()])])
    answer = fourfold.lint(args.files, ignored=args.ignore or ())
    status = 1 if answer.findings else 0
    return Output.of(answer, lambda: _page(answer, several=len(args.files) > 1), status=status)


def _page(answer: Findings, *, several: bool) -> list[Part]:
    if not answer.findings:
        return [f"nothing found; {answer.checked}"]
    rows = [
        [
            f"{path}: {item.place}" if several else item.place,
            item.rule,
            item.value,
            item.expected,
            item.repair,
        ]
        for path, item in answer.findings
    ]
    table = Grid(["where", "rule", "value", "expected", "repair"], rows)
    return [table, "", f"{counted(len(rows), 'finding')}; {answer.checked}"]
