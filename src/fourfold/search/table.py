"""Points of a question as one table. A row is a layout with its virtual stages and sharding, a
column a way to run it: a micro batch and a kind of recompute. What depends on rows alone, or on
ways alone, is computed once for all of its points."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.memory.peak import memory
from fourfold.search.query import PlanQuery

Ints = NDArray[np.int64]
Places = NDArray[np.intp]
Bools = NDArray[np.bool_]
# Columns by CHOSEN and by what was computed about them.
Pool = dict[str, NDArray[Any]]
OnProgress = Callable[[float], None]  # hears what share of some work is done
T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8  # more wait for each other more than they help
CHUNK = 16384  # points at a time: what they need stays in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PointTable:
    """`legal`: [rows, ways], which points may run, or which of those are asked about."""

    query: PlanQuery
    rows: dict[str, Ints]
    ways: dict[str, Ints]
    legal: Bools

    def at(self, row: Places | slice, way: Places | slice) -> Pool:
        """Columns by CHOSEN, of any shapes that broadcast."""
        points = {name: column[row] for name, column in self.rows.items()}
        return points | {name: column[way] for name, column in self.ways.items()}

    def points(self, index: Places) -> Pool:
        """The same of points given by their places in the table read row by row."""
        return self.at(*np.divmod(index, self.legal.shape[1]))

    def columns(self, row: Places | slice, way: Places | slice) -> Columns:
        return self.query.columns(self.at(row, way), is_open=True)

    def only(self, rows: Places) -> Self:
        some = {name: column[rows] for name, column in self.rows.items()}
        return replace(self, rows=some, legal=self.legal[rows])

    def priced(self, index: Places, compute: Callable[[Columns], Floats]) -> Floats:
        """compute(columns) of each point."""

        def piece(at: int) -> Floats:
            return compute(self.columns(*np.divmod(index[at : at + CHUNK], self.legal.shape[1])))

        found = on_cores(piece, range(0, len(index), CHUNK))
        return np.concatenate(found) if found else np.zeros(0)

    def peak_bytes(self, index: Places) -> Floats:
        coefficients = self.query.resolved.entry.coefficients
        return self.priced(index, lambda c: memory(c, coefficients).worst_bytes)


def no_progress(share: float) -> None:
    """Short work tells nobody."""


def on_cores(
    work: Callable[[T], R], pieces: Iterable[T], tell: OnProgress = no_progress
) -> list[R]:
    """work(piece) of each, in their order; NumPy lets threads run side by side."""
    todo = list(pieces)
    done: list[R] = []
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for one in pool.map(work, todo) if len(todo) > 1 else map(work, todo):
            done.append(one)
            tell(len(done) / len(todo))
    return done


def blocks(asked: Bools, size: int = CHUNK) -> Iterator[Places]:
    """Rows in pieces of about as many asked points: rows with as many come together."""
    widths = asked.sum(axis=1)
    order = np.argsort(widths, kind="stable")
    at = 0
    while at < len(order):
        rows = order[at : at + max(1, size // max(1, int(widths[order[at]])))]
        at += len(rows)
        yield rows


def repeats(counts: NDArray[np.int_]) -> tuple[Places, Places]:
    """(row index, repeat index) of rows that are repeated as often as `counts` says."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)


def row_numbers(rows: dict[str, Ints], names: tuple[str, ...]) -> Ints:
    """One number for each combination of these fields."""
    number = np.zeros(len(rows["pp"]), dtype=np.int64)
    for name in names:
        places = np.cumsum(np.bincount(rows[name]) > 0)
        number = number * int(places[-1:].sum()) + places[rows[name]] - 1
    return number


def alike(rows: dict[str, Ints], names: tuple[str, ...]) -> tuple[Places, Places]:
    """(a row of each group, the group of each row): of rows that have these fields in common."""
    _, first, group = np.unique(row_numbers(rows, names), return_index=True, return_inverse=True)
    return first, group.reshape(-1)
