"""Fit the cost model to measured rows: a calibration for every stack and cluster in them.

At most 14 free numbers for time and 6 for memory per stack and cluster; priors keep what the rows
do not exercise at physical values (or at what --prior knows). The file stores coefficients,
residuals, row counts and cross-validated errors; 'predict', 'plan' and 'score' take it as
--calibration.

--suggest K fits nothing: it names the K runs of the table whose measurement would teach most. It
looks at configurations only, never at results.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.cost.fit.calibration import Calibration
    from fourfold.cost.table.rows import Rows

EXAMPLES = """\
examples:
  fourfold fit measured.csv --out mine.json
  fourfold fit measured.csv --prior mine.json --out better.json
  fourfold fit candidates.csv --suggest 10
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from fourfold.commands.flags import add_force, add_format

    parser.add_argument("rows", nargs="*", metavar="ROWS.csv", help="measured runs")
    parser.add_argument("--runs", metavar="DIR", help="also the run reports in this folder")
    parser.add_argument("--cluster", metavar="NAME", help="where those runs were made")
    parser.add_argument("--out", metavar="FILE", help="where the calibration goes (JSON)")
    parser.add_argument("--prior", metavar="FILE", help="a calibration to start from")
    parser.add_argument("--suggest", type=int, metavar="K", help="name the K most telling runs")
    parser.add_argument("--name", metavar="TEXT", help="name of the calibration")
    add_force(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    from fourfold import files
    from fourfold.cost.fit.calibration import MARK, load, shipped
    from fourfold.cost.table.reference import read_table
    from fourfold.cost.table.rows import parse
    from fourfold.errors import UserError

    tables = [parse(read_table(path)) for path in args.rows]
    if args.runs:
        from fourfold.cost.table.reports import report_rows
        from fourfold.result.files.store import to_stderr
        from fourfold.spec import catalog

        if not args.cluster:
            raise UserError(
                "is needed with --runs", field="--cluster", hint="name where the runs were made"
            )
        tables.append(report_rows(args.runs, catalog.cluster(args.cluster), to_stderr))
    if not tables:
        raise UserError(
            "nothing to fit", field="rows", hint="name a CSV of measured runs, or --runs DIR"
        )
    prior = load(args.prior) if args.prior else None
    if args.suggest is not None:
        return _suggest(tables, prior or shipped(), args)
    if not args.out:
        raise UserError("is needed", field="--out", hint="--out mine.json")
    files.require_mine(args.out, mark=MARK, force=args.force)
    return _fit(tables, prior, args)


def _fit(tables: list[Rows], prior: Calibration | None, args: argparse.Namespace) -> int:
    from fourfold import files
    from fourfold.cost.fit.calibration import to_json
    from fourfold.cost.fit.evidence import calibrate
    from fourfold.cost.fit.fit import sample
    from fourfold.errors import UserError
    from fourfold.show.table import json_text, render

    if not len(sample(tables)):
        raise UserError(
            "no row has a measured step time, memory or an out-of-memory",
            field="rows",
            hint="fill step_s, mem_gb or status",
        )
    name = args.name or "+".join(table.table.name for table in tables)
    found = calibrate(tables, name=name, prior=prior, tell=lambda m: print(m, file=sys.stderr))
    files.write_text(args.out, to_json(found))
    headings = ("stack", "cluster", "rows", "free", "median %", "cv median %", "cv p90 %")
    cells = [
        (e.stack, e.cluster, str(e.rows_time), f"{len(e.free_time)}+{len(e.free_memory)}",
         *(_pct(e.errors_pct.get(n)) for n in ("median", "cv_median", "cv_p90")))
        for e in found.entries
    ]  # fmt: skip
    if args.format == "json":
        print(json_text({"out": args.out, "entries": [
            {"stack": e.stack, "cluster": e.cluster, "rows": e.rows_time,
             "free_time": list(e.free_time), "free_memory": list(e.free_memory),
             **{f"{n}_pct": v for n, v in e.errors_pct.items()}}
            for e in found.entries]}))  # fmt: skip
    else:
        print(render(headings, cells, args.format))
    print(f"written to {args.out}", file=sys.stderr)
    return 0


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _suggest(tables: list[Rows], prior: Calibration, args: argparse.Namespace) -> int:
    import numpy as np

    from fourfold.cost.fit.suggest import suggest
    from fourfold.errors import UserError
    from fourfold.show.table import json_text, render
    from fourfold.spec.catalog import generation_of

    if args.suggest < 1:
        raise UserError("must be at least 1", field="--suggest", value=args.suggest)
    shown = ("row_id", "stack", "cluster", "model", "seq_len", "n_gpus", "tp", "cp", "pp", "dp",
             "mbs", "gbs", "sharding", "act_ckpt")  # fmt: skip
    picks: list[tuple[str, ...]] = []
    for rows in tables:
        pairs = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
        for stack, cluster in sorted(pairs):
            mask = rows.usable & (rows.stack == stack) & (rows.cluster == cluster)
            index = np.flatnonzero(mask)
            if not index.size:
                continue
            entry, _ = prior.entry(stack, cluster, generation_of(str(rows.hardware[index][0])))
            for place in suggest(rows.columns.take(index), entry, args.suggest):
                picks.append(tuple(rows.table.column(n)[index[place]] for n in shown))
    if args.format == "json":
        print(json_text({"suggested": [dict(zip(shown, p, strict=True)) for p in picks]}))
    else:
        print(render(shown, picks, args.format))
    return 0
