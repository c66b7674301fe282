"""Score predictions against measured tables: error, bias, ranking, regret, fit, coverage.

Without a switch the calibration is used as it is (in-sample for rows it was fitted on). --cv
refits with each fold of layouts held out, --leave-out predicts each table from the others alone,
--few-shot fits the 10 runs per stack and cluster that 'fit --suggest' names. A source is one file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fourfold
from fourfold import options
from fourfold.events import Event
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show.accuracy import draw
from fourfold.show.table import Grid

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
OPTIONS = (
    option("rows", "measured runs, one per source", "ROWS.csv", nargs="+"),
    option("--calibration", "default: the shipped one", "FILE"),
    option("--cv", "cross-validated by layout", switch=True),
    option("--leave-out", "predict each source from the others", switch=True),
    option("--few-shot", "fit 10 chosen runs per stack and cluster", switch=True),
    option("--picture", "predicted against measured", "FILE.png"),
    options.FORMAT,
)


def run(args: Any) -> Output:
    show = Stderr()
    ways = {"cv": args.cv, "leave-out": args.leave_out, "few-shot": args.few_shot}
    how = [name for name, is_asked in ways.items() if is_asked]
    answer = fourfold.score(args.rows, calibration=args.calibration, how=how, on_event=show)
    if args.picture:
        draw(list(answer.results), args.picture)
        show(Event(f"picture in {args.picture}"))
    cells = [_cells(one.how, one.score, one.free) for one in answer.results]
    return Output.of(answer, lambda: [Grid(HEADINGS, cells)])


def _cells(how: str, score: Score, free: str) -> tuple[str, ...]:
    return (
        how, score.source, str(score.rows), _one(score.median_pct), _one(score.p90_pct),
        _one(score.bias_pct), _one(score.coverage_pct, 0), _one(score.rank_correlation, 2),
        _one(score.regret_pct, 2), str(score.groups), _one(score.memory_pct), _one(score.fit_pct),
        _one(score.refused_pct), _one(score.missed_pct), _one(score.tight_pct), free,
    )  # fmt: skip


def _one(value: float, digits: int = 1) -> str:
    return "-" if value != value else f"{value:.{digits}f}"
