"""Rows that the shipped calibration is fitted to, of a folder with the reference tables.

    python scripts/fit_tables.py FOLDER OUT    writes the tables of which only some rows are

FOLDER holds the reference tables, which stay outside. Of famous runs, figures that are bounds teach
nothing; of newer4 neither steps under a profiler (ccl_search) nor runs of a GPU, a model or a power
limit that the collector had to guess; of our H200's rows those that a draw keeps apart stay unseen.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from famous import TABLES, famous_rows, written_rows

from fourfold.cost.fit.validate import only
from fourfold.cost.table.reference import RowTable, read_table
from fourfold.cost.table.rows import Rows
from fourfold.search.rows.read import parse

H200 = Path(__file__).parents[1] / "results" / "h200"
GUESSED = ("power-limited", "GPU not named", "are not printed", "variant not stated")


def is_clear(row: dict[str, str]) -> bool:
    """Whether a row of newer4 says what ran, and ran nothing beside."""
    return row["source"] != "ccl_search" and not any(words in row["note"] for words in GUESSED)


def is_taught(row: dict[str, str]) -> bool:
    """Whether a row of our H200 may be fitted, with runs without experts."""
    return row["held_out"] != "1" and not row["experts"]


def chosen_rows(table: Path, is_chosen: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    with table.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if is_chosen(row)]
    # Releases of our own rows are not told apart: an engine's name alone means them.
    return [row | {"stack": row["engine"]} if "engine" in row else row for row in rows]


def write_rows(rows: list[dict[str, str]], out: Path) -> None:
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def named(table: RowTable, rows: list[dict[str, str]]) -> Rows:
    """The table with all but some rows made unusable."""
    stack = {row["row_id"]: row["stack"] for row in rows}
    names = table.column("row_id")
    stacks = [stack.get(name, was) for name, was in zip(names, table.column("stack"), strict=True)]
    told = replace(table, texts=table.texts | {"stack": stacks})
    return only(parse(told), np.array([name in stack for name in names]))


def tables_of(folder: Path) -> list[Rows]:
    """All tables that are fitted, rows that are not made unusable."""
    return [
        *(parse(read_table(folder / f"{name}.csv")) for name in TABLES),
        famous_rows(folder)[1],
        *(
            named(read_table(table), chosen_rows(table, is_chosen))
            for table, is_chosen in _chosen(folder)
        ),
    ]


def _chosen(folder: Path) -> list[tuple[Path, Callable[[dict[str, str]], bool]]]:
    return [(folder / "newer4.csv", is_clear), (H200 / "engines.csv", is_taught)]


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    written_rows(folder, out / "famous.csv")
    for table, is_chosen in _chosen(folder):
        write_rows(chosen_rows(table, is_chosen), out / table.name)


if __name__ == "__main__":
    main()
