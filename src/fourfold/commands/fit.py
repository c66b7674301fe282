"""Fit the cost model to measured runs: a calibration for every stack and cluster.

At most 14 coefficients for time and 6 for memory are free per stack and cluster; priors keep the
others at physical values (or at those of --prior). The file stores coefficients,
residuals, row counts and cross-validated errors; 'predict', 'plan' and 'score' take it as
--calibration.

--suggest K fits nothing: it names the K runs of the table that are most informative to measure. It
uses configurations only, never results.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.errors import UserError
from fourfold.events import Event
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part

EXAMPLES = """\
examples:
  fourfold fit measured.csv --out mine.json
  fourfold fit measured.csv --prior mine.json --out better.json
  fourfold fit candidates.csv --suggest 10
"""
OPTIONS = (
    option("rows", "measured runs", "ROWS.csv", nargs="*"),
    option("--runs", "also use the runs of this store", "DIR"),
    option("--cluster", "cluster of those runs", "NAME"),
    option("--out", "file for the calibration (JSON)", "FILE"),
    option("--prior", "calibration to start from", "FILE"),
    option("--suggest", "suggest the K most informative runs", "K", read=int),
    option("--name", "name of the calibration", "TEXT"),
    options.FORCE,
    options.FORMAT,
)
_MARK = '"type": "Calibration"'


def run(args: Any) -> Output:
    show = Stderr()
    source = {"runs": args.runs, "cluster": args.cluster, "prior": args.prior, "on_event": show}
    if args.suggest is not None:
        picks = fourfold.suggest_runs(args.rows, args.suggest, **source)
        return Output.of(picks, lambda: [_suggested(picks.table)])
    if not args.out:
        raise UserError("is required", field="out")
    files.require_mine(args.out, mark=_MARK, force=bool(args.force))
    answer = fourfold.fit(args.rows, name=args.name, **source)
    files.write_text(args.out, answer.json())
    show(Event(f"written to {args.out}"))
    plain = {"out": args.out, "entries": answer.rows()}
    return Output(lambda: plain, answer.rows, lambda: [_entries(answer.rows())])


def _entries(rows: list[dict[str, Any]]) -> Part:
    headings = ["stack", "cluster", "rows", "free", "median %", "cv median %", "cv p90 %"]
    cells = [
        [e["stack"], e["cluster"], str(e["rows"]),
         f"{len(e['free_time'])}+{len(e['free_memory'])}",
         *(_pct(e.get(f"{n}_pct")) for n in ("median", "cv_median", "cv_p90"))]
        for e in rows
    ]  # fmt: skip
    return Grid(headings, cells)


def _suggested(rows: list[dict[str, Any]]) -> Part:
    return Grid([*rows[0]] if rows else ["row_id"], [[*map(str, row.values())] for row in rows])


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
