"""Lint finds published mistakes and planted faults of every rule, and nothing in clean tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fourfold.spec import catalog
from fourfold.tables.document import Document, Table, TableRow, Text
from fourfold.tables.forms import read_file
from fourfold.tables.lint import RULES, Finding, lint
from tests.sampling import examples

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLES = read_file(GOLDEN / "raw_samples.md")
MPT, TOPOLOGY, SCALING = SAMPLES.tables[0], SAMPLES.tables[6], SAMPLES.tables[17]
SHAPED = (Text(("NLAYERS=72", "NHIDDEN=14336", "NHEADS=64")), SAMPLES.tables[16])
HEADED = "NHIDDEN=14336 / NLAYERS=72 / GBS=2048"


def reference(name: str, without: tuple[str, ...] = ()) -> Table:
    table = read_file(GOLDEN / name).tables[0]
    return Table(table.headings, tuple(row for row in table.rows if row.cells[0] not in without))


BLOOM = reference("bloom.csv", ("bloom-r062",))
PAR4D = reference("par4d.csv")
MPT_ROWS = reference("mpt.csv")
# Enough for what one row shows by itself, and clean as well: to read all takes half a second.
FEW_BLOOM, FEW_PAR4D, FEW_MPT = (
    Table(table.headings, table.rows[::4]) for table in (BLOOM, PAR4D, MPT_ROWS)
)


def numbered(*blocks: Table | Text) -> Document:
    """The blocks with lines of their own, as if read from a file."""
    line, found = 0, []
    for block in blocks:
        if isinstance(block, Text):
            found.append(block)
            line += len(block.lines)
            continue
        rows = tuple(TableRow(r.cells, r.rule, line + 3 + i) for i, r in enumerate(block.rows))
        found.append(Table(block.headings, rows, block.marks, line + 1))
        line += 3 + len(rows)
    return Document(tuple(found))


def cell(table: Table, row: int, heading: str) -> str:
    return table.data[row].cells[table.headings.index(heading)]


def put(table: Table, row: int, values: dict[str, str]) -> Table:
    """The table with some cells of its row-th data row replaced."""
    changed = list(table.data[row].cells)
    for heading, text in values.items():
        changed[table.headings.index(heading)] = text
    rows = list(table.data)
    rows[row] = TableRow(tuple(changed))
    return Table(table.headings, tuple(rows), table.marks)


def rules(*blocks: Table | Text, row: int | None = None) -> set[str]:
    """Ids of the findings; of one data row of the last table only, when asked."""
    document = numbered(*blocks)
    line = None if row is None else document.tables[-1].data[row].line
    return {item.rule for item in lint(document) if line is None or item.row == line}


# --- the published tables


def test_the_published_mistakes_are_found() -> None:
    found = {(item.rule, item.row) for item in lint(SAMPLES)}
    assert found == {
        ("gpus-axes", 120),  # 40 nodes, DP 8 x TP 8 x PP 10
        ("batch-heading", 128),
        ("batch-heading", 129),  # GBS 2048 under a heading of 512
        ("size-label", 129),  # 10 layers are no 18B
    }


def test_the_repairs_are_the_true_values() -> None:
    found: dict[str, Finding] = {item.rule: item for item in lint(SAMPLES)}
    assert found["gpus-axes"].repair.startswith("DP 4")
    assert found["batch-heading"].repair.startswith("512 in the row")
    assert "28.3B" in found["size-label"].repair


@pytest.mark.parametrize(
    "blocks",
    [
        (MPT,), (SAMPLES.tables[1],), (TOPOLOGY,), SHAPED, (SCALING,), (SAMPLES.tables[18],),
        (SAMPLES.tables[19],), (PAR4D,), (BLOOM,), (MPT_ROWS,), (FEW_BLOOM,), (FEW_PAR4D,),
        (FEW_MPT,), *((table,) for table in SAMPLES.tables[3:12]),
    ],
)  # fmt: skip
def test_clean_tables_give_nothing(blocks: tuple[Table | Text, ...]) -> None:
    assert rules(*blocks) == set()


def test_the_zero_rows_of_the_notes() -> None:
    """ZeRO-1's columns are exchanged (the same run stands right elsewhere), ZeRO-0 counts by the
    old formula."""
    headings = ("Nodes", "Size", "ZS", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs")
    main = ("48", "181B", "1", "4", "8", "12")
    good = [
        (*main, "1", "2048", "29GB", "143.31", "112.49"),
        (*main, "2", "2048", "37GB", "134.02", "120.29"),
        ("48", "181B", "1", "8", "8", "6", "1", "2048", "38GB", "139.82", "115.31"),
        ("48", "181B", "1", "8", "8", "6", "2", "2048", "44GB", "131.02", "123.05"),
    ]
    odd = [
        ("48", "181B", "0", "4", "8", "12", "2", "2048", "72GB", "137.34", "113.02"),
        ("48", "181B", "1", "4", "8", "12", "2", "2048", "37GB", "120.29", "134.02"),
    ]
    text = Text(("NHIDDEN=14336 / NLAYERS=72",))
    first = Table(headings, tuple(map(TableRow, good)))
    second = Table(headings, (*map(TableRow, good[:1]), *map(TableRow, odd)))
    document = numbered(text, first, text, second)
    rows = document.tables[1].data
    assert [(item.rule, item.row) for item in lint(document)] == [
        ("convention-mix", rows[1].line),
        ("swapped-values", rows[2].line),
    ]


# --- planted faults

INDEX = st.integers(min_value=0, max_value=200)


def changed_number(text: str, factor: float) -> str:
    places = len(text.partition(".")[2])
    return f"{float(text) * factor:.{places}f}"


Draw = Callable[[st.SearchStrategy], Any]
Change = Callable[[Draw, Table, int], dict[str, str]]


def times(headings: Sequence[str], factors: Sequence[float]) -> Change:
    """One of these cells, which holds a number, times one of the factors."""

    def change(draw: Draw, table: Table, row: int) -> dict[str, str]:
        heading = draw(st.sampled_from(headings))
        assume(cell(table, row, heading))
        return {heading: changed_number(cell(table, row, heading), draw(st.sampled_from(factors)))}

    return change


def plus(headings: Sequence[str], least: int, most: int) -> Change:
    def change(draw: Draw, table: Table, row: int) -> dict[str, str]:
        heading = draw(st.sampled_from(headings))
        return {heading: str(int(cell(table, row, heading)) + draw(st.integers(least, most)))}

    return change


def says(heading: str, *texts: str, where: str = "") -> Change:
    """Where another cell is not empty: a row without a result has none to be wrong."""

    def change(draw: Draw, table: Table, row: int) -> dict[str, str]:
        assume(not where or cell(table, row, where))
        return {heading: draw(st.sampled_from(texts))}

    return change


def swapped(one: str, other: str) -> Change:
    def change(draw: Draw, table: Table, row: int) -> dict[str, str]:
        found = {one: cell(table, row, other), other: cell(table, row, one)}
        assume(all(found.values()))
        return found

    return change


FACTORS = [0.5, 0.9, 0.96, 1.05, 1.2, 2.0]
FACTOR = st.sampled_from(FACTORS)
SIZES = [f"{round(181 * factor)}B" for factor in (0.5, 0.8, 0.9, 1.1, 1.5, 10.0)]
WORK = {"work-constant", "convention-mix"}
RATES = ["Throughput (S/s)", "Throughput (T/s/GPU)"]
# What is planted -> (rules of which one must see it, the table, what is changed in a row).
FAULTS: dict[str, tuple[set[str], tuple[Table | Text, ...], Change]] = {
    "another axis": ({"gpus-axes"}, (TOPOLOGY,), times(["DP", "TP", "PP"], [2, 3, 4, 5])),
    "another axis of a reference row": (
        {"gpus-axes"}, (FEW_BLOOM,), times(["tp", "dp", "pp", "n_gpus"], [3])
    ),
    "more accumulation": ({"batch-reach"}, (MPT,), plus(["GradAccum"], 1, 9)),
    "more tokens": ({"batch-tokens"}, (MPT,), plus(["GlobalBatchSize (T)"], 1, 10**6)),
    "another size": ({"size-label"}, SHAPED, says("Size", *SIZES)),
    "more parameters": ({"size-label"}, (MPT,), plus(["NumParams"], 1, 10**9)),
    "a shape under a known name": ({"size-label"}, (FEW_MPT,), plus(["n_layers"], 8, 8)),
    "other work": (WORK, SHAPED, times(["TFLOPs", "Sec/it"], FACTORS)),
    "other work without a shape": (WORK, SHAPED[1:], times(["TFLOPs", "Sec/it"], FACTORS)),
    "other work of an MPT row": (WORK, (MPT,), times(["MFU", "Model TFLOP"], FACTORS)),
    "another convention than stated": (
        {"convention-mix"}, (FEW_PAR4D,), says("flop_rule", "causal", "mpt", where="tflops_gpu")
    ),
    "another rate": ({"throughput"}, (MPT,), plus(RATES, 3, 90)),
    "other seconds of a reference row": ({"throughput"}, (FEW_BLOOM,), times(["step_s"], FACTORS)),
    "another HFU": ({"hfu-mfu"}, (MPT,), times(["HFU"], [0.9, 1.02, 1.3])),
    "seconds for TFLOPs": ({"swapped-values"}, (FEW_BLOOM,), swapped("step_s", "tflops_gpu")),
    "MFU for HFU": ({"swapped-values"}, (MPT,), swapped("MFU", "HFU")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@settings(deadline=None)
@given(data=st.data())
def test_a_planted_fault_is_seen_in_its_row(fault: str, data: st.DataObject) -> None:
    wanted, (*above, table), change = FAULTS[fault]
    assert isinstance(table, Table)
    row = data.draw(st.integers(0, len(table.data) - 1))
    planted = put(table, row, change(data.draw, table, row))
    assert rules(*above, planted, row=row) & wanted


def test_a_value_in_a_column_too_small_for_its_layout() -> None:
    planted = put(SCALING, 3, {"8 GPU": "151.65"})
    assert "gpus-axes" in rules(planted, row=3)


@settings(deadline=None)
@given(INDEX, st.integers(1, 400))
def test_batch_reach(at: int, less: int) -> None:
    row = at % len(TOPOLOGY.data)
    batch = int(cell(TOPOLOGY, row, "GBS")) - less
    assume(batch % int(cell(TOPOLOGY, row, "DP")))
    assert "batch-reach" in rules(put(TOPOLOGY, row, {"GBS": str(batch)}), row=row)


@settings(deadline=None)
@given(INDEX, st.sampled_from(["512", "1024", "4096"]))
def test_batch_heading(at: int, heading: str) -> None:
    table = SAMPLES.tables[8]
    text = Text((f"NHIDDEN=14400 / NLAYERS=78 / GBS={heading}",))
    assert "batch-heading" in rules(text, table, row=at % len(table.data))
    assert rules(Text(("NHIDDEN=14400 / NLAYERS=78 / GBS=2048",)), table) == set()


@settings(deadline=None)
@given(INDEX, FACTOR)
def test_work_of_a_lone_row(at: int, factor: float) -> None:
    assume(abs(factor - 1) > 0.06)  # without its vocabulary a lone row is known to a few percent
    text, table = SHAPED
    row = at % len(table.data)
    alone = Table(table.headings, (table.data[row],))
    planted = put(alone, 0, {"TFLOPs": changed_number(cell(alone, 0, "TFLOPs"), factor)})
    assert rules(text, alone) == set()
    assert rules(text, planted, row=0) & {"work-constant", "convention-mix"}


@given(INDEX, FACTOR, st.sampled_from([BLOOM, PAR4D, MPT_ROWS]))
@settings(max_examples=examples(40))
def test_work_of_reference_rows(at: int, factor: float, table: Table) -> None:
    row = at % len(table.data)
    assume(cell(table, row, "tflops_gpu"))
    planted = put(
        table, row, {"tflops_gpu": changed_number(cell(table, row, "tflops_gpu"), factor)}
    )
    assert rules(planted, row=row) & {"work-constant", "convention-mix"}


@settings(deadline=None)
@given(INDEX, st.sampled_from(["megatron-old", "megatron-norecompute", "causal"]))
def test_convention_mix(at: int, convention: str) -> None:
    """One row restated by another formula; 181B at 2048 tokens."""
    ratios = {"megatron-old": 113.02 * 137.34 / (120.29 * 134.02), "megatron-norecompute": 0.75}
    text, table = SHAPED
    row = at % len(table.data)
    factor = ratios.get(convention, 0.75 * 0.9882)
    planted = put(table, row, {"TFLOPs": changed_number(cell(table, row, "TFLOPs"), factor)})
    assert rules(text, planted, row=row) == {"convention-mix"}


@settings(deadline=None)
@given(INDEX)
def test_mfu_by_six_n(at: int) -> None:
    """MFU that leaves attention out, as the tables' mfu* column did."""
    row = at % len(MPT.data)
    params, speed = int(cell(MPT, row, "NumParams")), int(cell(MPT, row, "Throughput (T/s)"))
    mfu = 6 * params * speed / int(cell(MPT, row, "# GPUs")) / 989.5e12 * 100
    assume(abs(mfu / float(cell(MPT, row, "MFU")) - 1) > 0.01)
    planted = put(MPT, row, {"MFU": f"{mfu:.2f}"})
    assert "convention-mix" in rules(planted, row=row)


