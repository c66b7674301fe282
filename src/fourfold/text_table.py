"""Tables of ready texts, and how they are written: text for terminals, Markdown, CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fourfold import escape
from fourfold.errors import UserError
from fourfold.escape import csv_text
from fourfold.units import millis, short_s, show_bytes, show_count, show_seconds

_THOUSANDS = r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?\Z"


class Grid(NamedTuple):
    """A table for people: headings and cells as ready texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


# A part of a page: a paragraph, which a terminal may fold, or a table, which it may not.
Part = str | Grid
# A heading, and the cell of an item under it.
Column = tuple[str, Callable[[Any], str]]
_FORMS: dict[str, Callable[[float], str]] = {
    "bytes": show_bytes,
    "count": show_count,
    "millis": millis,
    "seconds": show_seconds,
    "short": short_s,
}
# Units before a form, such as 'ms.3f': what a number in base units is multiplied with, or
# divided by.
_TIMES = {"ms": 1e3, "us": 1e6, "pct": 100.0}
_OVER = {"B": 1e9, "GB": 1e9, "GiB": 2.0**30, "T": 1e12}
_UNIT = rf"({'|'.join((*_TIMES, 'GiB', 'GB', 'B', 'T'))})?(.*)"


def table(items: Iterable[Any], *columns: Column) -> Grid:
    """A line for each item."""
    headings = [heading for heading, _ in columns]
    return Grid(headings, [[cell(item) for _, cell in columns] for item in items])


def named(*texts: str) -> list[Column]:
    """Return columns of fields, each under its own name or as in 'heading=field'. With a form it is
    a number, '-' where there is none: 'heading=field:.1f', 'field:bytes', in a unit 'field:ms.2f'.
    Rows are objects or tables; 'score.rows' is the field of a field, which may be None, 'links.0'
    the first of a list. A list is one cell."""
    return [*map(_named, texts)]


def _named(text: str) -> Column:
    heading, _, place = text.rpartition("=")
    path, _, form = place.partition(":")

    names, written = path.split("."), _number_form(form)

    def cell(value: Any) -> str:
        for name in names:
            if value is None:
                break
            if isinstance(value, dict):  # a number may be missing, a text is a slip
                value = value.get(name) if form else value[name]
            elif isinstance(value, tuple | list):
                value = value[int(name)]
            else:
                value = getattr(value, name)
        if form:
            return or_dash(value, written)
        return ", ".join(value) if isinstance(value, list | tuple) else str(value)

    return heading or path, cell


def _number_form(form: str) -> str | Callable[[float], str]:
    found = re.fullmatch(_UNIT, form)
    unit, rest = found.groups() if found else (None, form)
    if form in _FORMS or unit is None:
        return _FORMS.get(form, form)
    if unit in _TIMES:
        return lambda value: format(_TIMES[unit] * value, rest)
    return lambda value: format(value / _OVER[unit], rest)


def quantities(rows: Sequence[Sequence[str]]) -> Grid:
    return Grid(["quantity", "value", "note"], rows)


def or_dash(value: float | None, form: str | Callable[[float], str]) -> str:
    """A number in `form`, '-' where there is none."""
    if value is None or value != value:
        return "-"
    return format(value, form) if isinstance(form, str) else form(value)


def render(headings: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    """Cells are ready texts; numbers are right-aligned in text and Markdown."""
    if style == "csv":
        numbers = ([_plain_number(cell) for cell in row] for row in rows)
        return csv_text([headings, *numbers]).rstrip("\n")
    if style in ("md", "text"):
        written = escape.markdown_cell if style == "md" else escape.one_line
        titles, *cells = ([written(cell) for cell in row] for row in (headings, *rows))
        right = [
            bool(cells) and all(map(_is_number, column)) for column in zip(*cells, strict=True)
        ]
        return "\n".join(aligned(titles, cells, right or [False] * len(titles), style=style))
    raise UserError(
        "unknown format", field="format", value=style, hint=f"one of {', '.join(escape.FORMATS)}"
    )


def _plain_number(cell: str) -> str:
    """'4,608' -> '4608': other programs read a CSV's cell as the number it is."""
    return cell.replace(",", "") if re.match(_THOUSANDS, cell) else cell


def aligned(
    headings: Sequence[str],
    rows: Sequence[Sequence[str] | None],
    right: Sequence[bool],
    *,
    style: str,
    marks: Sequence[str] = (),
) -> list[str]:
    """Lines of a table in Markdown or text. Rows may be ragged; None is a rule between rows.
    `right`: which columns are right-aligned; `marks`: the cells under the headings (Markdown)."""
    is_text = style == "text"
    shown = [headings, *(row for row in rows if row is not None)]
    widths = [
        max([0 if is_text else 3, *(len(row[i]) for row in shown if i < len(row))])
        for i in range(max(map(len, shown)))
    ]
    left, between, end = ("", "  ", "") if is_text else ("| ", " | ", " |")

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(cells, widths, right, strict=False)
        )
        return f"{left}{between.join(padded)}{end}".rstrip()

    if is_text:
        rule = below = between.join("-" * width for width in widths)
    else:
        rule = f"{left}{between.join(['---'] * len(headings))}{end}"
        ends = zip(widths[: len(headings)], right, strict=False)
        below = marks or [
            "-" * (width - 1) + (":" if is_right else "-") for width, is_right in ends
        ]
        below = f"{left}{between.join(below)}{end}"
    return [line(headings), below, *(rule if row is None else line(row) for row in rows)]


def _is_number(cell: str) -> bool:
    return not cell or cell == "-" or escape.is_number(cell)
