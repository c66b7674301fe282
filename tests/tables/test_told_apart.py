"""Runs that differ in one setting stay apart: in tables, pages, CSV and the store's list."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fourfold.result.files.store import Store
from fourfold.result.from_run import record_of
from fourfold.result.record import Record
from fourfold.result.report import RunReport, StepReport
from fourfold.spec.policy import Policy
from fourfold.tables.derive import published
from fourfold.tables.document import Text
from fourfold.tables.publish import STYLE_CONVENTION, plain_records, publish
from tests.specs import run_spec

# Another value of every field of a policy than the run's own; a new field needs a line here.
OTHERS: dict[str, Any] = {
    "precision": "bf16-mixed", "param_dtype": "fp32", "compute_dtype": "fp8",
    "reduce_dtype": "fp32", "grad_dtype": "fp32", "optimizer_dtype": "fp32", "sharding": "zero3",
    "sequence_parallel": False, "cp_kind": "ulysses", "schedule": "gpipe", "virtual_stages": 2,
    "recompute": "full", "attention": "flash", "dispatcher": "allgather",
    "routing": "forced", "imbalance": 0.5, "overlap_exchange": True,
    "overlap_kind": "shared-expert", "scaling": "block",
    "optimizer": "adamw-plain", "compile": True,
    "cuda_graph": True, "async_tp": True, "prefetch": 2, "overlap_grad_reduce": False,
    "overlap_param_gather": False, "fused_projections": False, "loss_chunks": 4, "loss": "lean",
    "offload": "activations", "env": (("NCCL_DEBUG", "INFO"),),
}  # fmt: skip


def report(step_s: float, **policy: Any) -> RunReport:
    fields = {"seq_len": 2048, "global_batch": 64, "precision": "bf16-pure"} | policy
    steps = tuple(StepReport(step=i, seconds=step_s, warmup=False) for i in range(3))
    where = (("device", "NVIDIA H100 80GB HBM3"), ("torch", "2.13.0"))
    return RunReport(
        spec=run_spec("llama-3.1-8b", "pp2 dp2 cp2 tp2", **fields),
        outcome="ok",
        environment=where,
        steps=steps,
        started_at="2026-01-01T00:00:00+00:00",
    )


def reports() -> list[RunReport]:
    seconds = (0.5 * 1.01**n for n in itertools.count())
    changes = [{}, *({name: value} for name, value in OTHERS.items())]
    return [report(next(seconds), **change) for change in changes]


def test_every_field_of_a_policy_is_tried() -> None:
    """A field that an engine learns later is told apart without a word in a table's code, but only
    a value here shows it."""
    missing = {each.name for each in fields(Policy)} - OTHERS.keys()
    assert not missing, f"add a value of {', '.join(sorted(missing))} to OTHERS"


def test_no_run_is_taken_for_a_repeat_of_another() -> None:
    found = [published(record_of(one), i) for i, one in enumerate(reports())]
    assert len({record.config for record in found}) == len(found)


# Columns of a result: they differ between any two runs.
RESULTS = {"MFU", "HFU", "Model TFLOP", "Throughput (S/s)", "Throughput (T/s)",
           "Throughput (T/s/GPU)", "Sec/it", "TFLOPs", "Mem"}  # fmt: skip


@pytest.mark.parametrize("style", ["mpt", "topology"])
def test_tables_have_a_row_for_each_and_no_two_say_the_same(style: str) -> None:
    found = [published(record_of(one), i) for i, one in enumerate(reports())]
    blocks = publish(found, style, STYLE_CONVENTION[style]).blocks
    settings, above = [], ""
    for block in blocks:
        if isinstance(block, Text):
            above = " ".join(block.lines)
            assert "earlier" not in above  # the figure of a repeat
            continue
        kept = [i for i, heading in enumerate(block.headings) if heading not in RESULTS]
        settings += [(above, *(row.cells[i] for i in kept)) for row in block.data]
    assert len(settings) == len(set(settings)) == len(found)


def test_the_csv_for_other_tools_and_the_stores_list_tell_them_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    for one in reports():
        store.keep(one)
    found: list[Record] = [stored.summary for stored in store.runs()]
    assert len({(r.precision, r.sharding, r.recompute, r.virtual_stages, r.unlisted)
                for r in found}) == len(OTHERS) + 1  # fmt: skip
    rows = plain_records([published(record, i) for i, record in enumerate(found)], "causal")
    names = ("precision", "sharding", "recompute", "virtual_stages", "note")
    assert len({tuple(row[name] for name in names) for row in rows}) == len(OTHERS) + 1


def test_products_in_fp8_are_listed_as_fp8() -> None:
    record = record_of(report(0.5, compute_dtype="fp8"))
    assert (record.precision, record.settings) == ("fp8-pure", "")
    assert record_of(report(0.5, precision="bf16-mixed", compute_dtype="fp8")).precision == "fp8"
