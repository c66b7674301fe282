"""Markdown <-> Document. Tables may lack outer pipes, have rule lines inside, and ragged rows."""

from __future__ import annotations

import re

from fourfold import escape
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


def write(document: Document, *, bare: bool = False) -> str:
    """`bare` leaves the pipes out: aligned text for a terminal, not for reading again."""
    lines: list[str] = []
    after_table = False
    for block in document.blocks:
        if isinstance(block, Text):
            shown = escape.visible if bare else escape.markdown_line
            lines += [shown(line.replace("\n", " ")) for line in block.lines]
            after_table = False
            continue
        if after_table:
            lines.append("")
        lines += _text_lines(block) if bare else _lines(block)
        after_table = True
    return "\n".join(lines) + "\n" if lines else ""


def _escaped(cell: str) -> str:
    return escape.markdown_cell(cell, line_break="<br>")


def _widths(rows: list[tuple[str, ...]]) -> list[int]:
    columns = max(len(row) for row in rows)
    return [max(len(row[i]) for row in rows if i < len(row)) for i in range(columns)]


def _right_columns(table: Table, columns: int) -> list[bool]:
    """Right-aligned where the source said so, else where all cells look like numbers."""
    marked = [mark.endswith(":") and not mark.startswith(":") for mark in table.marks]
    if table.marks:
        return marked + [False] * (columns - len(marked))
    found = []
    for i in range(columns):
        cells = [row.cells[i] for row in table.data if i < len(row.cells) and row.cells[i]]
        found.append(bool(cells) and all(cell[0] in "0123456789-+." for cell in cells))
    return found


def _padded(cells: tuple[str, ...], widths: list[int], right: list[bool]) -> list[str]:
    return [
        cell.rjust(widths[i]) if right[i] else cell.ljust(widths[i]) for i, cell in enumerate(cells)
    ]


def _lines(table: Table) -> list[str]:
    headings = tuple(map(_escaped, table.headings))
    rows = [tuple(map(_escaped, row.cells)) for row in table.rows]
    shown = [row for row, source in zip(rows, table.rows, strict=True) if not source.rule]
    widths = [max(3, width) for width in _widths([headings, *shown])]
    right = _right_columns(table, len(widths))
    marks = table.marks or tuple(
        "-" * (widths[i] - 1) + (":" if right[i] else "-") for i in range(len(headings))
    )
    lines = [f"| {' | '.join(_padded(headings, widths, right))} |", f"| {' | '.join(marks)} |"]
    for row, source in zip(rows, table.rows, strict=True):
        cells = list(row) if source.rule else _padded(row, widths, right)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _text_lines(table: Table) -> list[str]:
    headings = tuple(map(escape.one_line, table.headings))
    cells = [tuple(map(escape.one_line, row.cells)) for row in table.data]
    widths = _widths([headings, *cells])
    right = _right_columns(table, len(widths))
    rule = "  ".join("-" * width for width in widths)
    shown = iter(cells)
    lines = ["  ".join(_padded(headings, widths, right)).rstrip(), rule]
    for row in table.rows:
        lines.append(rule if row.rule else "  ".join(_padded(next(shown), widths, right)).rstrip())
    return lines
