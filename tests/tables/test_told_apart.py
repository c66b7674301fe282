"""Runs that differ in one setting stay apart: in tables, pages, CSV and the store's list."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fourfold
from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.page.report import report_data
from fourfold.result.files.store import Store
from fourfold.result.report import RunReport, StepReport
from fourfold.result.stored_run import StoredRun
from fourfold.spec import Layout, ModelShape, catalog, codec
from fourfold.spec.muon import Muon
from fourfold.spec.policy import Policy
from fourfold.spec.run import Fault
from fourfold.tables.derive import derive, published
from fourfold.tables.document import Text
from fourfold.tables.forms import parse
from fourfold.tables.publish import plain_records, publish
from fourfold.tables.records import records
from fourfold.tables.row import PublishedRow
from fourfold.verbs.requests import ReportRequest
from tests.cli import Cli
from tests.specs import run_spec

# Another value of every field of a policy than the run's own; a new field needs a line here.
OTHERS: dict[str, Any] = {
    "precision": "bf16-mixed", "param_dtype": "fp32", "compute_dtype": "fp8",
    "reduce_dtype": "fp32", "grad_dtype": "fp32", "optimizer_dtype": "fp32", "sharding": "zero3",
    "sequence_parallel": False, "cp_kind": "ulysses", "schedule": "gpipe", "virtual_stages": 2,
    "recompute": "full", "attention": "flash", "dispatcher": "allgather",
    "routing": "forced", "imbalance": 0.5, "overlap_exchange": True,
    "overlap_kind": "shared-expert", "scaling": "block",
    "optimizer": "muon", "muon": Muon(steps=3), "compile": True,
    "cuda_graph": True, "async_tp": True, "prefetch": 2, "overlap_grad_reduce": False,
    "overlap_param_gather": False, "fused_projections": False, "loss_chunks": 4, "loss": "lean",
    "offload": "activations", "env": (("NCCL_DEBUG", "INFO"),),
}  # fmt: skip


# The same of the rest of a run.
OF_THE_RUN: dict[str, Any] = {
    "seq_len": 4096, "global_batch": 128, "micro_batch": 2, "memory_limit": 10**9, "data": "c4",
    "fault": Fault(kind="crash", step=99), "layout": "pp2 dp2x1 cp2 tp2",
}  # fmt: skip
SHAPES = {"layers": 8, "heads": 8, "vocab": 1024, "bias": True, "norm_eps": 1e-6, "window": 64}


def report(model: ModelShape, *, engine: str = "", layout: str = "", **named: Any) -> RunReport:
    """All were measured alike."""
    fields = {"seq_len": 2048, "global_batch": 64, "micro_batch": 1, "precision": "bf16-pure"}
    steps = tuple(StepReport(step=i, seconds=0.5, warmup=False) for i in range(3))
    where = (("device", "NVIDIA H100 80GB HBM3"), ("torch", "2.13.0"), ("engine", engine))
    axes = layout or ("pp2 dp2 tp2 ep2" if model.moe else "pp2 dp2 cp2 tp2")
    return RunReport(
        spec=run_spec(model, axes, **fields | named),
        outcome="ok",
        environment=where,
        steps=steps,
        started_at="2026-01-01T00:00:00+00:00",
    )


def reports(name: str) -> dict[str, RunReport]:
    """By what each differs in from the first."""
    model = catalog.model(name)
    changes = {one: value for one, value in (OTHERS | OF_THE_RUN).items()
               if not (model.moe and one in ("cp_kind", "layout"))}  # fmt: skip
    shapes = {one: replace(model, **{one: value}) for one, value in SHAPES.items()}
    if model.moe:
        shapes["top_k"] = replace(model, top_k=model.top_k - 1)
    return {
        "": report(model),
        "engine": report(model, engine="torchtitan"),
        **{
            name: report(model, **_needed_by(name), **{name: value})
            for name, value in changes.items()
        },
        **{f"model.{one}": report(other) for one, other in shapes.items()},
    }


def _needed_by(field: str) -> dict[str, Any]:
    """Return what a field of a policy says something about."""
    return {"optimizer": "muon"} if field == "muon" else {}


@pytest.fixture(scope="module", params=["llama-tiny", "mixtral-tiny"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    kept = Store(tmp_path_factory.mktemp(request.param) / "runs")
    for one in reports(request.param).values():
        kept.keep(one)
    return kept


def test_every_field_of_a_policy_is_tried() -> None:
    """A field that an engine learns later is told apart without a word in a table's code, but only
    a value here shows it."""
    missing = {each.name for each in fields(Policy)} - OTHERS.keys()
    assert not missing, f"add a value of {', '.join(sorted(missing))} to OTHERS"


# Columns of a result and of the store's own names: they would differ between any two runs.
OTHERWISE = {
    "MFU", "HFU", "Model TFLOP", "Throughput (S/s)", "Throughput (T/s)", "Throughput (T/s/GPU)",
    "Sec/it", "TFLOPs", "Mem", "folder", "run_id", "row_id", "run", "tflops_gpu", "mfu_pct",
    "hfu_pct",
}  # fmt: skip


def told(store: Store, cli: Cli, door: str) -> list[tuple[str, ...]]:
    """What a row of each run says, but for its result."""
    command, style, form = door.split()
    words = [command, "--runs", store.root, *(["--style", style] if style != "-" else [])]
    if form == "json":
        answer = cli.json(*words)
        found = answer["rows" if command == "report" else "runs"]
    elif form == "page":
        answer = fourfold.report(ReportRequest(runs=str(store.root), style=style))
        data = report_data(answer)
        headings = [column["heading"] for column in data["columns"]]
        found = [dict(zip(headings, cells, strict=True)) for cells in data["cells"]]
    elif form == "show":
        return [(cli("runs", "show", one.folder).partition("\n")[0],) for one in store.runs()]
    elif form == "text":
        lines = cli(*words).splitlines()[2:-2]
        return [(line.partition(" ")[2],) for line in lines]
    else:
        found = [*csv.DictReader(io.StringIO(cli(*words, "--format", "csv")))]
    return [tuple(str(v) for k, v in row.items() if k not in OTHERWISE) for row in found]


@pytest.mark.parametrize(
    "door",
    ["runs - text", "runs - csv", "runs - json", "report mpt csv", "report topology csv",
     "report topology json", "report mpt page", "report topology page", "report scaling page"],
)  # fmt: skip
def test_every_run_has_a_row_and_no_two_say_the_same(store: Store, cli: Cli, door: str) -> None:
    rows = told(store, cli, door)
    twice = [row for row, count in Counter(rows).items() if count > 1]
    assert not twice
    assert len(rows) == len(store.runs())


def test_a_scaling_table_has_a_cell_for_each(store: Store, cli: Cli) -> None:
    words = ["report", "--runs", store.root, "--style", "scaling", "--format", "csv"]
    rows = [*csv.DictReader(io.StringIO(cli(*words)))]
    cells = [value for row in rows for name, value in row.items() if " GPU" in name and value]
    assert len(cells) == len(store.runs())


def test_one_run_is_shown_with_its_settings(store: Store, cli: Cli) -> None:
    """But for its model, which has only its name there."""
    shown = [line for (line,) in told(store, cli, "runs - show")]
    assert len({*shown}) >= len(shown) - len(SHAPES) - 2


def test_a_model_is_asked_for_by_its_name_and_as_it_is_listed(tmp_path: Path, cli: Cli) -> None:
    store = Store(tmp_path)
    for layers in (2, 3):
        model = replace(catalog.model("llama-tiny"), name="My-Model", layers=layers)
        store.keep(report(model))
    listed = ["My-Model layers=2", "My-Model layers=3"]
    for asked, expected in (("my-model", listed), (listed[0], listed[:1]), ("my", [])):
        runs = cli.json("runs", "--runs", tmp_path, "--model", asked)["runs"]
        assert sorted(run["model"] for run in runs) == expected


def test_repeats_are_one_row(tmp_path: Path) -> None:
    store, model = Store(tmp_path), catalog.model("llama-tiny")
    for changed in ({}, {"seed": 7}, {"steps": 99}, {"warmup": 1}, {"note": "a"}, {"tag": "b"}):
        store.keep(report(model, **changed))
    answer = fourfold.report(ReportRequest(runs=str(tmp_path), style="topology"))
    assert [len(table.data) for _, table in answer.tables()] == [1]


def test_a_model_stored_before_it_had_a_field_is_the_same_model() -> None:
    model = catalog.model("llama-3.1-8b")
    new, older = (StoredRun.of(report(model, sharding=word)) for word in ("zero1", "zero3"))
    plain = codec.encode(model)
    del plain["block"]
    older = replace(older, spec=replace(older.spec, model=codec.decode(ModelShape, plain)))
    found = [published(record, i) for i, record in enumerate((new, older))]
    (table,) = (b for b in publish(found, "topology", "causal").blocks if not isinstance(b, Text))
    assert len([*table.data]) == 2


def test_products_in_fp8_are_listed_as_fp8() -> None:
    model = catalog.model("llama-tiny")
    record = StoredRun.of(report(model, compute_dtype="fp8"))
    assert (record.row()["precision"], record.settings) == ("fp8-pure", "")
    mixed = report(model, precision="bf16-mixed", compute_dtype="fp8")
    assert StoredRun.of(mixed).spec.policy.precision_name == "fp8"


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


def collected(*changes: dict[str, str]) -> list[PublishedRow]:
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
