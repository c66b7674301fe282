"""Score predictions against measured tables: error, bias, ranking, regret, fit, coverage.

Without a switch the calibration is used as it is (in-sample for rows it was fitted on). --cv
refits with each fold of layouts held out, --leave-out predicts each table from the others alone,
--few-shot fits the 10 runs per stack and cluster that 'fit --suggest' names. A source is one file.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.cost.fit.accuracy import Score

EXAMPLES = """\
examples:
  fourfold score tests/golden/mpt.csv tests/golden/bloom.csv
  fourfold score FOLDER/*.csv --cv --leave-out --few-shot --picture accuracy.png --format md
"""
HEADINGS = (
    "how", "source", "rows", "median %", "p90 %", "bias %", "in interval %", "rank corr.",
    "regret %", "groups", "memory %", "fit %", "refused %", "missed %", "tight %",
    "free",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from fourfold.commands.flags import add_format

    parser.add_argument("rows", nargs="+", metavar="ROWS.csv", help="measured runs, one per source")
    parser.add_argument("--calibration", metavar="FILE", help="default: the shipped one")
    parser.add_argument("--cv", action="store_true", help="cross-validated by layout")
    parser.add_argument("--leave-out", action="store_true", help="each source from the others")
    parser.add_argument("--few-shot", action="store_true", help="10 chosen rows per cluster")
    parser.add_argument("--picture", metavar="FILE.png", help="predicted against measured")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    from fourfold.cost.fit.accuracy import study
    from fourfold.cost.fit.calibration import load, shipped
    from fourfold.cost.table.reference import read_table
    from fourfold.cost.table.rows import parse
    from fourfold.show.table import json_text, render

    tables = [parse(read_table(path)) for path in args.rows]
    calibration = load(args.calibration) if args.calibration else shipped()
    asked = [
        name
        for name, on in (
            ("cv", args.cv),
            ("leave-out", args.leave_out),
            ("few-shot", args.few_shot),
        )
        if on
    ]
    results = study(
        tables, calibration, asked=asked, tell=lambda text: print(text, file=sys.stderr)
    )
    if args.picture:
        from fourfold.show.accuracy import draw

        draw(results, args.picture)
        print(f"picture in {args.picture}", file=sys.stderr)
    if args.format == "json":
        print(json_text({"scores": [_plain(r.how, r.score, r.free) for r in results]}))
    else:
        cells = [_cells(r.how, r.score, r.free) for r in results]
        print(render(HEADINGS, cells, args.format))
    return 0


def _cells(how: str, score: Score, free: str) -> tuple[str, ...]:
    return (
        how, score.source, str(score.rows), _one(score.median_pct), _one(score.p90_pct),
        _one(score.bias_pct), _one(score.coverage_pct, 0), _one(score.rank_correlation, 2),
        _one(score.regret_pct, 2), str(score.groups), _one(score.memory_pct), _one(score.fit_pct),
        _one(score.refused_pct), _one(score.missed_pct), _one(score.tight_pct), free,
    )  # fmt: skip


def _one(value: float, digits: int = 1) -> str:
    return "-" if value != value else f"{value:.{digits}f}"


def _plain(how: str, score: Score, free: str) -> dict[str, object]:
    from dataclasses import asdict

    cells = {n: (None if v != v else v) for n, v in asdict(score).items()}
    return {"how": how, **cells, "free_parameters": free}
