"""In which forms is a file of tables read and written? Markdown, CSV and JSON; text only written.

In CSV tables are parted by blank lines, and text stands in lines that begin with '#'.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from fourfold import escape, files
from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.tables import markdown
from fourfold.tables.document import Document, Row, Table, Text, from_plain, to_plain


def form_of(path: str | Path) -> str:
    """md, csv or json, by the file's ending; anything else is read as Markdown."""
    ending = Path(path).suffix.lower()
    return {".csv": "csv", ".tsv": "csv", ".json": "json"}.get(ending, "md")


def read_file(path: str | Path) -> Document:
    """Read a file of tables. Bytes that are no UTF-8 become U+FFFD: tables with dashes in broken
    encoding exist, and one such cell must not cost the other rows."""
    form = form_of(path)
    try:
        text = files.read_text(path, field="table")
    except UserError as error:
        if "UTF-8" not in error.rule:
            raise
        text = Path(path).read_bytes().decode("utf-8", errors="replace")
        if text.count("\ufffd") > max(20, len(text) // 20) or "\0" in text:
            raise
    try:
        return parse(text, form)
    except UserError as error:
        raise error.inside(path) from None


def parse(text: str, form: str) -> Document:
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if form == "json":
        return from_plain(codec.parse_json(text))
    return _from_csv(text) if form == "csv" else markdown.parse(text)


def write(document: Document, form: str) -> str:
    """The document as md, csv, json or text; all but text can be read again."""
    if form == "json":
        return escape.json_text(to_plain(document), indent=1) + "\n"
    if form == "csv":
        return _to_csv(document)
    if form in ("md", "text"):
        return markdown.write(document, form)
    raise UserError("unknown format", field="format", value=form, hint="text, md, csv or json")


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
    texts = []
    while at < len(lines) and lines[at].startswith("#") and _is_text(lines, at):
        texts.append(lines[at][1:].removeprefix(" "))
        at += 1
    return Text(tuple(texts), line=first + 1), at


def _table(lines: list[str], at: int) -> tuple[Table, int]:
    first = at
    separator = "\t" if "\t" in lines[at] and "," not in lines[at] else ","
    rows: list[Row] = []
    while at < len(lines) and lines[at].strip():
        if rows and lines[at].startswith("#") and _is_text(lines, at):
            break
        cells, used = _record(lines, at, separator)
        rows.append(Row(cells, rule=bool(rows) and markdown.is_rule(cells), line=at + 1))
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


def _to_csv(document: Document) -> str:
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
