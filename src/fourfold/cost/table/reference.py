"""Reads a table of runs: CSV in the reference schema, columns in any order, missing ones blank. Of
a note only the words that the tables' README explains are facts; nothing else in it is read."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.record import REFERENCE_COLUMNS

_GROUP = re.compile(r"zero[123] over (\d+) ranks|\bfsdp ?(\d+)\b")
_RECIPE = re.compile(r"recipe ([a-z0-9-]+)")


@dataclass(frozen=True, slots=True)
class NoteWords:
    """`shard_group` 0 means not stated; `shards_in_node`: ZeRO within a node, replicas across."""

    flash1: bool
    plain_norm: bool
    slow_network: bool
    pure: bool
    block_scale: bool
    shard_group: int
    shards_in_node: bool


def note_words(note: str) -> NoteWords:
    """The facts of one note."""
    group = _GROUP.search(note)
    recipe = _RECIPE.search(note)
    name = recipe[1] if recipe else ""
    return NoteWords(
        flash1="flash_attentionv1" in note,
        plain_norm="kernel:" in note and "RMS kernel" not in note,
        slow_network=re.search(r"\bnetwork slow\b", note) is not None,
        pure=re.search(r"\bpure\b", note) is not None,
        block_scale=name.startswith(("mxfp", "nvfp")) or name.endswith("-mx"),
        shard_group=int(group[1] or group[2]) if group else 0,
        shards_in_node=re.search(r"\bhsdp\b", note) is not None,
    )


SCHEMA = tuple(REFERENCE_COLUMNS)
T = TypeVar("T")
BATCH = 4096
PLAIN_BYTES = 2**20
# Short lines are filled up to the header's width: a long one would cost its length for every line.
MAX_COLUMNS = 1000
MARK = "\x1f"  # the unit separator of ASCII; no table has it
# Status of a collected run that lacks fields; it is kept, and used for nothing.
INCOMPLETE = "incomplete"
# Without these nothing can be said about a row.
NEEDED = ("hardware", "n_layers", "d_model", "n_heads", "vocab", "seq_len", "n_gpus", "gbs")


@dataclass(frozen=True, slots=True)
class RowTable:
    """Texts by column; `name` is the file's stem (a source is one file)."""

    name: str
    texts: dict[str, list[str]]
    length: int

    def column(self, name: str) -> list[str]:
        return self.texts[name]

    def take(self, index: Sequence[int]) -> RowTable:
        texts = {name: [cells[i] for i in index] for name, cells in self.texts.items()}
        return RowTable(self.name, texts, len(index))


def read_table(path: str | Path) -> RowTable:
    """A table from a CSV file; says which needed column is missing."""
    text = files.read_text(path, field="rows")
    reader = csv.reader(text.splitlines())
    try:
        header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
        if not header:
            raise UserError("is empty", field="rows", value=str(path), hint="add a heading line")
        _check_header(header, str(path))
        stem = Path(path).stem
        table = _plain(stem, header, text) or _columnar(stem, header, reader)
    except csv.Error as error:
        raise UserError(
            f"is not CSV ({error})", field="rows", value=str(path), hint="save it as plain CSV"
        ) from None
    if not table.length:
        raise UserError("has headings but no rows", field="rows", value=str(path), hint="add a run")
    return table


def _check_header(header: list[str], path: str) -> None:
    if len(header) > MAX_COLUMNS:
        raise UserError(
            f"has more than {MAX_COLUMNS} columns",
            field="rows",
            value=path,
            hint="keep only those of the reference schema",
        )
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise UserError(
            f"lacks the columns {', '.join(missing)}",
            field="rows",
            value=path,
            hint=f"the reference schema is: {' '.join(SCHEMA)}",
        )


def _plain(name: str, header: list[str], text: str) -> RowTable | None:
    """A large file cut in one go, lines with quotes apart: half the time of the CSV reader.

    None where that could go wrong: a quoted line break, a line with another number of cells.
    """
    if len(text) < PLAIN_BYTES or MARK in text:
        return None
    width = len(header)
    lines = [line for line in text.splitlines() if line]
    for i, line in enumerate(lines):
        if '"' not in line:
            if line.count(",") != width - 1:
                return None
            lines[i] = line.replace(",", MARK)
            continue
        cells = next(csv.reader([line]))
        if line.count('"') % 2 or len(cells) != width:
            return None
        lines[i] = MARK.join(cells)
    flat = MARK.join(lines).split(MARK)
    cells = {column: flat[width + i :: width] for i, column in enumerate(header)}
    return _row_table(name, cells, len(lines) - 1)


def _columnar(name: str, header: list[str], reader: Iterator[list[str]]) -> RowTable:
    """A batch at a time: a list of all records would cost more than the model itself."""
    width = len(header)
    cells: list[list[str]] = [[] for _ in header]
    while batch := list(itertools.islice(reader, BATCH)):
        square = [
            record if len(record) == width else (record + [""] * width)[:width]
            for record in batch
            if record
        ]
        for column, values in zip(cells, zip(*square, strict=True), strict=bool(square)):
            column.extend(values)
    return _row_table(name, dict(zip(header, cells, strict=True)), len(cells[0]))


def _row_table(name: str, cells: dict[str, list[str]], length: int) -> RowTable:
    blank = [""] * length
    return RowTable(name, {column: cells.get(column, blank) for column in SCHEMA}, length)


def each(cells: Sequence[str], ask: Callable[[str], T]) -> list[T]:
    """ask(cell) for every cell; each different text is asked once."""
    answers = {cell: ask(cell) for cell in set(cells)}
    return [answers[cell] for cell in cells]


def numbers(cells: Sequence[str]) -> NDArray[np.float64]:
    """Texts as numbers; blank and unreadable ones are NaN, infinite ones too."""
    values = np.array(each(cells, _number), dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")
