"""Tables and exports: the reference schema, metrics by step from W&B and TensorBoard (CSV or JSON
lines), CloudAI's report, and any other CSV through a mapping file."""

from __future__ import annotations

import csv
import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from fourfold import door, files
from fourfold.cost.table.reference import NEEDED as SCHEMA_NEEDED
from fourfold.escape import csv_text
from fourfold.logs import metrics
from fourfold.logs.book import Book, is_event
from fourfold.logs.lines import MOST_CHARS, Line, open_text, read_lines
from fourfold.logs.mapping import ColumnMap, mapped_row, require_headings
from fourfold.logs.nested import decimal, json_object
from fourfold.logs.row import COLUMNS, EXTRA, Row, text_of
from fourfold.result.job import LOG_FILES
from fourfold.spec import check

# A row takes 2.5 KB of memory, however short its line is.
MOST_ROWS = 100_000
_DELIMITERS = ",;\t"
_LISTS = ("[[", "[{")


@dataclass(slots=True)
class TableRead:
    """`headings` of a table that needs a mapping, rows of one that needs none; or metrics, whose
    runs are in the book. The book also counts what could not be read."""

    kind: str
    rows: list[Row] = field(default_factory=list)
    book: Book = field(default_factory=Book)
    headings: tuple[str, ...] = ()


def is_table(path: str | Path) -> bool:
    """By its name, or by its first line: headings or a JSON object."""
    suffix = Path(path).suffix.lower()
    if suffix == ".jsonl" and is_event(_first(path)):
        return False  # a log, by events instead of steps
    if suffix in (".csv", ".tsv", ".jsonl", ".ndjson"):
        return True
    if suffix not in (".txt", ".json", ".log", ""):
        return False
    first = _first(path)
    if first.startswith(_LISTS) or _is_object(first) or _is_schema(_split(first)):
        return True
    return first.startswith("{") and metrics.cloudai_report(path) is not None


def _first(path: str | Path) -> str:
    return next((line.text for line in islice(read_lines(path), 20) if line.text.strip()), "")


def _is_object(text: str) -> bool:
    return text.lstrip().startswith("{") and json_object(text) is not None


def _is_schema(headings: list[str]) -> bool:
    return all(name in headings for name in SCHEMA_NEEDED)


def _split(text: str) -> list[str]:
    delimiter = max(_DELIMITERS, key=text.count)
    try:
        cells = next(csv.reader([text], delimiter=delimiter), [])
    except csv.Error:
        return []
    return [cell.strip().lstrip("\ufeff") for cell in cells]


def read_table(path: str | Path, mapping: ColumnMap | None) -> TableRead:
    lines = read_lines(path)
    first = next((line for line in lines if line.text.strip()), None)
    if first is None:
        return TableRead("empty")
    if first.text.startswith("{") and (report := metrics.cloudai_report(path)) is not None:
        read = TableRead("CloudAI")
        metrics.read_cloudai(report, read.book)
        return read
    if first.text.startswith(_LISTS):
        return _metrics(path, metrics.listed(first), "metrics")
    if _is_object(first.text):
        return _metrics(path, metrics.objects(chain([first], lines)), "JSON lines")
    headings = _split(first.text)
    door.check_headings(headings, field="LOG", path=str(path))
    if mapping is None and _is_schema(headings):
        return _rows(path, first, None)
    if mapping is not None:
        require_headings(mapping, headings)
        return _rows(path, first, mapping)
    if metrics.step_column(headings) is not None:
        read = TableRead("metrics")
        metrics.charts(_dicts(path, first, read), headings, read.book, Path(path).stem)
        return read
    return TableRead("unknown", headings=tuple(headings))


def _metrics(path: str | Path, items: metrics.Items, kind: str) -> TableRead:
    read = TableRead(kind)
    metrics.one_run(items, read.book, Path(path).stem)
    return read


def _dicts(path: str | Path, first: Line, read: TableRead) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a CSV by heading; those that are none are counted."""
    headings = _split(first.text)
    delimiter = max(_DELIMITERS, key=first.text.count)
    with open_text(path) as stream:
        reader = csv.reader(
            (line.replace("\0", "") for line in iter(lambda: stream.readline(MOST_CHARS), "")),
            delimiter=delimiter,
        )
        number = 0
        while True:
            number += 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                read.book.skip(number, str(error))
                continue
            if [cell.strip().lstrip("\ufeff") for cell in cells] == headings or not any(cells):
                continue
            if len(cells) != len(headings):
                read.book.skip(number, delimiter.join(cells))
                continue
            if delimiter == ";":  # where a comma is the decimal point
                cells = [decimal(cell) for cell in cells]
            yield number, dict(zip(headings, cells, strict=True))


def _rows(path: str | Path, first: Line, mapping: ColumnMap | None) -> TableRead:
    read = TableRead("mapped" if mapping else "reference")
    for _, cells in _dicts(path, first, read):
        rule = f"has more than {MOST_ROWS:,} rows"
        check.that(len(read.rows) != MOST_ROWS, "LOG", str(path), rule, "split it")
        read.rows.append(mapped_row(cells, mapping) if mapping else _reference(cells))
    return read


def _reference(cells: Mapping[str, str]) -> Row:
    """A row of the schema as it is; one that was collected before keeps how it was."""
    row = Row({n: text_of(cells.get(n, "").strip()) for n in (*COLUMNS, *EXTRA) if cells.get(n)})
    status = row["status"] if row["status"] in ("ok", "oom", "fail", "hang") else ""
    row.fill(outcome=status, engine="table", step_rule="value in the table")
    return row


_NAMES = (*COLUMNS, *EXTRA)
# In the headings of every such file.
_MARK = ",".join(EXTRA[: EXTRA.index("log") + 1])


def check_out(out: str, *, force: bool) -> None:
    """Before logs are read: is the file ours to write?"""
    files.require_mine(out, mark=_MARK, force=force)


def keep(rows: list[Row], out: str, *, force: bool) -> int:
    """Write them with the others of the file, but for those of the same logs; how many it has."""
    if not rows:
        return len(_existing(out, force=force))
    with files.locked(out):
        logs = {row["log"] for row in rows}
        kept = [row for row in _existing(out, force=force) if row["log"] not in logs]
        _name(rows, {row["row_id"] for row in kept})
        table = [_NAMES, *([row[name] for name in _NAMES] for row in (*kept, *rows))]
        files.write_text(out, csv_text(table))
    return len(kept) + len(rows)


def _existing(out: str, *, force: bool) -> list[Row]:
    check_out(out, force=force)
    if force or not Path(out).is_file() or not Path(out).stat().st_size:
        return []
    return read_table(out, None).rows


def _name(rows: list[Row], taken: set[str]) -> None:
    """A row is called as its file, with a number where that has several runs."""
    per_log = Counter(row["log"] for row in rows)
    seen: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    for row in rows:
        log = Path(row["log"])
        seen[row["log"]] += 1
        number = f"-{seen[row['log']]}" if per_log[row["log"]] > 1 else ""
        names = [row["row_id"]] if row["row_id"] else []
        if fnmatch.fnmatch(log.name, LOG_FILES):  # of a run in a store, whose folder has its name
            names.append(f"{log.parent.name}{number}")
        last = f"{log.stem}{number}"
        names += [last, f"{log.parent.name}-{last}"]
        free = next((name for name in names if name not in taken), None)
        while free is None or free in taken:
            tried[last] += 1
            free = f"{last}.{tried[last] + 1}"
        row.cells["row_id"] = free
        taken.add(free)
