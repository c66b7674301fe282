"""Is the planted cause of a slow step named first, with its seconds, and nothing where none is?"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import pytest

import fourfold
from fourfold.errors import UserError
from fourfold.result.trace import TracedRun
from fourfold.show.diagnose import page
from fourfold.spec import catalog, codec
from fourfold.text_table import Grid, render
from fourfold.traces import parts
from fourfold.traces.settings import Setting, preset_of
from tests.fuzz import ODD, damaged, revalue
from tests.logs import written
from tests.sampling import examples
from tests.specs import run_spec
from tests.traces import simulated
from tests.traces.simulated import Shape

SHAPE = Shape()


def diagnosed(tmp_path: Path, trace: dict[str, Any], **request: Any) -> Any:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return fourfold.diagnose([str(path)], fourfold.DiagnoseRequest(**request))


@pytest.fixture(scope="module")
def base_s(tmp_path_factory: pytest.TempPathFactory) -> float:
    return diagnosed(tmp_path_factory.mktemp("base"), simulated.trace(SHAPE)).step_s


def test_a_sound_run_shows_nothing_and_its_settings_are_read(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, simulated.trace(SHAPE))
    assert found.causes == ()
    assert found.verdict == "nothing stands out"
    assert sum(found.found.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert found.unplaced_share == 0.0
    assert found.expected.step.mid == pytest.approx(found.step_s, rel=0.1)
    value = {name: one.value for name, one in found.settings.items()}
    told = {
        "gpu": "NVIDIA H200", "layers": 4, "hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8,
        "head_dim": 64, "vocab": 32000, "tied": False, "seq_len": 8192, "micro_batch": 2,
        "micro_batches": 1, "precision": "bf16", "weights": "fp32", "recompute": "none",
        "attention": "cudnn", "compile": True, "tp": 1, "dp": 1,
    }  # fmt: skip
    assert {name: value[name] for name in told} == told
    assert all(one.evidence for one in found.settings.values())


def test_the_model_is_the_one_that_trace_or_request_names(tmp_path: Path) -> None:
    """Experts whose products are plain ones look like a dense model of the same widths."""
    trace = simulated.trace(SHAPE)
    spec = run_spec(catalog.model("mixtral-tiny"), "dp1", seq_len=128)
    own = {"fourfold": codec.encode(TracedRun(version="0.1.0", rank=0, spec=spec))}
    found = diagnosed(tmp_path, trace | own)
    assert found.model == "mixtral-tiny"
    assert any("2 of 8 experts" in str(line) for line in page(found))
    assert diagnosed(tmp_path, trace, model="llama-3.2-1b").model.startswith("llama-3.2-1b")


@pytest.mark.parametrize("head", [True, False])
def test_micro_batches_are_counted_on_every_end_of_a_pipeline(head: bool, tmp_path: Path) -> None:
    shape = Shape(micro_batches=3, head=head)
    value = {
        n: one.value for n, one in diagnosed(tmp_path, simulated.trace(shape)).settings.items()
    }
    assert (value["micro_batches"], value["layers"], value["tied"]) == (3, 4, False)


def test_a_cuda_graph_is_priced_by_what_is_known_of_the_run(tmp_path: Path) -> None:
    trace = simulated.graphed(simulated.trace(SHAPE))
    blind = diagnosed(tmp_path, trace)
    assert (blind.causes, blind.expected) == ((), None)
    assert "no shapes" in blind.settings["launched"].doubt
    shape = catalog.shape(
        "llama", layers=4, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000, name="traced"
    )
    batch = {"seq_len": 8192, "micro_batch": 2, "global_batch": 2}
    spec = {"model": codec.encode(shape), "gpus": 1, "batch": batch, "policy": {"compile": True}}
    found = diagnosed(tmp_path, trace, spec=spec)
    assert found.causes == ()
    assert found.expected.step.mid == pytest.approx(found.step_s, rel=0.1)


@pytest.mark.parametrize(
    ("cause", "faults"),
    [
        ("data loader", {"loader_s": 0.05}),
        ("synchronisation", {"sync_s": 1e-3}),
        ("cache flushes", {"flush_s": 2e-3}),
        ("low clock or power cap", {"products": 1.6, "attention": 1.6}),
        ("slow attention kernel", {"attention": 2.0, "kernel": "pytorch_flash::flash"}),
        ("not compiled", {"memory": 5.0}),
        ("recompute", {"recompute": True}),
        ("fp32 GEMMs", {"fp32": True, "products": 8.0}),
        ("exposed communication: dp", {"exposed_s": 1e-3}),
    ],
)
def test_the_planted_cause_is_first_with_its_seconds(cause, faults, base_s, tmp_path) -> None:
    found = diagnosed(tmp_path, simulated.slower(SHAPE, **faults), fix="all")
    assert found.causes[0].name == cause
    lost = found.step_s - base_s
    assert found.causes[0].seconds == pytest.approx(lost, rel=0.15)
    assert found.fixed.step.mid == pytest.approx(base_s, rel=0.08)


def test_loader_that_sleeps_before_each_micro_batch_is_one_cause(tmp_path: Path) -> None:
    shape = Shape(micro_batches=3, length=1024)
    base = diagnosed(tmp_path, simulated.trace(shape))
    found = diagnosed(tmp_path, simulated.slower(shape, batch_s=0.05))
    cause = found.causes[0]
    assert cause.name == "data loader"
    assert cause.seconds == pytest.approx(found.step_s - base.step_s, rel=0.1)
    assert parts.OUTSIDE not in found.found.parts


def test_tiny_work_and_uneven_experts_are_named(tmp_path: Path) -> None:
    tiny = Shape(length=256, sequences=1)
    found = diagnosed(tmp_path, simulated.slower(tiny, launch_s=6e-5))
    assert found.causes[0].name == "launch-bound: tiny work"
    experts = Shape(experts=64, layers=8, length=4096)
    even = diagnosed(tmp_path, simulated.trace(experts))
    assert "imbalance of experts" not in [cause.name for cause in even.causes]
    uneven = diagnosed(tmp_path, simulated.slower(experts, uneven=0.2))
    cause = next(one for one in uneven.causes if one.name == "imbalance of experts")
    assert cause.seconds == pytest.approx(uneven.step_s - even.step_s, rel=0.2)
    assert (uneven.settings["experts"].value, uneven.settings["top_k"].value) == (64, 8)


def test_trace_without_shapes_or_groups_has_no_empty_numbers(tmp_path: Path) -> None:
    """Profiled without record_shapes, by a release that does not name process groups."""
    trace = simulated.slower(Shape(length=256, sequences=1), launch_s=6e-5, exposed_s=1e-4)
    for event in trace["traceEvents"]:
        for field in ("Input Dims", "Input Strides", "Process Group Description"):
            event["args"].pop(field, None)
    found = diagnosed(tmp_path, trace)
    causes = {cause.name: cause.evidence for cause in found.causes}
    assert "the device waits for the host" in causes["launch-bound: tiny work"]
    assert "token" not in causes["launch-bound: tiny work"]
    assert "does not name their process group" in causes["exposed communication: all-gather"]
    assert not any("unknown" in row.name for row in found.rows_of)
    assert found.scope.startswith("no expected step: the trace has no shapes of operators")


def test_pass_without_gradients_has_parts_and_no_expectation(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, simulated.forward(SHAPE))
    assert (found.expected, found.expected_step, found.causes) == (None, None, ())
    assert found.scope == "no backward pass: parts and waits only"
    assert found.scope in found.verdict
    assert found.plain()["tokens_s_gpu"] is None
    assert {parts.QKV, parts.UP, parts.ATTENTION, parts.HEAD} <= {row.name for row in found.rows_of}
    value = {name: one.value for name, one in found.settings.items()}
    assert (value["layers"], value["heads"], value["sequences"]) == (4, 32, 2)
    assert not {"recompute", "micro_batches", "tied"} & value.keys()
    for words in ({"what_if": ("tp=2",)}, {"runs": str(tmp_path / "runs")}):
        with pytest.raises(UserError, match=r"training.*no backward pass"):
            diagnosed(tmp_path, simulated.forward(SHAPE), **words)


@pytest.mark.parametrize("trains", [True, False])
def test_network_of_convolutions_has_parts_and_no_expectation(trains, tmp_path: Path) -> None:
    def layer(r: simulated.Recorder, shape: Shape) -> None:
        image, filters = [8, 64, 56, 56], [64, 64, 3, 3]
        r.run("aten::cudnn_convolution", "sm90_xmma_fprop_implicit_gemm", 3e-4, [image, filters])
        r.run("aten::mm", "nvjet_sm90_tst_128x64", 1e-4, [[64, 512], [512, 1000]])
        if trains:
            name = "sm90_xmma_wgrad_implicit_gemm"
            r.run("aten::convolution_backward", name, 6e-4, [image, image, filters])

    found = diagnosed(tmp_path, simulated.forward(SHAPE, layer=layer))
    lacks = "no transformer" if trains else "no backward pass and no transformer"
    assert found.scope == f"{lacks}: parts and waits only"
    assert (found.expected_step, found.causes) == (None, ())
    computed = {row.name for row in found.rows_of if row.name in parts.COMPUTE}
    assert computed == {parts.CONVOLUTION, parts.OTHER}
    assert not {"layers", "hidden", "vocab", "recompute"} & found.settings.keys()
    assert any(found.scope in str(line) for line in page(found))


def test_decoder_without_a_vocabulary_has_no_expected_step(tmp_path: Path) -> None:
    trace = simulated.trace(SHAPE)
    sizes = (str(SHAPE.vocab), "fused_adamw")
    events = [
        e for e in trace["traceEvents"]
        if not any(one in f"{e['name']} {e['args'].get('Input Dims')}" for one in sizes)
    ]  # fmt: skip
    found = diagnosed(tmp_path, trace | {"traceEvents": events})
    assert found.expected_step is None
    assert found.scope.startswith("no expected step: the trace does not show vocab")
    assert any(row.expected_s for row in found.rows_of if row.name == parts.UP)


def test_best_engine_says_what_an_expected_step_could_save(tmp_path: Path) -> None:
    """Routing by plain torch is as expected of such an engine, and a tenth would do."""
    shape = Shape(experts=64, layers=8, length=4096)
    found = diagnosed(tmp_path, simulated.slower(shape, routing_s=2.5e-3))
    routing = next(row for row in found.rows_of if row.name == parts.ROUTING)
    assert routing.outside_s == 0.0
    gain = next(row for row in found.best.parts if row.name == parts.ROUTING)
    assert (found.best.name, gain.seconds) == ("fourfold", routing.seconds)
    assert gain.best_s < 0.2 * routing.seconds
    saved = routing.seconds - gain.best_s
    assert found.best.step.mid == pytest.approx(found.step_s - saved, rel=0.15)
    assert any("best engine measured on this GPU: fourfold" in str(line) for line in page(found))
    elsewhere = diagnosed(tmp_path, simulated.slower(shape, routing_s=2.5e-3), gpu="h100-80gb")
    assert (elsewhere.best.name, elsewhere.best.step) == ("fused kernels", None)
    assert 0 < elsewhere.best.parts[0].best_s < 0.5 * routing.seconds
    own = {"fourfold": codec.encode(TracedRun(version="0.1.0", rank=0, spec=found.found.spec))}
    assert diagnosed(tmp_path, simulated.trace(shape) | own).best is None


def test_megatrons_groups_over_several_axes_are_no_axis(tmp_path: Path) -> None:
    sizes = {
        "default_pg": 64, "TENSOR_MODEL_PARALLEL_GROUP": 2, "PIPELINE_MODEL_PARALLEL_GROUP": 4,
        "MODEL_PARALLEL_GROUP": 8, "CONTEXT_PARALLEL_GROUP": 1, "DATA_PARALLEL_GROUP_WITH_CP": 8,
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": 16, "EXPERT_MODEL_PARALLEL_GROUP": 8,
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": 16, "EXPERT_DATA_PARALLEL_GROUP": 1,
        "EXPERT_TENSOR_PARALLEL_GROUP": 2,
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": 64, "EMBEDDING_GROUP": 2,
    }  # fmt: skip
    groups = [{"pg_desc": name, "pg_size": size} for name, size in sizes.items()]
    told = {"rank": 0, "world_size": 64, "pg_config": groups}
    trace = simulated.trace(Shape(experts=64, layers=8, length=4096)) | {"distributedInfo": told}
    found = diagnosed(tmp_path, trace)
    value = {name: one.value for name, one in found.settings.items()}
    wanted = {"tp": 2, "pp": 4, "cp": 1, "dp": 8, "ep": 8, "etp": 2, "gpus": 64}
    assert {name: value[name] for name in wanted} == wanted
    assert found.found.spec is not None
    spec = found.found.spec
    assert (spec.layout.ep, spec.layout.etp, spec.model.experts, spec.model.moe.ffn) == (
        8, 2, 512, 2 * 768,
    )  # fmt: skip


def test_what_if_predicts_from_measured_parts(base_s, tmp_path: Path) -> None:
    eager = simulated.slower(SHAPE, memory=5.0)
    words = ("compile=true", "micro_batch=4", "tp=2")
    compiled, larger, split = diagnosed(tmp_path, eager, what_if=words).what_ifs
    assert compiled.step.mid == pytest.approx(base_s, rel=0.08)
    assert compiled.step.low <= compiled.step.mid <= compiled.step.high
    assert larger.tokens == (2 * 8192, 4 * 8192)
    assert larger.step.mid > 1.5 * larger.before_s
    assert split.changed["tp_comm"] > 0
    again = simulated.slower(SHAPE, recompute=True)
    (without,) = diagnosed(tmp_path, again, what_if=("recompute=none",)).what_ifs
    assert without.step.mid == pytest.approx(base_s, rel=0.08)


def test_steps_without_marks_and_a_rank_that_is_slower(tmp_path: Path) -> None:
    plain = simulated.trace(SHAPE, steps=4)
    events = [e for e in plain["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    found = diagnosed(tmp_path, plain | {"traceEvents": events})
    assert found.found.steps.found_by == "the optimizer's kernels"
    assert len(found.found.steps.steps) == 3
    for rank, slow in enumerate((1.0, 1.0, 1.3)):
        trace = simulated.slower(SHAPE, products=slow)
        trace["distributedInfo"] = {"rank": rank, "world_size": 3, "pg_config": []}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    (tmp_path / "trace.json.gz").unlink()
    several = fourfold.diagnose([str(tmp_path)])
    assert [row.rank for row in several.ranks] == [0, 1, 2]
    assert "straggler: rank 2" in [cause.name for cause in several.causes]
    (tmp_path / "rank0.json").unlink()  # of two ranks, the other alone is what is usual
    (cause,) = (one for one in fourfold.diagnose([str(tmp_path)]).causes if "straggler" in one.name)
    other, slow = (row.busy_s for row in several.ranks[1:])
    assert cause.seconds == pytest.approx(slow - other)


def test_the_command_prints_a_screen_keeps_a_row_and_writes_a_page(tmp_path, cli) -> None:
    path, html = tmp_path / "trace.json", tmp_path / "page.html"
    path.write_text(json.dumps(simulated.slower(SHAPE, loader_s=0.05)))
    words = ["diagnose", str(path), "--html", str(html), "--runs", str(tmp_path / "runs")]
    text = cli(*words, "--what-if", "loader=0", "--fix", "all", "--settings")
    assert max(len(line) for line in text.splitlines() if "stored in" not in line) <= 100
    assert "1. data loader: " in text
    assert "what if loader=0: " in text
    written = html.read_text()
    assert "data loader" in written
    scripts = re.findall(r"<script(?! type=.application/json)", written)
    assert len(scripts) == 1
    assert cli.json("runs", "--runs", tmp_path / "runs")
    plain = cli.json("diagnose", path)
    assert plain["causes"][0]["name"] == "data loader"
    cli("diagnose", path, "--what-if", "nonsense=1", status=2)
    for words, said in (
        ("tp=3", "must divide heads"),
        ("micro_batch=0", "must be a whole number of 1 or more"),
        ("dp=x", "must be a whole number of 1 or more"),
        ("global_batch=3,micro_batch=1", "must be a multiple of micro batch x dp = 2"),
    ):
        assert said in cli("diagnose", path, "--what-if", words, status=2)


def test_parts_are_told_apart_in_every_row(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, simulated.trace(SHAPE))
    names = {row.name for row in found.rows_of}
    assert {parts.QKV, parts.OUT, parts.UP, parts.DOWN, parts.HEAD, parts.ATTENTION} <= names
    tables = [part for part in page(found, settings=True) if isinstance(part, Grid)]
    assert all(render(one.headings, one.rows, "text") for one in tables)


def test_rows_begin_with_what_is_outside_its_expectation(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, simulated.slower(SHAPE, memory=5.0, loader_s=0.01, attention=1.3))
    names = [row.name for row in found.rows_of]
    outside = [row.outside_s for row in found.rows_of]
    above = [s for s in outside if s > 5e-5]
    assert outside[: len(above)] == sorted(above, reverse=True)
    assert {parts.DATA, parts.ATTENTION, parts.ELEMENTWISE} <= set(names[: len(above)])
    rest = [row.seconds for row in found.rows_of[len(above) :]]
    assert rest == sorted(rest, reverse=True)
    assert parts.UP in names[len(above) :]
    row = next(row for row in found.plain()["parts"] if row["part"] == parts.DATA)
    assert row["outside_s"] == row["seconds"]


def mutilated(kind: int, dice: Random) -> bytes:
    """Damaged, cut off in a gzip, with values of other kinds, with other tools' fields."""
    trace = simulated.trace(Shape(layers=1, length=64), steps=2)
    whole = json.dumps(trace).encode()
    if kind == 0:
        return damaged(whole, dice)
    if kind == 1:
        return gzip.compress(whole)[: dice.randrange(2000)]
    for _ in range(dice.randrange(1, 60)):
        revalue(dice.choice(trace["traceEvents"]), dice)
    if kind == 3:
        field = dice.choice(["deviceProperties", "distributedInfo", "traceEvents", "fourfold"])
        trace[field] = dice.choice([*ODD, [{"name": 5}], {"pg_config": [1, {"pg_size": "x"}]}])
    return json.dumps(trace).encode()


