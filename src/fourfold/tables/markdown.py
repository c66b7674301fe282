"""Markdown <-> Document. Tables may lack outer pipes, have rule lines inside, and ragged rows."""

from __future__ import annotations

import re

from fourfold import escape
from fourfold.show.table import aligned
from fourfold.tables.document import Document, Row, Table, Text

_MARK = re.compile(r":?-+:?\Z")
_BODY_RULE = re.compile(r":?-{2,}:?|:-+:?|-+:\Z")
_PIPE = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"\s*(```|~~~)")


def parse(text: str) -> Document:
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
        table, at = _table(lines, at)
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
    marks = cells_of(lines[at + 1])
    return all(_MARK.match(mark) for mark in marks) and not is_rule(cells_of(lines[at]))


def _table(lines: list[str], at: int) -> tuple[Table, int]:
    first = at
    headings, marks = cells_of(lines[at]), cells_of(lines[at + 1])
    bare = not lines[at].lstrip().startswith("|")
    at += 2
    rows: list[Row] = []
    while at < len(lines) and _in_table(lines[at], bare):
        cells = cells_of(lines[at])
        rows.append(Row(cells, rule=is_rule(cells), line=at + 1))
        at += 1
    return Table(headings, tuple(rows), marks, line=first + 1), at


def _in_table(line: str, bare: bool) -> bool:
    return line.lstrip().startswith("|") or (bare and "|" in line)


def is_rule(cells: tuple[str, ...]) -> bool:
    """A single '-' is a cell that says 'did not fit'; a rule is longer or carries a colon."""
    return all(_BODY_RULE.fullmatch(cell) for cell in cells)


def cells_of(line: str) -> tuple[str, ...]:
    line = line.strip()
    parts = _PIPE.split(line)
    if line.startswith("|"):
        parts = parts[1:]
    if len(parts) > 1 and line.endswith("|") and not line.endswith("\\|"):
        parts = parts[:-1]
    return tuple(_cell(part) for part in parts)


def _cell(part: str) -> str:
    return escape.from_markdown(part.strip().replace("\\|", "|").replace("<br>", "\n"))


def write(document: Document, style: str = "md") -> str:
    """Markdown; or aligned text for a terminal, not for reading again."""
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
