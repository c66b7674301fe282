"""Tables read, written and read again are equal, cell by cell, with every trap of the styles;
Precision and MP Mode of the MPT tables name our precisions, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.escape import csv_text, visible
from fourfold.spec.policy import Policy
from fourfold.tables.cells import precision_cells, precision_of
from fourfold.tables.document import Document, Table, TableRow, Text
from fourfold.tables.forms import parse, read_file, write
from fourfold.tables.styles import columns, repaired_headings, style_of

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLES = GOLDEN / "raw_samples.md"
FORMS = ("md", "csv")


def written(document: Document, form: str) -> str:
    """As `report --out` writes both forms."""
    if form == "md":
        return write(document, form)
    return "\n".join(csv_text([t.headings, *(r.cells for r in t.rows)]) for t in document.tables)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["raw_samples.md", "bloom.csv", "mpt.csv", "par4d.csv"])
def test_read_write_read_is_the_same(name: str, form: str) -> None:
    document = read_file(GOLDEN / name)
    again = parse(written(document, form), form)
    assert again.tables == document.tables
    assert form == "csv" or again == document
    for table, other in zip(document.tables, again.tables, strict=True):
        assert [row.cells for row in other.rows] == [row.cells for row in table.rows]


def test_every_sample_table_is_recognised() -> None:
    tables = read_file(SAMPLES).tables
    assert [style_of(table) for table in tables] == ["mpt"] * 3 + ["topology"] * 14 + [
        "scaling"
    ] * 3


def test_cells_are_the_text_that_stands_in_the_file() -> None:
    lines = SAMPLES.read_text(encoding="utf-8").split("\n")
    for table in read_file(SAMPLES).tables:
        for row in table.rows:
            parts = lines[row.line - 1].strip().strip("|").split("|")
            assert row.cells == tuple(part.strip() for part in parts)


def test_twenty_cells_under_nineteen_headings() -> None:
    table = read_file(SAMPLES).tables[2]
    assert len(table.headings) == 19
    assert {len(row.cells) for row in table.rows} == {20}
    headings = repaired_headings(table, "mpt")
    assert headings[5:8] == ("HFU", "Model TFLOP", "MicroBatchSize")
    named = dict(zip(columns(table, "mpt"), table.rows[0].cells, strict=True))
    assert (named["model_tflop"], named["micro_batch"]) == ("1.525992", "4")
    assert named["params"] == "64862437376"


def test_rules_inside_the_body_stay_where_they_were() -> None:
    table = read_file(SAMPLES).tables[17]
    assert [at for at, row in enumerate(table.rows) if row.rule][:3] == [3, 7, 8]
    assert len(table.data) == 13


def test_a_single_dash_is_a_value_and_no_rule() -> None:
    document = parse("| a | b |\n|---|---|\n| - | - |\n|--|--|\n", "md")
    assert [row.rule for row in document.tables[0].rows] == [False, True]


def test_tables_without_outer_pipes_and_with_escaped_pipes() -> None:
    document = parse("a | b\n--|--\n1 | x\\|y\n\nend\n", "md")
    assert document.tables[0].rows[0].cells == ("1", "x|y")
    assert document.blocks[1] == Text(("", "end"))
    assert parse(write(document, "md"), "md") == document


def test_fenced_code_is_text() -> None:
    text = "```\n| a | b |\n|---|---|\n| 1 | 2 |\n```\n"
    assert parse(text, "md").tables == ()
    assert write(parse(text, "md"), "md") == text


def test_text_above_a_csv_table_is_not_its_heading() -> None:
    text = "# first, second\n#\n# third\n\n"
    table = Table(("# GPUs", "GPU"), (TableRow(("8", "h100"), line=0),))
    for heading in ("# GPUs,GPU", '"# GPUs",GPU'):
        two = text + f"{heading}\n8,h100\n\n" * 2
        assert parse(two, "csv").blocks == (Text(("first, second", "", "third")), table, table)


def test_broken_encoding_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "scaling.md"
    head = "| (TP, CP, PP, micro batch) | 4 GPU |\n|---|---|\n| (2, 1, 1, 1) | 446.72 |\n"
    path.write_bytes(head.encode() + "| (2, 1, 1, 2) | ー |\n".encode("cp932"))
    document = read_file(path)
    assert len(document.tables[0].rows) == 2
    assert parse(write(document, "md"), "md") == document


def test_binary_and_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.md").write_bytes(bytes(range(256)) * 50)
    with pytest.raises(UserError):
        read_file(tmp_path / "x.md")
    with pytest.raises(UserError, match="must be Markdown or CSV"):
        read_file(tmp_path / "x.json")


LETTER = st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=("Cs", "Cc", "Z"))
MARKS = st.sampled_from(["<br>", "<b>", "&lt;", "&#92;", "\\", "|", "=", "'", "@", "](", "&"])
CELL = (
    st.lists(LETTER | MARKS, min_size=1, max_size=8)
    .map("".join)
    .filter(lambda cell: cell == visible(cell.strip()) and not set(cell) <= set("-:"))
    .filter(lambda cell: not cell.startswith("#"))  # in CSV, a line of text
)


@given(
    headings=st.lists(CELL, min_size=1, max_size=5),
    rows=st.lists(st.lists(CELL | st.sampled_from(["", "-", "a b"]), min_size=2, max_size=6)),
    form=st.sampled_from(FORMS),
)
def test_any_table_survives(headings: list[str], rows: list[list[str]], form: str) -> None:
    """Ragged rows, pipes, quotes, commas, backslashes, other scripts."""
    table = Table(tuple(headings), tuple(TableRow(tuple(row)) for row in rows))
    document = Document((table,))
    assert parse(written(document, form), form) == document


@pytest.mark.parametrize(
    ("ours", "cells", "formats"),
    [
        ("bf16-mixed", ("amp_bf16", "DEFAULT"), ("fp32", "bf16", "fp32", "fp32", "fp32")),
        ("bf16-pure", ("bf16", "PURE"), ("bf16", "bf16", "bf16", "bf16", "bf16")),
        ("fp8", ("amp_fp8", "DEFAULT"), ("fp32", "fp8", "fp32", "fp32", "fp32")),
    ],
)
def test_precision_and_mode_map_both_ways(ours, cells, formats):
    assert precision_cells(ours) == cells
    assert precision_of(*cells) == ours
    # A row that was read keeps its own two words.
    assert precision_cells(*cells) == cells
    dtypes = Policy(precision=ours).dtypes
    found = (dtypes.param, dtypes.compute, dtypes.reduce, dtypes.grad, dtypes.optimizer)
    assert found == formats


def test_other_words_stay():
    assert precision_cells("fp16") == ("fp16", "DEFAULT")
    assert precision_of("fp32", "DEFAULT") == "fp32"
    assert precision_of("amp_bf16", "") == "bf16-mixed"