@pytest.mark.parametrize("kind", range(4))
def test_a_mutilated_trace_is_diagnosed_or_refused_in_words(kind: int, tmp_path: Path) -> None:
    random = Random(kind)
    path = tmp_path / "trace.json"
    for _ in range(examples(80)):
        path.write_bytes(mutilated(kind, random))
        with contextlib.suppress(UserError):  # anything else is a fault
            found = fourfold.diagnose([str(path)], fourfold.DiagnoseRequest(fix="all"))
            assert found.plain()["parts"]
            assert list(page(found, settings=True))


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "is empty"),
        (b"\x00\x01", "is not a trace"),
        (b'{"a": 1, "b": []}', r"has no traceEvents \(it has a, b\)"),
        (b'{"traceEvents": [', "is cut off"),
        (b'{"traceEvents": []}', "has neither kernels nor operators"),
        (b'{"traceEvents":' + b"[" * 100_000, "nested too deeply"),
        (b"SQLite format 3\x00" + b"x" * 200, "cannot be read as SQLite"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_reason(content, rule, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rule):
        fourfold.diagnose([str(path)])


def test_an_export_of_nsys_is_read(tmp_path: Path) -> None:
    """Kernels, calls and ranges by name; no shapes, so no model."""
    path = tmp_path / "report.sqlite"
    trace = simulated.slower(SHAPE, loader_s=0.05)
    names = {name: at for at, name in enumerate({e["name"] for e in trace["traceEvents"]})}
    with contextlib.closing(sqlite3.connect(path)) as base:
        base.execute("CREATE TABLE StringIds (id INT, value TEXT)")
        base.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in names.items()])
        columns = "(start INT, end INT, {} INT, {} INT, correlationId INT)"
        prefix = "CUPTI_ACTIVITY_KIND_"
        base.execute(f"CREATE TABLE {prefix}KERNEL {columns.format('demangledName', 'streamId')}")
        base.execute(f"CREATE TABLE {prefix}RUNTIME {columns.format('nameId', 'globalTid')}")
        base.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT, textId INT)")
        base.execute("CREATE TABLE TARGET_INFO_GPU (name TEXT)")
        base.execute("INSERT INTO TARGET_INFO_GPU VALUES ('NVIDIA H200')")
        for event in trace["traceEvents"]:
            start = round(1e3 * event["ts"])
            times = (start, start + round(1e3 * event["dur"]))
            kind = {"kernel": "KERNEL", "cuda_runtime": "RUNTIME"}.get(event["cat"])
            if kind:
                row = (*times, names[event["name"]], event["tid"], event["args"]["correlation"])
                base.execute(f"INSERT INTO {prefix}{kind} VALUES (?, ?, ?, ?, ?)", row)
            elif event["cat"] == "user_annotation":
                base.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, 0)", (*times, event["name"]))
        base.commit()
    found = fourfold.diagnose([str(path)])
    assert found.causes[0].name == "data loader"
    assert found.unplaced_share < 0.02
    assert found.settings["gpu"].value == "NVIDIA H200"


