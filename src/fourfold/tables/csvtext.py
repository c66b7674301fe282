"""CSV <-> Document: tables are parted by blank lines, text stands in lines that begin with '#'."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from fourfold import escape
from fourfold.errors import UserError
from fourfold.tables.document import Document, Row, Table, Text
from fourfold.tables.markdown import is_rule


def parse(text: str) -> Document:
    lines = text.split("\n")
    blocks: list[Table | Text] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
        elif _is_text(lines, at):
            block, at = _text(lines, at)
            blocks.append(block)
        else:
            table, at = _table(lines, at)
            blocks.append(table)
    return Document(tuple(blocks))


def _is_text(lines: list[str], at: int) -> bool:
    """'# GPUs,GPU' over rows of two cells is a heading line, '# made by hand' is text."""
    if not lines[at].startswith("#"):
        return False
    cells = len(next(csv.reader([lines[at]])))
    below = lines[at + 1] if at + 1 < len(lines) else ""
    return not (
        cells > 1
        and below
        and not below.startswith("#")
        and len(next(csv.reader([below]))) == cells
    )


def _text(lines: list[str], at: int) -> tuple[Text, int]:
    first = at
    found = []
    while at < len(lines) and lines[at].startswith("#") and _is_text(lines, at):
        found.append(lines[at][1:].removeprefix(" "))
        at += 1
    return Text(tuple(found), line=first + 1), at


def _table(lines: list[str], at: int) -> tuple[Table, int]:
    first = at
    separator = "\t" if "\t" in lines[at] and "," not in lines[at] else ","
    rows: list[Row] = []
    while at < len(lines) and lines[at].strip():
        if rows and lines[at].startswith("#") and _is_text(lines, at):
            break
        cells, used = _record(lines, at, separator)
        rows.append(Row(cells, rule=bool(rows) and is_rule(cells), line=at + 1))
        at += used
    return Table(rows[0].cells, tuple(rows[1:]), line=first + 1), at


def _record(lines: list[str], at: int, separator: str) -> tuple[tuple[str, ...], int]:
    """One record; a quoted cell may span lines."""

    def rest() -> Iterator[str]:
        for place in range(at, len(lines)):  # a slice would copy the rest for every record
            yield f"{lines[place]}\n"

    reader = csv.reader(rest(), delimiter=separator, strict=False)
    try:
        cells = next(reader)
    except csv.Error as error:
        raise UserError(f"is not CSV ({error})", field=f"line {at + 1}") from None
    return tuple(escape.from_csv(cell.strip()) for cell in cells), reader.line_num


def write(document: Document) -> str:
    lines: list[str] = []
    for block in document.blocks:
        if lines:
            lines.append("")
        if isinstance(block, Text):
            texts = [escape.visible(line.replace("\n", " ")) for line in block.lines]
            lines += [f"# {text}" if text else "#" for text in texts]
            continue
        lines += [_line(cells) for cells in (block.headings, *(row.cells for row in block.rows))]
    return "\n".join(lines) + "\n" if lines else ""


def _line(cells: tuple[str, ...]) -> str:
    line = escape.csv_text([cells]).removesuffix("\n")
    if not line.startswith("#"):
        return line
    quoted, _, rest = line.partition(",")
    return f'"{quoted}"' + (f",{rest}" if rest or len(cells) > 1 else "")
