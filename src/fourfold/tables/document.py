"""Tables and the text between them, cell by cell as they stood in a file. Nothing is interpreted
here, so that what is read can be written again unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import UserError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Row:
    """`rule` marks a line of dashes inside the body; `line` is where it stood (0: new)."""

    cells: tuple[str, ...]
    rule: bool = False
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Table:
    """`marks` are the cells of the Markdown line under the headings (alignment); may be empty.

    A row may have more or fewer cells than there are headings: published tables do.
    """

    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    marks: tuple[str, ...] = field(default=(), compare=False)
    line: int = field(default=0, compare=False)

    @property
    def data(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.rule)


@dataclass(frozen=True, slots=True)
class Text:
    lines: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Document:
    blocks: tuple[Table | Text, ...]

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(block for block in self.blocks if isinstance(block, Table))


def to_plain(document: Document) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for block in document.blocks:
        if isinstance(block, Text):
            blocks.append({"text": list(block.lines)})
        else:
            rows = [{"rule": [*row.cells]} if row.rule else [*row.cells] for row in block.rows]
            blocks.append({"headings": list(block.headings), "rows": rows})
    return {"schema": SCHEMA_VERSION, "type": "Document", "blocks": blocks}


def from_plain(data: object) -> Document:
    if not isinstance(data, dict) or not isinstance(data.get("blocks"), list):
        rule, hint = "must be a table with 'blocks'", "write it with --format json"
        raise UserError(rule, field="document", hint=hint)
    return Document(tuple(_block(block, f"blocks[{i}]") for i, block in enumerate(data["blocks"])))


def _block(data: object, path: str) -> Table | Text:
    if isinstance(data, dict) and set(data) == {"text"}:
        return Text(_texts(data["text"], f"{path}.text"))
    if not isinstance(data, dict) or set(data) != {"headings", "rows"}:
        raise UserError("must have 'text', or 'headings' and 'rows'", field=path)
    if not isinstance(data["rows"], list):
        raise UserError("must be a list", field=f"{path}.rows")
    rows = []
    for number, row in enumerate(data["rows"]):
        rule = isinstance(row, dict) and set(row) == {"rule"}
        cells = _texts(row["rule"] if rule else row, f"{path}.rows[{number}]")
        rows.append(Row(cells, rule=rule))
    return Table(_texts(data["headings"], f"{path}.headings"), tuple(rows))


def _texts(data: object, path: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
        raise UserError("must be a list of strings", field=path)
    return tuple(data)