def test_a_log_of_the_run_overrules_the_trace_and_says_where(tmp_path: Path) -> None:
    row = {
        "n_gpus": "8", "tp": "2", "pp": "1", "dp": "4", "cp": "1", "vpp": "1", "n_layers": "4",
        "d_model": "2048", "n_heads": "64", "n_kv_heads": "16", "d_ff": "16384", "vocab": "64000",
        "seq_len": "8192", "mbs": "2", "gbs": "16", "step_s": "0.2", "mem_gb": "", "status": "ok",
        "sharding": "zero1", "act_ckpt": "full", "precision": "bf16", "family": "llama",
        "tflops_gpu": "100", "attention": "fused", "sequence_parallel": "1", "tied": "0",
    }  # fmt: skip
    log = tmp_path / "run.log"
    log.write_text(written.megatron(row, deepspeed=False))
    found = diagnosed(tmp_path, simulated.trace(SHAPE), log=str(log))
    settings, spec = found.settings, found.found.spec
    assert (spec.layout.tp, spec.layout.dp, spec.gpus) == (2, 4, 8)
    assert (settings["tp"].value, settings["heads"].value) == (2, 32)
    assert settings["heads"].doubt == ""  # 64 over two ranks is what the trace shows
    assert "vocabulary 64,000" in str(list(page(found))), "of the model, not of the rank"
    assert settings["recompute"].value == "full"
    assert "the trace says none" in settings["recompute"].doubt
    with pytest.raises(UserError, match="has no run in it"):
        diagnosed(tmp_path, simulated.trace(SHAPE), log=str(_written(tmp_path, "hello\n")))


def test_a_preset_is_known_by_its_shape_whatever_part_a_rank_has() -> None:
    shape = catalog.model("llama-3.1-8b")
    names = ("layers", "hidden", "heads", "kv_heads", "vocab", "ffn", "tied")
    cut = {"layers": 2, "heads": 4, "kv_heads": 4, "vocab": 4, "ffn": 4}
    of_rank = {name: getattr(shape, name) // cut.get(name, 1) for name in names}
    axes = {"tp": 4, "pp": 2}
    settings = {name: Setting(name, value, "") for name, value in (of_rank | axes).items()}
    assert preset_of(settings) == ("llama-3.1-8b", "")


def _written(folder: Path, text: str) -> Path:
    path = folder / "other.log"
    path.write_text(text)
    return path
