"""What is read of a log: its rows by the readers alone, or as `fourfold collect` stores them."""

from __future__ import annotations

import csv
from dataclasses import fields
from pathlib import Path
from typing import Any

import fourfold
from fourfold.logs.book import read_log
from fourfold.logs.row import Row, complete, row_of
from fourfold.verbs.collect import Collected

GOLDEN = Path(__file__).parent.parent / "golden"


def table(path: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


BLOOM = table(GOLDEN / "bloom.csv")


def rows(folder: Path, text: str | bytes, **given: str) -> list[Row]:
    log = folder / "train.log"
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    book = read_log(log)
    return [complete(row_of(run, run.engine), given) for run in book.runs]


def one(folder: Path, text: str | bytes, **given: str) -> Row:
    (row,) = rows(folder, text, **given)
    return row


def collected(*logs: Path | str, out: Path, **named: Any) -> Collected:
    """`named`: fields of the request; others are columns that hold for every row."""
    own = {field.name for field in fields(fourfold.CollectRequest)}
    given = {name: named.pop(name) for name in [*named] if name not in own}
    names = tuple(map(str, logs))
    return fourfold.collect(
        fourfold.CollectRequest(logs=names, out=str(out), fields=given, **named)
    )


def says(row: Row, wanted: str) -> None:
    """Every `column=value` of these words is what the row has, to the letter."""
    cells = dict(word.split("=", 1) for word in wanted.split())
    assert {name: row[name] for name in cells} == cells