@pytest.mark.parametrize(
    ("model", "gpus", "pp", "ep", "rule", "seen"),
    [
        # DeepSeek-V3 with EP 64 and PP 16: 1,024 GPUs, or a multiple; one table says 256.
        ("deepseek-v3", 1024, 16, 64, "expert-ranks", False),
        ("deepseek-v3", 256, 16, 64, "expert-ranks", True),
        ("deepseek-v3", 256, 16, 1, "expert-ranks", False),
        ("qwen3-30b-a3b", 96, 1, 3, "experts-divide", True),
        ("qwen3-30b-a3b", 96, 1, 32, "experts-divide", False),
    ],
)
def test_experts_that_lie_nowhere(model, gpus, pp, ep, rule, seen) -> None:
    headings = ("Model", "GPUs", "DP", "TP", "PP", "EP", "MBS", "GBS", "Sec/it")
    row = (model, gpus, gpus // pp, 1, pp, ep, 1, 1536, "12.5")
    assert (rule in rules(Table(headings, (TableRow(tuple(map(str, row))),)))) == seen


@pytest.mark.parametrize(
    ("model", "tokens_s", "tflops", "words"),
    [
        # Megatron-Bridge's page of GB300s: 26.02, and 26.08, which counts windows as they are
        ("gpt-oss-120b", 19412, 527.0, "two of an expert's three matrices, and windows as whole"),
        ("gpt-oss-120b", 33024, 1077.0, ""),
        ("mixtral-8x7b", 10000, 2826.4, "all experts as active"),
        ("mixtral-8x7b", 10000, 797.1, ""),
    ],
)
def test_miscounted_experts(model: str, tokens_s: float, tflops: float, words: str) -> None:
    shape = catalog.model(model)
    named = {"row_id": "r1", "n_layers": shape.layers, "d_model": shape.hidden, "step_s": "",
             "model": model, "stack": "megatron", "flop_rule": "causal", "seq_len": 4096,
             "tokens_s_gpu": tokens_s, "tflops_gpu": tflops, "act_ckpt": "none", "n_gpus": 64,
             "status": "ok"}  # fmt: skip
    table = Table(tuple(named), (TableRow(tuple(str(value) for value in named.values())),))
    found = [one for one in lint(numbered(table)) if one.rule == "experts-counted"]
    assert [words in one.value for one in found] == ([True] if words else [])


PLANTED_APART: dict[str, Callable[..., None]] = {
    "batch-heading": test_batch_heading,
    "expert-ranks": test_experts_that_lie_nowhere,
    "experts-divide": test_experts_that_lie_nowhere,
    "experts-counted": test_miscounted_experts,
}


def test_every_rule_has_its_planted_fault() -> None:
    assert PLANTED_APART.keys() | set().union(*(rule for rule, *_ in FAULTS.values())) == set(RULES)


def test_traps_give_no_alarm() -> None:
    """OOM, fail, xxxx, GB, dashes of all kinds, empty rows, uneven parts that are stated."""
    headings = ("Nodes", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
    rows = (
        ("48", "181B", "8", "8", "6", "8", "2048", "OOM", "", "", "OOM"),
        ("48", "181B", "8", "8", "6", "8", "2048", "GB", "fail", "fail", ""),
        ("48", "181B", "8", "8", "6", "8", "2048", "GB", "xxxx", "xxxx", "always hangs"),
        ("48", "181B", "8", "8", "6", "8", "2048", "\u30fc", "\u00e3\u0192\u00bc", "\ufffd[", ""),
        ("48", "181B", "4", "8", "12", "3", "2048", "40GB", "", "", "micro 3+3+2"),
        ("35", "181B", "7", "8", "5", "1", "2044", "40GB", "", "", "stages 15+15+14+14+14"),
        ("", "", "", "", "", "", "", "", "", "", ""),
        ("", "", "", "", "", "", "", "", "", "", ""),
    )
    table = Table(headings, tuple(map(TableRow, rows)))
    assert rules(Text((HEADED.replace(" / GBS=2048", ""),)), table) == set()


def test_golden_csv_rows_equal_the_csv_module() -> None:
    """The lint of a CSV sees the same rows as the csv module does."""
    text = (GOLDEN / "par4d.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(text)))
    assert [row.cells[0] for row in PAR4D.rows] == [row[0] for row in rows[1:]]
