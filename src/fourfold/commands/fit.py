"""Fit the cost model to measured runs: a calibration for every stack and cluster.

At most 14 coefficients for time and 6 for memory are free per stack and cluster; priors keep the
others at physical values (or at those of --prior). The file stores coefficients, residuals, row
counts and cross-validated errors; 'predict', 'plan' and 'score' take it as --calibration.

--suggest K fits nothing: it names the K runs of the table that are most informative to measure. It
uses configurations only, never results.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.table import Grid, named, table
from fourfold.spec import check
from fourfold.verbs.requests import FitRequest

EXAMPLES = """\
examples:
  fourfold fit measured.csv --out mine.json
  fourfold fit measured.csv --prior mine.json --out better.json
  fourfold fit candidates.csv --suggest 10
"""
OPTIONS = (
    *options.of(FitRequest),
    option("--out", "file for the calibration (JSON)", "FILE"),
    options.FORCE,
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    request = options.load(FitRequest, args)
    if request.suggest is not None:
        picks = fourfold.suggest_runs(request, on_event=show)
        rows = [[*map(str, row.values())] for row in picks.suggested]
        names = [*picks.suggested[0]] if rows else ["row_id"]
        return Output.of(picks, lambda: [Grid(names, rows)])
    check.given(args.out, "out")
    files.require_mine(args.out, mark='"type": "Calibration"', force=bool(args.force))
    answer = fourfold.fit(request, on_event=show)
    files.write_text(args.out, answer.json())
    show(Event(f"written to {args.out}"))
    plain = {"out": args.out, **answer.plain()}
    return Output(lambda: plain, answer.rows, lambda: [_entries(answer.rows())])


def _entries(rows: list[dict[str, Any]]) -> Grid:
    return table(
        rows,
        *named("stack", "cluster", "rows"),
        ("free", lambda e: f"{len(e['free_time'])}+{len(e['free_memory'])}"),
        *named("cv median %=cv_median_pct:.1f", "cv p90 %=cv_p90_pct:.1f"),
    )
