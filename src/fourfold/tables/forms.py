"""Files of tables: Markdown, read and written, CSV, read, and text for a terminal, written. In CSV
tables are parted by blank lines, and text stands in lines that begin with '#'.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from fourfold import door, escape, files
from fourfold.errors import UserError, inside
from fourfold.spec import check
from fourfold.tables.document import Document, Table, TableRow, Text
from fourfold.text_table import aligned

_MARK = re.compile(r":?-+:?\Z")
_BODY_RULE = re.compile(r":?-{2,}:?|:-+:?|-+:\Z")
_PIPE = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"\s*(```|~~~)")


def read_file(path: str | Path) -> Document:
    """Read a file of tables: CSV, or Markdown whatever its ending. Bytes that are no UTF-8 become
    U+FFFD: tables with dashes in broken encoding exist, and one such cell must not cost the other
    rows."""
    ending = Path(path).suffix.lower()
    hint = "'fourfold report --out NAME' writes NAME.csv and NAME.md"
    check.that(ending != ".json", "table", str(path), "must be Markdown or CSV", hint)
    try:
        text = files.read_text(path, field="table")
    except UserError as error:
        if "UTF-8" not in error.rule:
            raise
        text = files.read_bytes(path, field="table").decode("utf-8", errors="replace")
        if text.count("\ufffd") > max(20, len(text) // 20) or "\0" in text:
            raise
    with inside(path):
        return parse(text, "csv" if ending in (".csv", ".tsv") else "md")


def parse(text: str, form: str) -> Document:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return _from_csv(text) if form == "csv" else _from_markdown(text)


def _from_csv(text: str) -> Document:
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
    below = lines[at + 1] if at + 1 < len(lines) else ""
    try:
        cells, cells_below = (len(next(csv.reader([line]), [])) for line in (lines[at], below))
    except csv.Error:  # a cell of 128 KiB and more
        return True
    return not (cells > 1 and not below.startswith("#") and cells_below == cells)


def _text(lines: list[str], at: int) -> tuple[Text, int]:
    first = at
    texts = []
    while at < len(lines) and lines[at].startswith("#") and _is_text(lines, at):
        texts.append(lines[at][1:].removeprefix(" "))
        at += 1
    return Text(tuple(texts), line=first + 1), at


def _table(lines: list[str], at: int) -> tuple[Table, int]:
    first = at
    separator = "\t" if "\t" in lines[at] and "," not in lines[at] else ","
    rows: list[TableRow] = []
    while at < len(lines) and lines[at].strip():
        if rows and lines[at].startswith("#") and _is_text(lines, at):
            break
        cells, used = _record(lines, at, separator)
        rows.append(TableRow(cells, rule=bool(rows) and _is_rule(cells), line=at + 1))
        at += used
    door.check_headings(rows[0].cells, field=f"line {first + 1}")
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


def _from_markdown(text: str) -> Document:
    lines = text.split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    blocks: list[Table | Text] = []
    plain: list[str] = []
    at = 0
    fence = ""
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened:
            fence = "" if fence == opened.group(1) else fence or opened.group(1)
        if fence or opened or not _starts_table(lines, at):
            plain.append(lines[at])
            at += 1
            continue
        _close_text(blocks, plain, at)
        plain = []
        table, at = _markdown_table(lines, at)
        blocks.append(table)
    _close_text(blocks, plain, len(lines))
    return Document(tuple(blocks))


def _close_text(blocks: list[Table | Text], plain: list[str], end: int) -> None:
    """One blank line next to a table is layout, not text: the writer puts it back."""
    if plain and plain != [""]:
        blocks.append(Text(tuple(map(escape.from_markdown, plain)), line=end - len(plain) + 1))


def _starts_table(lines: list[str], at: int) -> bool:
    if at + 1 >= len(lines) or "|" not in lines[at] or "|" not in lines[at + 1]:
        return False
    marks = _cells_of(lines[at + 1])
    return all(_MARK.match(mark) for mark in marks) and not _is_rule(_cells_of(lines[at]))


def _markdown_table(lines: list[str], at: int) -> tuple[Table, int]:
    first = at
    headings, marks = _cells_of(lines[at]), _cells_of(lines[at + 1])
    door.check_headings(headings, field=f"line {first + 1}")
    needs_pipe = lines[at].lstrip().startswith("|")
    at += 2
    rows: list[TableRow] = []
    while at < len(lines) and "|" in (lines[at].lstrip()[:1] if needs_pipe else lines[at]):
        cells = _cells_of(lines[at])
        rows.append(TableRow(cells, rule=_is_rule(cells), line=at + 1))
        at += 1
    return Table(headings, tuple(rows), marks, line=first + 1), at


def _is_rule(cells: tuple[str, ...]) -> bool:
    """A single '-' is a cell that says 'did not fit'; a rule is longer or carries a colon."""
    return all(_BODY_RULE.fullmatch(cell) for cell in cells)


def _cells_of(line: str) -> tuple[str, ...]:
    line = line.strip()
    parts = _PIPE.split(line)
    if line.startswith("|"):
        parts = parts[1:]
    if len(parts) > 1 and line.endswith("|") and not line.endswith("\\|"):
        parts = parts[:-1]
    return tuple(_cell(part) for part in parts)


def _cell(part: str) -> str:
    return escape.from_markdown(part.strip().replace("\\|", "|").replace("<br>", "\n"))


def write(document: Document, style: str) -> str:
    """Markdown (md); or aligned text for a terminal, not for reading again."""
    lines: list[str] = []
    after_table = False
    for block in document.blocks:
        if isinstance(block, Text):
            shown = escape.visible if style == "text" else escape.markdown_line
            lines += [shown(line.replace("\n", " ")) for line in block.lines]
            after_table = False
            continue
        if after_table:
            lines.append("")
        lines += _lines(block, style)
        after_table = True
    return "\n".join(lines) + "\n" if lines else ""


def _lines(table: Table, style: str) -> list[str]:
    def written(cells: tuple[str, ...]) -> list[str]:
        if style == "text":
            return list(map(escape.one_line, cells))
        return [escape.markdown_cell(cell, line_break="<br>") for cell in cells]

    rows = [None if row.rule else written(row.cells) for row in table.rows]
    marks = table.marks if style == "md" else ()
    lines = aligned(written(table.headings), rows, _right_columns(table), style=style, marks=marks)
    for at, row in enumerate(table.rows, start=2):
        if row.rule and style == "md":  # as it stood
            lines[at] = f"| {' | '.join(row.cells)} |"
    return lines


def _right_columns(table: Table) -> list[bool]:
    """Right-aligned where the source said so, else where all cells look like numbers."""
    columns = max(map(len, (table.headings, *(row.cells for row in table.data))))
    if table.marks:
        marked = [mark.endswith(":") and not mark.startswith(":") for mark in table.marks]
        return marked + [False] * (columns - len(marked))
    right = []
    for i in range(columns):
        cells = [row.cells[i] for row in table.data if i < len(row.cells) and row.cells[i]]
        right.append(bool(cells) and all(cell[0] in "0123456789-+." for cell in cells))
    return right
