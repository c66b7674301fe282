"""Is a row told to be of a training or of a benchmark, by what its run or its log says?"""

from __future__ import annotations

from pathlib import Path

import pytest

import fourfold
from fourfold.logs.words import words_of
from fourfold.result.stored_run import StoredRun
from fourfold.spec import catalog
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec
from fourfold.tables.derive import derive, equivalence, published
from fourfold.tables.forms import write
from fourfold.tables.row import PublishedRow
from tests.logs import written
from tests.logs.reading import BLOOM
from tests.page.sample import report

RANDOM = "benchmark-only (random tokens)"


@pytest.mark.parametrize(
    ("data", "routing", "model", "mark"),
    [
        ("", "natural", "llama-tiny", RANDOM),
        ("", "forced", "llama-tiny", RANDOM),  # nothing is routed
        ("c4", "natural", "llama-tiny", "training-equivalent"),
        ("c4", "natural", "mixtral-tiny", "training-equivalent"),
        ("c4", "forced", "mixtral-tiny", "benchmark-only (forced routing)"),
        ("", "forced", "mixtral-tiny", "benchmark-only (forced routing, random tokens)"),
    ],
)
def test_a_stored_run_is_marked_by_its_spec(data, routing, model, mark) -> None:
    policy = Policy(routing=routing)
    spec = RunSpec(model=catalog.model(model), gpus=1, data=data, policy=policy)
    record = published(StoredRun.of(report(spec)), 0)
    assert derive(record, "causal").equivalence == mark


@pytest.mark.parametrize(
    ("note", "mark"),
    [
        ("", ""),
        ("real tokens", "training-equivalent"),
        ("mock data; zero3 over 8 ranks", RANDOM),
        ("synthetic data, no optimizer", "benchmark-only (random tokens, no optimizer)"),
        ("Forced balance", "benchmark-only (forced routing)"),
        ("forward-only", "benchmark-only (no optimizer)"),
        ("random seed 3; optimizer in bf16", ""),
    ],
)
def test_a_published_row_is_marked_by_its_note(note: str, mark: str) -> None:
    assert equivalence(PublishedRow(note=note)) == mark


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"data_path": "['/data/a']", "mock_data": "False"}, "real tokens"),
        ({"data_path": "None", "mock_data": "True"}, "random tokens"),
        ({"data_path": "['/data/a']", "mock_data": "True"}, "random tokens"),
        ({"moe_router_force_load_balancing": "True", "mock_data": "True"},
         "random tokens, forced routing"),
        ({"training.dataset": "c4", "debug.moe_force_load_balance": "true"},
         "real tokens, forced routing"),
        ({"data_stages.0.data.dataset": "None"}, "random tokens"),
        ({"train_loader.dataset.remote": "s3://c4"}, "real tokens"),
        ({"micro_batch_size": "1"}, ""),
    ],
)  # fmt: skip
def test_a_configuration_says_what_tokens_are(flat: dict[str, str], words: str) -> None:
    assert words_of(flat) == words


def test_a_report_of_collected_logs_has_the_marks(tmp_path: Path) -> None:
    log = written.megatron(BLOOM[0])
    mocked = "".join(
        f"  mock_data {39 * '.'} True\n" if "data_path ." in line else line
        for line in log.splitlines(keepends=True)
    )
    for name, text in (("real", log), ("mock", mocked)):
        (tmp_path / f"{name}.log").write_text(text)
    out = str(tmp_path / "rows.csv")
    fourfold.collect(fourfold.CollectRequest(logs=(str(tmp_path),), out=out, cluster="jean-zay"))
    answer = fourfold.report(fourfold.ReportRequest(sources=(out,), style="mpt"))
    marks = {row["row_id"]: row["equivalence"] for row in answer.rows()}
    assert marks == {"real": "training-equivalent", "mock": RANDOM}
    (table,) = answer.document.tables
    assert sorted(row.cells[table.headings.index("Equivalence")] for row in table.data) == [
        RANDOM, "training-equivalent"
    ]  # fmt: skip
    lines = [line for block in answer.document.blocks for line in getattr(block, "lines", ())]
    (said,) = (line for line in lines if line.startswith("Steps: "))
    assert sorted(said.removeprefix("Steps: ").split("; ")) == [
        f"1 {mark}" for mark in sorted(marks.values())
    ]
    path = tmp_path / "report.md"
    path.write_text(write(answer.document, "md"))
    again = fourfold.report(fourfold.ReportRequest(sources=(str(path),), style="mpt"))
    assert {row["equivalence"] for row in again.rows()} == {*marks.values()}
