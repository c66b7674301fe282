"""Results in the published styles: the published cells again, and tables without findings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.result.report import (
    OUTCOMES,
    Failure,
    Outcome,
    Prediction,
    RankMemory,
    RunReport,
    StepReport,
    published_word,
)
from fourfold.result.stored_run import StoredRun
from fourfold.spec.layout import Layout
from fourfold.spec.run import RunSpec
from fourfold.tables.derive import published
from fourfold.tables.document import Document
from fourfold.tables.forms import parse, read_file, write
from fourfold.tables.lint import lint
from fourfold.tables.publish import STYLE_CONVENTION, plain_records, publish
from fourfold.tables.records import records
from fourfold.tables.row import PublishedRow
from tests.specs import run_spec

GOLDEN = Path(__file__).parent.parent / "golden"
SAMPLES = read_file(GOLDEN / "raw_samples.md")
CPU = (("device", "Some CPU"), ("torch", "2.13.0"))
H100 = (("device", "NVIDIA H100 80GB HBM3"), ("torch", "2.13.0"))


def made(
    spec: RunSpec,
    step_s: float,
    *,
    outcome: Outcome = "ok",
    environment: tuple[tuple[str, str], ...] = CPU,
    at: str = "2026-01-01T00:00:00+00:00",
) -> PublishedRow:
    steps = tuple(StepReport(step=i, seconds=step_s, warmup=i == 0) for i in range(4))
    report = RunReport(
        spec=spec,
        outcome=outcome,
        environment=environment,
        steps=steps if outcome == "ok" else steps[:1],
        memory=(RankMemory(rank=0, stage=0, peak_bytes=12_345_678),),
        started_at=at,
        failure=None if outcome == "ok" else Failure(rank=0, stage=0, phase="step", message="bang"),
    )
    return published(StoredRun.of(report), 0)


def run(model: str, gpus: int, micro: int, **axes: int) -> RunSpec:
    used = math.prod(size for axis, size in axes.items() if axis != "ep")
    layout = Layout(**axes, shard=gpus // used)
    sizes = {"seq_len": 128, "micro_batch": micro, "global_batch": 16}
    return run_spec(model, layout, precision="fp32", **sizes)


def many() -> list[PublishedRow]:
    """Layouts of tiny and large models, uneven parts, failures, every axis."""
    found = []
    seconds = (0.0123 * 1.071**n for n in itertools.count())
    for model, gpus, micro in itertools.product(
        ("llama-tiny", "mpt-tiny", "gpt-tiny", "llama-3.1-8b"), (4, 8), (1, 3, 5)
    ):
        for axes in ({}, {"tp": 2}, {"pp": 2}, {"pp": 4}, {"tp": 2, "cp": 2}):
            found.append(made(run(model, gpus, micro, **axes), next(seconds)))
    for outcome in ("oom", "crashed", "hung", "nonfinite", "illegal"):
        bad = made(run("llama-tiny", 4, 7, tp=4), 0.0, outcome=outcome)  # type: ignore[arg-type]
        found.append(replace(bad, seq_len=128))
    found.append(made(run("llama-tiny", 8, 1, pp=8), 0.0, outcome="illegal"))  # 4 layers
    return found


@pytest.mark.parametrize("style", STYLE_CONVENTION)
def test_our_own_tables_give_no_findings(style: str) -> None:
    document = publish(many(), style, STYLE_CONVENTION[style])
    again = parse(write(document, "md"), "md")
    assert again == document
    assert [(item.rule, item.place, item.value) for item in lint(again)] == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_mpt_tables_come_out_as_they_went_in(number: int) -> None:
    source = SAMPLES.tables[number]
    found = publish(records(Document((source,))), "mpt", "mpt").tables[0]
    assert len(found.headings) == 20
    assert [row.cells for row in found.rows] == [row.cells for row in source.rows]


def test_the_scaling_tables_come_out_as_they_went_in() -> None:
    found = publish(
        [r for r in records(SAMPLES) if r.style == "scaling"], "scaling", "full-attention"
    )
    for source, table in zip(SAMPLES.tables[17:], found.tables, strict=True):
        columns = table.headings[1:]
        wanted = {
            row.cells[0]: dict(zip(source.headings[1:], row.cells[1:], strict=True))
            for row in source.data
        }
        for row in table.data:
            for heading, text in zip(columns, row.cells[1:], strict=True):
                was = wanted[row.cells[0]][heading]
                assert text == was or float(text) == float(was)


def test_an_mpt_run_prints_the_published_utilisation() -> None:
    """70b on 64 H100 at 66523 tokens/s: 42.57 and 56.76 in the table."""
    fields = {"precision": "bf16-mixed", "sharding": "zero3", "recompute": "full"}
    sizes = {"seq_len": 2048, "micro_batch": 8, "global_batch": 2048}
    spec = run_spec("mpt-70b", "dp64", **fields, **sizes)
    record = made(spec, 2048 * 2048 / 66523.5, environment=H100)
    table = publish([record], "mpt", "mpt").tables[0]
    cells = dict(zip(table.headings, table.rows[0].cells, strict=True))
    source = dict(zip(SAMPLES.tables[0].headings, SAMPLES.tables[0].rows[0].cells, strict=True))
    close = ("MFU", "HFU", "Model TFLOP")
    assert {k: v for k, v in cells.items() if k not in close} == {
        k: v for k, v in source.items() if k not in close
    }
    for name in close:
        assert float(cells[name]) == pytest.approx(float(source[name]), rel=5e-4)


def test_best_is_by_seconds_and_not_by_tflops() -> None:
    """Fewer GPUs, more TFLOPs each, and yet slower."""
    slow = made(run("llama-tiny", 4, 1, tp=2), 2.0)
    fast = made(run("llama-tiny", 8, 1, tp=2), 1.5)
    text = write(publish([slow, fast], "topology", "causal"), "text")
    best = next(line for line in text.split("\n") if line.startswith("Best by seconds"))
    assert "on 8 GPUs, 1.500 s" in best
    assert "most TFLOPs: dp2 tp2" in best


def test_the_best_is_named_with_its_ranks_of_experts() -> None:
    slow, fast = made(run("mixtral-tiny", 4, 1), 2.0), made(run("mixtral-tiny", 4, 1, ep=2), 1.5)
    text = write(publish([slow, fast], "topology", "causal"), "text")
    assert "dp4 tp1 cp1 pp1 ep2 micro batch 1 on 4 GPUs, 1.500 s" in text


def test_the_best_is_named_with_the_settings_that_others_of_its_layout_lack() -> None:
    plain = run("llama-tiny", 4, 1, tp=2)
    compiled = replace(plain, policy=replace(plain.policy, compile=True))
    sharded = replace(plain, policy=replace(plain.policy, sharding="zero3"))
    again = made(compiled, 1.2, at="2025-01-01T00:00:00+00:00")
    found = [made(plain, 2.0), made(compiled, 1.0), again, made(sharded, 3.0)]
    text = write(publish(found, "topology", "causal"), "text")
    assert "on 4 GPUs; sharding zero1; compiled, 1.000 s" in text
    assert "on 4 GPUs; sharding zero1; compiled: 1.000 (earlier 1.200)" in text


@pytest.mark.parametrize("style", STYLE_CONVENTION)
def test_measured_again_shows_the_newest_and_keeps_both(style: str) -> None:
    old = made(run("llama-tiny", 4, 1, tp=2), 2.0, at="2026-01-01T00:00:00+00:00")
    new = made(run("llama-tiny", 4, 1, tp=2), 1.0, at="2026-02-01T00:00:00+00:00")
    failed = made(
        run("llama-tiny", 4, 1, tp=2), 1.0, outcome="hung", at="2026-03-01T00:00:00+00:00"
    )
    document = publish([new, old, failed], style, "mpt")
    (table,) = document.tables
    assert len(table.data) == 1
    assert "Repeat: dp2 tp2" in write(document, "md")
    shown = write(document, "md")
    newest = publish([new], style, "mpt").tables[0].data[0].cells
    assert table.data[0].cells == newest
    assert "(earlier " in shown
    assert "hang" in shown


def test_failed_runs_are_rows() -> None:
    bad = [made(run("llama-tiny", 4, 2, tp=2), 0.0, outcome="oom")]
    table = publish(bad, "topology", "causal").tables[0]
    cells = dict(zip(table.headings, table.rows[0].cells, strict=True))
    assert (cells["Mem"], cells["Sec/it"], cells["TFLOPs"]) == ("OOM", "", "")
    assert "oom: rank 0, step, bang" in cells["Notes"]
    assert publish(bad, "mpt", "mpt").tables[0].rows[0].cells[4] == "OOM"
    assert publish(bad, "scaling", "mpt").tables[0].rows[0].cells[1] == "-"


def test_reference_rows_become_any_style() -> None:
    found = records(read_file(GOLDEN / "bloom.csv"))
    document = publish(found, "topology", "megatron-recompute")
    assert sum(len(table.data) for table in document.tables) > 60
    findings = {item.rule for item in lint(parse(write(document, "md"), "md"))}
    assert findings <= {"memory-order"}  # the source's own suspicious cell


def test_a_scaling_table_loses_no_run() -> None:
    """Two shardings of the same layouts: every figure is there, and the best is one of them."""
    found = []
    for kind, factor in (("zero1", 1.0), ("zero3", 1.5)):
        for at, (gpus, micro) in enumerate(itertools.product((4, 8), (1, 2))):
            spec = run("llama-tiny", gpus, micro, tp=2)
            spec = replace(spec, policy=replace(spec.policy, sharding=kind))
            found.append(made(spec, factor * (1.0 + 0.1 * at)))
    document = publish(found, "scaling", "causal")
    text = write(document, "text")
    cells = [cell for table in document.tables for row in table.data for cell in row.cells[1:]]
    assert len([cell for cell in cells if cell.strip()]) == len(found)
    assert len(document.tables) == 2
    assert "; sharding zero1" in text
    assert "; sharding zero3" in text
    for line in text.split("\n"):
        if line.startswith("Best by seconds"):
            assert line.split(", ")[-1].split()[0] in cells
    assert not lint(parse(write(document, "md"), "md"))


def test_ranks_of_experts_share_no_cell_of_a_scaling_table() -> None:
    found = [made(run("mixtral-tiny", 4, 1, ep=ep), 1.0 + ep) for ep in (1, 2, 4)]
    document = publish(found, "scaling", "causal")
    assert [len(table.data) for table in document.tables] == [1, 1, 1]
    assert "; ep 4" in write(document, "text")


def test_a_published_run_keeps_its_prediction() -> None:
    spec = run("llama-tiny", 4, 1)
    predicted = Prediction(step_s=0.5, step_s_low=0.4, step_s_high=0.6, peak_bytes=1.0)
    report = RunReport(spec=spec, outcome="oom", predicted=predicted)
    (plain,) = plain_records([published(StoredRun.of(report), 0)], "mpt")
    assert (plain["predicted_s"], plain["status"], plain["row_id"]) == (0.5, "oom", spec.run_id)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_is_published_and_read_back(outcome: Outcome) -> None:
    """A new outcome needs a word in tables, and its row must not read as a result."""
    record = made(run("llama-tiny", 4, 1), 0.1, outcome=outcome)
    (again,) = records(publish([record], "topology", "mpt"))
    assert published_word(again.outcome) == published_word(outcome)
    assert (again.step_s is None) == (outcome != "ok")
