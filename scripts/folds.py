"""How good are predictions where a stranger asks? Every kind of fold, and the weights of intervals.

    OMP_NUM_THREADS=1 python scripts/folds.py FOLDER

FOLDER holds the reference tables, which stay outside. Prints what `fourfold score --folds` prints
of them, as Markdown (about ten minutes of one core), and the weights of cost/fit/spread.py that the
folds would choose.
"""

from __future__ import annotations

import sys
from pathlib import Path

from famous import TABLES, famous_rows

from fourfold.commands.score import fold_tables
from fourfold.cost.fit.accuracy import left_out_by_kind
from fourfold.cost.fit.fold_scores import fold_scores
from fourfold.cost.fit.validate import fit_tables
from fourfold.cost.fit.widths import NAMES
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.rows import Rows, parse
from fourfold.show.table import render


def tables_of(folder: Path) -> list[Rows]:
    return [parse(read_table(folder / f"{name}.csv")) for name in TABLES] + [famous_rows(folder)[1]]


def main() -> None:
    tables = tables_of(Path(sys.argv[1]))
    _, widths = left_out_by_kind(
        tables, fit_tables(tables), lambda text: print(text, file=sys.stderr)
    )
    for grid in fold_tables(fold_scores(widths)):
        print(render(grid.headings, grid.rows, "md"), end="\n\n")
    print("weights these folds choose:")
    for name, value in zip(NAMES, widths.learned(), strict=True):
        print(f"  {name}: {value:.3f}")


if __name__ == "__main__":
    main()
