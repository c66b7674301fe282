"""Cells of a table as numbers and words, and what is assumed or wrong in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold import door
from fourfold.cost.table.reference import NoteWords, RowTable
from fourfold.errors import UserError, shorten
from fourfold.spec.engine import MeasuredAs
from fourfold.spec.words import plain_word
from fourfold.units import plain_float

T = TypeVar("T")
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Engines = NDArray[np.object_]  # a MeasuredAs each
LARGEST = 1e9  # a count above this is a typing error, not a run
WHOLE = "must be a whole number of at least 1"
MEASURED = ("step_s", "tokens_s_gpu", "tflops_gpu", "mem_gb", "net_gbs", "net_node_gbs")


def each(cells: Sequence[str], ask: Callable[[str], T]) -> list[T]:
    """ask(cell) for every cell; each different text is asked once."""
    answers = {cell: ask(cell) for cell in set(cells)}
    return [answers[cell] for cell in cells]


def engines(runs: Sequence[MeasuredAs]) -> Engines:
    """Return what rows were measured as, as an array."""
    return np.array(runs, dtype=object)


def number(cell: str) -> float:
    """NaN where it is blank, unreadable, or so far from 0 or so near to it that it is nothing's
    number."""
    value = plain_float(cell)
    return value if value == 0 or door.is_possible(abs(value)) else float("nan")


def numbers(cells: Sequence[str]) -> Floats:
    return np.array(each(cells, number), dtype=np.float64)


def measured(cells: Sequence[str]) -> Floats:
    """NaN where nobody can have measured that."""
    values = numbers(cells)
    return np.where(values > 0, values, np.nan)


def impossible(table: RowTable) -> list[str]:
    """Measured values that are none, as 'row: column value': used for nothing, worth a word."""
    return [
        f"{table.column('row_id')[i] or f'row {i + 1}'}: {name} {shorten(cells[i])}"
        for name in MEASURED
        for cells in [table.column(name)]
        for i in np.flatnonzero(np.isnan(measured(cells)))
        if (value := plain_float(cells[i])) == value
    ]


def blank(table: RowTable, column: str) -> Bools:
    return np.array([cell == "" for cell in table.column(column)], dtype=bool)


def is_whole(value: Any) -> Any:
    """Of a number, or of an array of them."""
    return (value >= 1) & (value <= LARGEST) & (value % 1 == 0)


@dataclass(slots=True)
class Draft:
    """What is wrong and what was assumed, by row."""

    table: RowTable
    bad: dict[int, str] = field(default_factory=dict)
    assumed: dict[int, list[str]] = field(default_factory=dict)

    def refuse(self, rows: Iterable[int], why: str) -> None:
        for i in rows:
            self.bad.setdefault(int(i), why)

    def assume(self, rows: Iterable[int], what: Sequence[str]) -> None:
        if what:
            for i in rows:
                self.assumed.setdefault(int(i), []).extend(what)

    def reasons(self) -> list[str]:
        return [
            f"not expressible: {self.bad[i]}" if i in self.bad else "; ".join(assumed)
            for i in range(self.table.length)
            for assumed in [self.assumed.get(i, ())]
        ]

    def counts(
        self, column: str, default: Floats | float = np.nan, none: Sequence[str] = ("",)
    ) -> Floats:
        """A column of whole numbers, `default` where it says `none`; without one it may not."""
        cells = self.table.column(column)
        left_out = np.array(each(cells, lambda cell: cell.strip() in none), dtype=bool)
        values = np.where(left_out, default, numbers(cells))
        right = is_whole(values)
        self.refuse(np.flatnonzero(~right), f"{column} {WHOLE}")
        return np.where(right, values, 1.0)


@dataclass(slots=True)
class Cells:
    """The cells of rows that describe the same run, and what was assumed to read them."""

    texts: Mapping[str, str]
    words: NoteWords
    assumed: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> str:
        return self.texts[name]

    def count(self, name: str, default: float = 0, taken: str = "") -> int:
        """A whole number of at least 1; `default` where the cell is blank, which `taken` says."""
        if default and self._is_blank(name, taken):
            return int(default)
        value = number(self[name])
        if not is_whole(value):
            raise UserError(WHOLE, field=name)
        return int(value)

    def _is_blank(self, name: str, taken: str) -> bool:
        is_blank = not self[name].strip()
        if is_blank and taken:
            self.assumed.append(f"{name} {taken}")
        return is_blank

    def size(self, name: str) -> int:
        """A whole number, 0 where the model has none of it."""
        value = self.amount(name)
        return self.count(name) if value else 0

    def amount(self, name: str) -> float:
        """0 where the cell is blank or unreadable."""
        value = number(self[name])
        return value if value == value else 0.0

    def flag(self, name: str, default: bool, taken: str = "") -> bool:
        if self._is_blank(name, taken):
            return default
        value = number(self[name])
        if value != value:
            raise UserError(f"is not {door.POSSIBLE}", field=name)
        return value > 0

    def one_of(self, name: str, known: Mapping[str, T], shown: Sequence[str]) -> T:
        """`known` by the cell as it is, or as a word (lower case, '-' for '_' and blanks)."""
        word = self[name] if self[name] in known else plain_word(self[name])
        if word not in known:
            raise UserError(f"is not one of {', '.join(shown)}", field=name)
        return known[word]
