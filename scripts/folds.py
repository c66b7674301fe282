"""How good are predictions where a stranger asks? Every kind of fold, and widths of intervals.

    OMP_NUM_THREADS=1 python scripts/folds.py FOLDER

FOLDER holds the reference tables, which stay outside. Prints what `fourfold score --folds` prints
of them, as Markdown (about two minutes of one core), and by what the factors of intervals
(cost/fit/interval.py, cost/fit/calibration.py) would have to be multiplied to hold 82% of the rows
of a kind, sources alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from fit_tables import tables_of

from fourfold.commands.fit import fold_tables
from fourfold.cost.fit.accuracy import Result, study, timed_rows
from fourfold.cost.fit.calibration import shipped
from fourfold.cost.fit.fit import HOLD
from fourfold.cost.fit.folds import KINDS
from fourfold.text_table import render
from fourfold.verbs.fit import Scores


def factor(results: list[Result]) -> float:
    """By which half widths hold that share of the rows."""
    needed, weights = [], []
    for one in results:
        at = one.within & timed_rows(one.rows, one.answers)
        error = np.log(one.rows.step_s[at] / one.answers.step_s[at])
        ends = np.where(error > 0, one.answers.high_s[at], one.answers.low_s[at])
        needed.append(error / np.log(ends / one.answers.step_s[at]))
        weights.append(np.full(at.sum(), 1.0 / max(1, at.sum())))
    ratio, weight = np.concatenate(needed), np.concatenate(weights)
    order = np.argsort(ratio)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(ratio[order][np.searchsorted(share, HOLD)])


def main() -> None:
    tables = tables_of(Path(sys.argv[1]))
    found = study(
        tables, shipped(), asked=["folds"], tell=lambda text: print(text, file=sys.stderr)
    )
    for grid in fold_tables(Scores.of_results(found, pairs=False)):
        print(render(grid.headings, grid.rows, "md"), end="\n\n")
    for kind in KINDS:
        print(f"{kind}: {factor([one for one in found if one.how == kind]):.2f}")


if __name__ == "__main__":
    main()
