"""Do the forms of a table parse? CSV as numbers, Markdown with as many cells in every line."""

from __future__ import annotations

import csv
import io

from fourfold.show.table import render

ROWS = [["a,b", "1,234,567.5"], ["c|d", "-1,000"], ["1,2", "12,34"]]


def test_csv_has_numbers_without_commas() -> None:
    rows = list(csv.reader(io.StringIO(render(["name", "count"], ROWS, "csv"))))
    assert rows == [["name", "count"], ["a,b", "1234567.5"], ["c|d", "-1000"], ["1,2", "12,34"]]


def test_markdown_escapes_what_would_cut_a_cell() -> None:
    lines = render(["name", "count"], ROWS, "md").splitlines()
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}
