"""Findings of `lint`, and what a check of a row or of a file is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fourfold.tables.document import Table
from fourfold.tables.row import PublishedRow


@dataclass(frozen=True, slots=True)
class Finding:
    """A row that cannot be right, with the likely repair."""

    rule: str  # id of the rule, a key of `lint.RULES`
    row: int  # line in the file
    table: int  # counted from 1
    place: str  # line, and column of a scaling table
    value: str  # what stands there
    expected: str  # what would be right
    repair: str


# (value, expected, repair) of a finding whose row and rule the caller knows.
Problem = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class RowCheck:
    """A rule that a row can break by itself."""

    rule: str
    styles: tuple[str, ...]  # table styles that it applies to; () is all
    fields: tuple[str, ...]  # fields of the row that must be set and not 0
    problems: Callable[..., Iterator[Problem]]  # called with the row and the values of `fields`

    def findings(self, record: PublishedRow) -> Iterator[Finding]:
        values = [getattr(record, name) for name in self.fields]
        if all(values) and (not self.styles or record.style in self.styles):
            for problem in self.problems(record, *values):
                yield finding(record, self.rule, *problem)


@dataclass(frozen=True, slots=True)
class TablesFile:
    """All tables of a file: some rules compare rows of a table, or rows across tables."""

    tables: tuple[tuple[Table, PublishedRow], ...]  # each with what the text above it states
    records: tuple[PublishedRow, ...]
    by_table: dict[tuple[object, ...], list[PublishedRow]]

    def rows_of(self, table: int) -> list[PublishedRow]:
        return self.by_table.get((table,), [])


FileCheck = Callable[[TablesFile], Iterator[Finding]]


def finding(record: PublishedRow, rule: str, value: str, expected: str, repair: str) -> Finding:
    row, table, place = record.line, record.table + 1, record.place
    return Finding(rule, row, table, place, value, expected, repair)
