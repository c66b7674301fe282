"""Runs that differ in one setting stay apart: in tables, pages, CSV and the store's list."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.page.report import style_columns
from fourfold.result.files.store import Store
from fourfold.result.from_run import record_of
from fourfold.result.record import Record
from fourfold.result.report import RunReport, StepReport
from fourfold.spec import Layout, catalog
from fourfold.spec.policy import Policy
from fourfold.tables.derive import derive, published
from fourfold.tables.document import Text
from fourfold.tables.forms import parse
from fourfold.tables.publish import STYLE_CONVENTION, plain_records, publish
from fourfold.tables.records import records
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


def test_a_model_stored_before_it_had_a_field_is_the_same_model() -> None:
    new, older = (record_of(report(0.5, sharding=word)) for word in ("zero1", "zero3"))
    plain = json.loads(older.model_json)
    del plain["block"]
    older = replace(older, model_json=json.dumps(plain))
    found = [published(record, i) for i, record in enumerate((new, older))]
    (table,) = (b for b in publish(found, "topology", "causal").blocks if not isinstance(b, Text))
    assert len([*table.data]) == 2


@pytest.mark.parametrize("style", ["mpt", "topology"])
def test_a_page_shows_in_what_runs_differ(style: str) -> None:
    found = [published(record_of(one), i) for i, one in enumerate(reports())]
    columns = [one for one in style_columns(style, found) if one.heading not in RESULTS]
    shown = {tuple(column.write(record) for column in columns) for record in found}
    assert len(shown) == len(found)


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


# A Mixtral as Megatron's log has it: no name of the catalogue, and experts in columns of their own.
MIXTRAL = {
    "row_id": "a", "stack": "megatron-lm", "hardware": "h100-80gb", "family": "mixtral",
    "n_layers": "32", "d_model": "4096", "n_heads": "32", "n_kv_heads": "8", "d_ff": "14336",
    "vocab": "32000", "tied": "0", "seq_len": "8192", "n_gpus": "64", "tp": "2", "cp": "1",
    "pp": "4", "dp": "8", "ep": "8", "mbs": "1", "gbs": "256", "precision": "bf16",
    "sharding": "zero1", "act_ckpt": "none", "step_s": "11", "status": "ok", "experts": "8",
    "experts_per_token": "2", "expert_ffn": "14336", "dispatcher": "alltoall",
    "missing": "", "note": "",
}  # fmt: skip


def collected(*changes: dict[str, str]) -> list[Record]:
    rows = [MIXTRAL | {"row_id": f"r{at}"} | change for at, change in enumerate(changes)]
    lines = [MIXTRAL, *(row.values() for row in rows)]
    return records(parse("\n".join(map(",".join, lines)), "csv"))


def test_collected_experts_are_counted_without_a_name() -> None:
    (row,) = plain_records(collected({}), "causal")
    mixtral = catalog.model("mixtral-8x7b")
    assert row["params"] == model_params(mixtral, 8192)
    assert derive(collected({})[0], "causal").grad_accum == 32
    tokens_s_gpu = 256 * 8192 / 11 / 64
    count = convention("causal").count(
        FlopsQuery.of(model=mixtral, seq_len=8192, layout=Layout(), policy=Policy())
    )
    assert row["tflops_gpu"] == pytest.approx(count.printed * tokens_s_gpu / 1e12)


@pytest.mark.parametrize(("note", "mode"), [("", "DEFAULT"), ("eager; pure", "PURE")])
def test_collected_bf16_keeps_weights_in_fp32(note: str, mode: str) -> None:
    (table,) = publish(collected({"note": note}), "mpt", "mpt").tables
    row = dict(zip(table.headings, table.data[0].cells, strict=True))
    assert (row["Precision"], row["MP Mode"]) == ("amp_bf16", mode)


@pytest.mark.parametrize(
    "change", [{"experts_per_token": ""}, {"missing": "dense-model"}, {"missing": "all-weights"}]
)
def test_a_run_of_another_kind_is_not_counted_as_a_dense_model(change: dict[str, str]) -> None:
    (row,) = plain_records(collected(change), "causal")
    assert row["params"] is None
    assert row["tflops_gpu"] is None


@pytest.mark.parametrize(
    "change",
    [{"dispatcher": "deepep"}, {"experts_per_token": "1"}, {"expert_ffn": "7168"},
     {"recompute_modules": "moe_act"}, {"cuda_graph": "full_iteration"}, {"cluster": "mine"},
     {"head_dim": "64"}, {"note": "torch.compile"}, {"note": "zero3 over 4 ranks"}],
)  # fmt: skip
def test_no_collected_run_is_taken_for_a_repeat_of_another(change: dict[str, str]) -> None:
    blank = dict.fromkeys(change, "") | MIXTRAL
    rows = [list(blank), list(blank.values()), list((blank | change).values())]
    both = records(parse("\n".join(map(",".join, rows)), "csv"))
    for style in ("mpt", "topology"):
        document = publish(both, style, "causal")
        assert sum(len(table.data) for table in document.tables) == 2, style
