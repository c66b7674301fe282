"""How is a table printed? Text for terminals, Markdown, CSV, JSON: one list of rows, four forms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fourfold import escape
from fourfold.errors import UserError
from fourfold.escape import csv_text, json_text

__all__ = ["FORMATS", "csv_text", "json_text", "render"]

_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?\Z")
FORMATS = ("text", "md", "csv", "json")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for people: headings and cells as ready texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


# A part of a page: a paragraph, which a terminal may fold, or a table, which it may not.
Part = str | Grid


def render(headings: Sequence[str], rows: Sequence[Sequence[str]], style: str) -> str:
    """Cells are ready texts; numbers are right-aligned in text and Markdown."""
    if style == "csv":
        numbers = ([_plain_number(cell) for cell in row] for row in rows)
        return csv_text([headings, *numbers]).rstrip("\n")
    if style == "md":
        cells = [[escape.markdown_cell(cell) for cell in row] for row in (headings, *rows)]
        return _lined(cells, "| ", " | ", " |", rule=_markdown_rule)
    if style == "text":
        cells = [[escape.one_line(cell) for cell in row] for row in (headings, *rows)]
        return _lined(cells, "", "  ", "", rule=_text_rule)
    raise UserError(
        "unknown format", field="format", value=style, hint=f"one of {', '.join(FORMATS)}"
    )


def _plain_number(cell: str) -> str:
    """'4,608' -> '4608': other programs read a CSV's cell as the number it is."""
    return cell.replace(",", "") if _THOUSANDS.match(cell) else cell


def _lined(cells: list[list[str]], left: str, between: str, right: str, *, rule: Any) -> str:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numeric = [
        len(cells) > 1 and all(_is_number(row[i]) for row in cells[1:]) for i in range(len(widths))
    ]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if right_side else cell.ljust(width)
            for cell, width, right_side in zip(row, widths, numeric, strict=True)
        ]
        lines.append(f"{left}{between.join(padded)}{right}".rstrip())
    lines.insert(1, rule(widths, numeric))
    return "\n".join(lines)


def _text_rule(widths: list[int], numeric: list[bool]) -> str:
    return "  ".join("-" * width for width in widths)


def _markdown_rule(widths: list[int], numeric: list[bool]) -> str:
    marks = [
        "-" * (max(width, 3) - 1) + (":" if right else "-")
        for width, right in zip(widths, numeric, strict=True)
    ]
    return f"| {' | '.join(marks)} |"


def _is_number(cell: str) -> bool:
    return not cell or cell == "-" or escape.NUMBER.match(cell) is not None
