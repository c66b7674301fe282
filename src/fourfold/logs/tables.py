"""Tables and exports: the reference schema, metrics by step from W&B and TensorBoard (CSV or JSON
lines), and any other CSV through a mapping file."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fourfold.cost.table.reference import NEEDED as SCHEMA_NEEDED
from fourfold.logs.book import MOST_RUNS, Book
from fourfold.logs.lines import MOST_CHARS, Line, open_text, read_lines
from fourfold.logs.mapping import ColumnMap, mapped_row, plain_heading, require_headings
from fourfold.logs.nested import decimal, number, whole
from fourfold.logs.row import COLUMNS, EXTRA, Row, text_of
from fourfold.logs.series import StepLine

MOST_ROWS = 1_000_000
_DELIMITERS = ",;\t"
_LISTS = ("[[", "[{")
# Headings in lower case without blanks, dashes and underscores.
_STEP = ("step", "iteration", "globalstep", "trainerglobalstep", "iter", "batch", "timebatch")
_WALL = ("walltime", "timestamp", "time", "date")
# What engines call the time of a step, and the speed, in their exports -> unit.
_SECONDS = {
    "iterationtime": 1.0, "trainsteptimingins": 1.0, "steptime": 1.0, "timemetricsendtoends": 1.0,
    "elapsedtimeperiterationms": 1e-3, "iterationtimems": 1e-3, "steptimems": 1e-3,
    "elapsedtimeperiterations": 1.0, "iterationtimes": 1.0, "secperiter": 1.0,
    "timeiterationtime": 1.0, "iterationtimeiterationtime": 1.0, "runtimeiterationtime": 1.0,
}  # fmt: skip
_TIMES, _EMPTY = ("seconds", "rate"), ("", "none", "nan", "null")
_RATES = ("throughputtps", "throughputdevicetokenspersec", "tokenspersecpergpu")
_MEMORY = {
    "memorymaxreservedgib": 1.0, "memorypeakreservedmem": 1e9 / 2**30,
    "memreservedbytes": 2.0**-30, "cudamaxmemoryreserved": 2.0**-30,
}  # fmt: skip
_LOSS = ("lmloss", "loss", "lossmetricsglobalavgloss", "losstraintotal", "reducedtrainloss",
         "trainloss")  # fmt: skip


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
    if suffix in (".csv", ".tsv", ".jsonl", ".ndjson"):
        return True
    if suffix not in (".txt", ".json", ".log", ""):
        return False
    first = next((line.text for line in islice(read_lines(path), 20) if line.text.strip()), "")
    return first.startswith(_LISTS) or _is_object(first) or _is_schema(_split(first))


def _is_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


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
    if first.text.startswith(_LISTS):
        return _metrics(path, _items(first), "metrics")
    if _is_object(first.text):
        return _metrics(path, _objects(chain([first], lines)), "JSON lines")
    headings = _split(first.text)
    if mapping is None and _is_schema(headings):
        return _rows(path, first, None)
    if mapping is not None:
        require_headings(mapping, headings)
        return _rows(path, first, mapping)
    if _step_column(headings) is not None:
        return _charts(path, first, headings)
    return TableRead("unknown", headings=tuple(headings))


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
    for _, cells in islice(_dicts(path, first, read), MOST_ROWS):
        read.rows.append(mapped_row(cells, mapping) if mapping else _reference(cells))
    return read


def _reference(cells: Mapping[str, str]) -> Row:
    """A row of the schema as it is; one that was collected before keeps how it was."""
    row = Row({n: text_of(cells.get(n, "").strip()) for n in (*COLUMNS, *EXTRA) if cells.get(n)})
    status = row["status"] if row["status"] in ("ok", "oom", "fail", "hang") else ""
    row.fill(outcome=status, engine="table", step_rule="value in the table")
    return row


# --- metrics by step


def _step_column(headings: list[str]) -> str | None:
    """Where a table of metrics has its steps; a table of runs has none, or layouts beside them."""
    plain = {plain_heading(name): name for name in headings}
    if {"tp", "tpsize", "nlayers", "micro", "mbs"} & plain.keys():
        return None
    step = next((plain[name] for name in _STEP if name in plain), None)
    useful = [name for name in headings if _kind(name)] or "value" in plain
    return step if step and useful else None


def _kind(heading: str) -> tuple[str, float] | None:
    """What a metric is: W&B puts 'NAME - ' before it, TensorBoard a path."""
    plain = plain_heading(re.split(r" - ", heading)[-1])
    for table, kind in ((_SECONDS, "seconds"), (_MEMORY, "memory")):
        if plain in table:
            return kind, table[plain]
    if plain in _RATES:
        return "rate", 1.0
    return ("loss", 1.0) if plain in _LOSS else None


def _objects(lines: Iterator[Line]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    for line in lines:
        if not line.text.strip():
            continue
        try:
            found = json.loads(line.text)
        except (ValueError, RecursionError):
            found = None
        yield line.number, found if isinstance(found, dict) else None


_TRIPLE = ("walltime", "step", "value")


def _items(line: Line) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """TensorBoard's JSON: [[wall time, step, value], ...]; or a list of objects."""
    try:
        found = json.loads(line.text)
    except (ValueError, RecursionError):
        found = [None]
    for number_, one in enumerate(found, start=1):
        if isinstance(one, list) and len(one) == 3:
            one = dict(zip(_TRIPLE, one, strict=True))
        yield number_, one if isinstance(one, dict) else None


