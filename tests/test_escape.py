"""Text that others wrote, through every way out: it is shown, it steers nothing."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from fourfold import escape
from fourfold.tables import forms
from fourfold.tables.document import Document, Table, TableRow, Text
from fourfold.tables.forms import parse, write
from fourfold.text_table import render
from tests.fuzz import call

HOSTILE = (
    "\x1b[2J\x1b]0;title\x07", "\x9b31m", "a\nb", "a\r\nb", "x\u202eevil", "\u2028", "\ud800",
    "<script>alert(1)</script>", "<!-- ", "a|b", "\\|", "\\\\|x", "=cmd|' /C calc'!A0", "+1+1",
    "-2+3", "@SUM(A1)", "\t=1", " =1", "\r=1", "\uff1d1", "'=1", "](javascript:x)", "&lt;b&gt;",
    "\x00", "\x7f", "\U000e0041", "\ufeff", "|---|", "# heading", "1e5", "-5", "-", "---", "",
)  # fmt: skip
any_text = st.one_of(
    st.text(), st.sampled_from(HOSTILE), st.lists(st.sampled_from(HOSTILE)).map("".join)
)
lists = st.lists(st.lists(any_text, min_size=2, max_size=2), min_size=1, max_size=4)


def steers(text: str) -> bool:
    """Something in it a terminal would act on, or a reader would not see."""
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return any(
        (unicodedata.category(letter) in ("Cc", "Zl", "Zp", "Cs") and letter not in "\n\t")
        or unicodedata.bidirectional(letter) in bidi
        for letter in text
    )


@given(rows=lists)
def test_text_tables_keep_their_lines(rows: list[list[str]]) -> None:
    shown = render(["a", "b"], rows, "text")
    assert not steers(shown)
    assert len(shown.split("\n")) == 2 + len(rows)


@given(rows=lists)
def test_markdown_tables_hold_cells_and_nothing_else(rows: list[list[str]]) -> None:
    shown = render(["a", "b"], rows, "md")
    assert not steers(shown)
    assert not re.search(r"<[A-Za-z/!?]|\]\(", shown)
    lines = shown.split("\n")
    assert len(lines) == 2 + len(rows)
    # As GitHub's readers cut: a backslash takes the next letter with it.
    bars = [len(re.sub(r"\\.", "", line).split("|")) for line in lines]
    assert set(bars) == {4}, shown


@given(rows=lists)
def test_csv_cells_are_no_formulas(rows: list[list[str]]) -> None:
    shown = render(["a", "b"], rows, "csv")
    assert not steers(shown)
    found = list(csv.reader(io.StringIO(shown, newline="")))
    assert len(found) == 1 + len(rows)
    for cell in (cell for row in found for cell in row):
        if cell.lstrip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20"):
            assert escape.is_number(cell) or set(cell.strip()) == {"-"}, cell
        assert cell[:1] not in ("\t", "\r")


ANY_JSON = st.recursive(
    any_text | st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(any_text, inner),
)


@given(data=ANY_JSON)
def test_json_is_what_any_reader_takes(data: object) -> None:
    shown = escape.json_text(data)
    assert shown.isascii()
    json.dumps(json.loads(shown), ensure_ascii=False).encode()  # no half of a surrogate pair


@given(text=any_text)
def test_documents_read_back_what_they_show(text: str) -> None:
    cell = escape.visible(" ".join(text.split()))
    table = Table(("heading", "other"), (TableRow((cell, "x")),))
    assert parse(write(Document((table,)), "md"), "md").tables == (table,)


@given(lines=st.lists(any_text))
def test_lines_of_a_document_are_no_html(lines: list[str]) -> None:
    shown = forms.write(Document((Text(tuple(lines)),)), "md")
    assert not steers(shown)
    assert not re.search(r"<[A-Za-z/!?]|\]\(", shown)


@given(words=st.lists(any_text, min_size=1, max_size=3))
def test_errors_are_one_harmless_line(words: list[str]) -> None:
    _, out, err = call(["models", *(word.replace("\0", "") for word in words)])
    assert not steers(out + err)
    assert err.count("\n") == bool(err)


def test_numbers_stay_numbers_in_csv() -> None:
    for cell in ("-1.5", "+3%", "-12 GB", "1,234", "-1e-05", "-", "---", "5"):
        assert escape.csv_cell(cell) == cell
    rows = [["a,b", "1,234,567.5"], ["c|d", "-1,000"], ["1,2", "12,34"]]
    found = csv.reader(io.StringIO(render(["name", "count"], rows, "csv")))
    assert [*found][1:] == [["a,b", "1234567.5"], ["c|d", "-1000"], ["1,2", "12,34"]]