def _charts(path: str | Path, first: Line, headings: list[str]) -> TableRead:
    """A CSV of metrics by step. W&B writes 'RUN - METRIC': every run that has a time is a row."""
    runs = [name.rpartition(" - ")[0] for name in headings if (_kind(name) or ("",))[0] in _TIMES]
    runs = list(dict.fromkeys(runs))
    if len(runs) < 2:
        return _metrics(path, _dicts(path, first, TableRead("")), "metrics")
    read = TableRead("metrics")
    for run in runs[:MOST_RUNS]:
        own = {name for name in headings if name.rpartition(" - ")[0] in ("", run)}
        cells = _dicts(path, first, read if run == runs[0] else TableRead(""))
        # Another run may have had this step, and this one not.
        items = (
            (number_, {name: cell for name, cell in item.items() if name in own})
            for number_, item in cells
            if any(item[name] for name in own if (_kind(name) or ("",))[0] in _TIMES)
        )
        read.book.begin()
        read.book.fact(row_id=run)
        _metrics(path, items, "metrics", read)
    return read


def _metrics(
    path: str | Path,
    items: Iterator[tuple[int, dict[str, Any] | None]],
    kind: str,
    read: TableRead | None = None,
) -> TableRead:
    """One run. Seconds from a metric that has them; else from the wall clock between steps, where
    it does not go back."""
    read = read or TableRead(kind)
    stem = Path(path).stem  # TensorBoard's 'run-NAME-tag-iteration-time'
    tag = _kind(stem.partition("-tag-")[2] or stem)
    before: tuple[int, float] | None = None
    for number_, item in items:
        found = _metric(item, tag) if item is not None else None
        if item is None or found is None:
            if item is None or _config(item, read.book) is False:
                read.book.skip(number_, str(item)[:160] if item else "not a JSON object")
            continue
        step, wall = found
        untimed = step.seconds is None and step.tokens_s_gpu is None and wall is not None
        if untimed and before is not None and step.step > before[0] and wall > before[1]:
            spent = (wall - before[1]) / (step.step - before[0])
            step = replace(step, seconds=spent)
        before = (step.step, wall) if wall is not None else before
        read.book.step(step)
    return read


def _metric(
    item: Mapping[str, Any], tag: tuple[str, float] | None
) -> tuple[StepLine, float | None] | None:
    step = wall = None
    found: dict[str, float] = {}
    loss = ""
    for name, cell in item.items():
        plain, value = plain_heading(str(name)), number(str(cell)) if cell is not None else None
        if step is None and plain in _STEP:
            step = whole(str(cell))
        elif (wall is None and plain in _WALL) or name == "_timestamp":
            wall = value
        kind = tag if plain == "value" and tag else _kind(str(name))
        if kind is None:
            continue
        if value is None and kind[0] in _TIMES and str(cell).lower() not in _EMPTY:
            return None
        if value is None or value <= 0:
            continue
        if kind[0] == "loss":
            loss = str(cell)
        else:
            found.setdefault(kind[0], value * kind[1])
    if step is None or step < 0:
        return None
    line = StepLine(
        step=step,
        seconds=found.get("seconds"),
        tokens_s_gpu=None if "seconds" in found else found.get("rate"),
        loss=loss,
        mem_gib=found.get("memory"),
    )
    return line, wall


def _config(item: Mapping[str, Any], book: Book) -> bool:
    """A line of JSON without a step may be the configuration, in columns of the schema."""
    facts = {
        k: text_of(v) for k, v in item.items() if k in COLUMNS and not isinstance(v, dict | list)
    }
    if facts:
        book.fact(**facts)
    return bool(facts)
