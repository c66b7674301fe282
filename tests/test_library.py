"""Is there a library under the command line? Its names, its silence, its page, and CSV as rows."""

from __future__ import annotations

import ast
import contextlib
import csv
import dataclasses
import functools
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fourfold
from fourfold.agents import tools
from fourfold.cli import main
from fourfold.commands import COMMANDS, load
from fourfold.cost.fit.calibration import shipped
from fourfold.errors import UserError
from fourfold.escape import html_table, toml_text
from fourfold.output import Output, text_of
from fourfold.result.files.training_folder import TrainingFolder
from fourfold.result.one_rank import RankCount
from fourfold.spec import catalog, codec
from fourfold.spec.run import RunSpec
from fourfold.spec.train import TrainSettings
from fourfold.verbs.calibrate import Calibrated, Demo, DemoRun, scene
from fourfold.verbs.fit import Fitted
from fourfold.verbs.machine import read_profile
from fourfold.verbs.predict import DryRun
from fourfold.verbs.verify import VerifiedLayout
from fourfold.verbs.weights import ExportedWeights
from tests.traces import simulated

ROOT = Path(__file__).parent.parent
VERBS = ("plan", "predict", "bench", "sweep", "train", "verify", "dryrun", "report")
TYPES = ("RunSpec", "Layout", "Batch", "Policy", "Cluster")
RECORDED = str(Path(__file__).parent / "recorded" / "runs")
TABLE = tomllib.loads(Path(__file__).with_name("csv.toml").read_text())


def commands(name: str) -> list[list[str]]:
    """Lines of the table, as words of the command line."""
    lines = [
        line.replace("SMALL", TABLE["SMALL"]).replace("TINY", TABLE["TINY"]) for line in TABLE[name]
    ]
    ours = ("tests/",)
    return [
        [str(ROOT / word) if word.startswith(ours) else word for word in shlex.split(line)]
        for line in lines
    ]


def test_names_are_callable_after_every_submodule_is_imported() -> None:
    for module in pkgutil.walk_packages(fourfold.__path__, "fourfold."):
        # Adapters of other engines import those, and change torch while they load.
        elsewhere = re.search(r"\.(engine|conformance\.ranks|adapter\w*)\b", module.name)
        if not elsewhere and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in (*VERBS, *TYPES):
        assert callable(getattr(fourfold, name)), name
        assert name in dir(fourfold)
    with pytest.raises(AttributeError):
        fourfold.nothing  # noqa: B018


# Every verb, called so that no rank starts: those that would start some refuse their request.
CALLS = f"""
import sys
import fourfold as f
from fourfold.errors import UserError

def refused(verb, *args, **kwargs):
    try:
        verb(*args, **kwargs)
    except UserError:
        return
    raise AssertionError(verb)

RUN = dict(model="llama-tiny", gpus=2, layout="tp2", batch=dict(seq_len=128, global_batch=4))
ILLEGAL = RUN | dict(gpus=3, layout="tp3")
SPEC = f.RunSpec.from_plain(RUN)
PLAN = dict(model="llama-3.1-8b", seq_len=4096, global_batch=64, gpus=8, gpu="h100-80gb")
NAMED = PLAN | dict(stack="megatron")
STORE, GOLDEN = {RECORDED!r}, {str(ROOT / "tests/golden/mpt.csv")!r}
FIT = f.FitRequest(rows=(GOLDEN,), suggest=2)
stored = f.runs(f.RunsRequest(runs=STORE)).runs
done = [
    f.plan(f.PlanRequest(**PLAN)),
    f.explain(f.PlanRequest(**NAMED), "dp8").explanation,
    f.fit_check(f.PlanRequest(**NAMED), "dp8"), f.support(f.SupportRequest(model="llama-tiny")),
    f.calendar(f.CalendarRequest(plan=f.PlanRequest(**NAMED, tokens=10**9))),
    f.front(f.PlanRequest(**NAMED), "memory"),
    f.largest(f.PlanRequest(**NAMED | dict(micro_batch=1, layout="tp8")), "sequence"),
    f.stacks(), f.predict([SPEC]), f.predict_table(GOLDEN),
    f.advise(f.AdviseRequest(gpu="h100-80gb", hidden=4096)),
    f.models(), f.model(RUN), f.clusters(), f.cluster("jean-zay"), f.gpus(), f.flops(RUN),
    f.new_cluster(f.ClusterRequest(name="x", gpu="h100-80gb", hosts=1, host_gpus=8)),
    f.trace(f.TraceRequest(kind="ring", tokens=8192, model="llama-3.1-8b", cp=4)),
    f.bench(ILLEGAL, f.BenchRequest(runs="runs")),
    f.sweep(ILLEGAL | dict(sweep=dict(seq_len=[128, 256])), f.SweepRequest(runs="runs")),
    f.plan_sweep(f.MptSweep(models=("llama-tiny",)), f.SweepRequest(runs="runs")),
    f.report(f.ReportRequest(runs=STORE)), f.runs(f.RunsRequest(runs=STORE)),
    f.show_run(stored[0].name, store=STORE),
    f.diff(stored[0].name, stored[1].name, store=STORE),
    f.lint_rules(), f.lint([{str(ROOT / "tests/golden/raw_samples.md")!r}]),
    f.suggest_runs(FIT), f.score(f.ScoreRequest(rows=(GOLDEN,))),
    f.collect(f.CollectRequest(logs=(GOLDEN,), out="rows.csv")),
    f.make_tokens(f.TokensRequest(files=({__file__!r},), out="corpus")), f.show_tokens("corpus"),
]
assert all(answer.rows() for answer in done)
f.export(f.PlanRequest(**PLAN, export="torchrun"))
refused(f.fit, f.FitRequest())
refused(f.diagnose, ["nowhere"])
refused(f.dryrun, SPEC, rank=9)
refused(f.engine_memory, RUN, f.EngineMemoryRequest(engine="torchtitan==0"))
refused(f.one_rank, RUN, f.OneRankRequest(as_rank="9"))
refused(f.verify, f.VerifyRequest())
refused(f.conform, f.VerifyRequest(engine="fourfold", layout="dp0"))
refused(f.install_engines, f.EnginesRequest())
refused(f.matrix, f.EnginesRequest(names=("nothing==1",)))
assert f.engines(f.EnginesRequest(engines="none")).releases == ()
refused(f.submit_verify, f.VerifyRequest())
refused(f.submit_bench, RUN, f.BenchRequest(runs="runs"))
refused(f.submit_sweep, f.MptSweep(models=("llama-tiny",)), f.SweepRequest(runs="runs"))
refused(f.submit_train, RUN, f.TrainRequest(out="out"))
refused(f.train, RUN, f.TrainRequest(out="out"))
refused(f.show_training, "nowhere")
refused(f.calibrate, f.CalibrateRequest(ranks=0))
refused(f.submit_calibrate, f.CalibrateRequest())
refused(f.export_weights, f.WeightsRequest(checkpoint="nowhere", out="out"))
assert [name for name in ("argparse", "torch") if name in sys.modules] == []
"""


def test_the_verbs_print_nothing_and_need_neither_argparse_nor_torch(tmp_path: Path) -> None:
    named = {*re.findall(r"\bf\.(\w+)", CALLS)}
    lower = {name for name in dir(fourfold) if callable(getattr(fourfold, name)) and name[0] != "_"}
    assert {name for name in lower if name.islower()} - named == {"demo"}  # it takes no request
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_has_every_function_with_an_example() -> None:
    page = (ROOT / "docs" / "library.md").read_text().split("## Every function")[1]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == {name for name in dir(fourfold) if name.islower() and name[0] != "_"}
    for names, _, example in rows:
        tree = ast.parse(example.strip("`"), mode="eval")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {node.func.attr: node for node in calls if isinstance(node.func, ast.Attribute)}
        assert {*named} & {*re.findall(r"`(\w+)`", names)}
        for name in {*named} - {"rows"}:
            verb = getattr(fourfold, name)
            given = {one.arg: None for one in named[name].keywords}
            inspect.signature(verb).bind_partial(*named[name].args, **given)
            run_or_read(example.strip("`"), named[name], whole=name in CHEAP)


# Of the page's examples those that need no ranks and no files; of the others requests are made.
CHEAP = {"calendar", "support", "explain", "fit_check", "export", "predict", "advise", "model",
         "cluster", "new_cluster", "flops", "trace", "stacks"}  # fmt: skip


def run_or_read(example: str, call: ast.Call, *, whole: bool) -> None:
    plan = {"model": "llama-3.1-8b", "seq_len": 4096, "global_batch": 64, "stack": "megatron"}
    asked = fourfold.PlanRequest(**plan, gpu="h100-80gb", gpus=16)
    run = {"model": "llama-3.1-8b", "gpus": 16, "batch": {"seq_len": "4k", "global_batch": 64}}
    for one in (run, codec.load(RunSpec, run)):
        scope = {"f": fourfold, "P": asked, "R": one}
        parts = [call] if whole else [*call.args, *(each.value for each in call.keywords)]
        assert all(eval(ast.unparse(part), scope) is not None for part in parts), example
        if " R" not in example.replace("(R", " R"):
            break


def test_sizes_may_have_units_and_mistakes_are_said() -> None:
    asked = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "gpus": 16}
    sizes = {"seq_len": "8k", "global_batch": "4M", "tokens": "300B", "lost": "10%"}
    request = fourfold.PlanRequest(**asked, **sizes)
    numbers = (request.seq_len, request.global_batch, request.tokens, request.lost)
    assert numbers == (8192, 512, 300 * 10**9, 0.1)
    whole = fourfold.PlanRequest(
        **asked, seq_len=8192, global_batch=64, layout=fourfold.Layout(tp=2, shard=8)
    )
    assert whole.layout == "pp1 dp8 cp1 tp2"
    assert fourfold.AdviseRequest(gpu="h100", seq_len="8k", tokens=2e12).tokens == 2 * 10**12
    assert fourfold.TrainingPhase(tokens="2T", ramp="16,16,4k").ramp.samples == 4000
    assert fourfold.MptSweep(models=["llama-tiny"], gpus=[1]).gpus == (1,)
    paths = fourfold.CollectRequest(logs=["a.log", Path("b.log")], out=Path("rows.csv"))
    assert (paths.logs, paths.out) == (("a.log", "b.log"), "rows.csv")
    with pytest.raises(UserError, match="outcome good is not one of ok, "):
        fourfold.RunsRequest(outcome=["ok", "good"])
    with pytest.raises(UserError, match="attention fast is not one of flash"):
        fourfold.AdviseRequest(gpu="h100", attention="fast")
    bad = {"seq_len": "8q", "gpus": 1.5, "layout": 3, "policy": "fp8", "top": "all"}
    bad |= {"price": "much"}
    for name, value in bad.items():
        with pytest.raises(UserError, match=name):
            fourfold.PlanRequest(**asked | {"seq_len": 1, "global_batch": 1, name: value})
    with pytest.raises(TypeError, match="'gpus'"):  # which would be left out of the answer
        fourfold.predict({"model": "mpt-7b"}, gpus=8)
    with pytest.raises(TypeError, match="'clustr'"):
        fourfold.stacks(clustr="jean-zay")
    with pytest.raises(UserError, match="decides every axis"):
        fourfold.PlanRequest(**asked, seq_len=1, global_batch=1, layout=fourfold.Layout(tp=2))


def test_flat_fields_mean_the_same_in_every_request(tmp_path: Path) -> None:
    run = {"model": "llama-3.1-8b", "seq_len": "4k", "gpus": 16, "global_batch": 64}
    run |= {"layout": "pp2 dp4 tp2", "precision": "bf16", "sharding": "zero1", "micro_batch": 1}
    run |= {"recompute": "none", "virtual_stages": 1}
    place = {"cluster": "nvidia-h100"}
    asked = fourfold.PlanRequest(**run, **place, stack="megatron")
    layout = run["layout"]
    tools_run = {"runs": [run], **place, "stack": fourfold.plan(asked).stack}
    seconds = {
        fourfold.plan(asked).best.step_s,
        fourfold.explain(asked, layout).explanation.row.step_s,
        fourfold.predict(run, tools_run["stack"], **place).step_s,
        fourfold.predict(fourfold.RunSpec(**run), tools_run["stack"], **place).step_s,
        tools.called("predict", tools_run)["answer"]["runs"][0]["step_s"],
        tools.called("plan", run | place | {"stack": "megatron"})["answer"]["ranked"][0]["step_s"],
        fourfold.calendar(
            fourfold.CalendarRequest(**run, **place, stack="megatron", tokens="1B")
        ).best.step_s[0],
    }  # fmt: skip
    assert len(seconds) == 1
    flops = fourfold.flops(run)
    assert tools.called("flops", run)["answer"] == flops.plain()
    (tmp_path / "run.toml").write_text(toml_text(run))
    words = ["plan", "--spec", str(tmp_path / "run.toml"), "--cluster", "nvidia-h100"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main([*words, "--stack", "megatron", "--format", "json"])
    assert {json.loads(out.getvalue())["ranked"][0]["step_s"]} == seconds


def test_no_module_has_the_name_of_a_verb() -> None:
    """An imported module would take the verb's place: `fourfold.engines` is a call."""
    modules = {module.name for module in pkgutil.iter_modules(fourfold.__path__)}
    assert not modules & set(fourfold.__all__)


def test_calls_that_look_right_work_or_name_their_remedy() -> None:
    asked = {"model": "llama-3.1-8b", "seq_len": 4096, "global_batch": 64, "gpus": 8}
    plan = fourfold.PlanRequest(**asked, gpu="h100-80gb", stack="megatron", layout="tp2", top=1)
    answer = fourfold.plan(plan)
    row = answer.rows()[0]
    assert row["layout"] == str(answer.best)
    assert fourfold.model("llama-3.1-70b").params == 70_553_706_496
    with pytest.raises(TypeError, match="not a PlanAnswer; pass the request that it answers"):
        fourfold.export(answer, pick=1)
    with pytest.raises(TypeError, match="not a PlanAnswer; pass the request that it answers"):
        fourfold.export(answer, "megatron")
    exported = fourfold.export(plan, "megatron")
    assert exported.script == fourfold.export(dataclasses.replace(plan, export="megatron")).script
    for wrong in (plan, answer):
        with pytest.raises(TypeError, match=r"needs a CalendarRequest, not a Plan.*\(plan="):
            fourfold.calendar(wrong)
    for verb in (fourfold.plan, functools.partial(fourfold.explain, layout="tp2")):
        with pytest.raises(TypeError, match="not a dict; make it of its fields"):
            verb(asked)
    with pytest.raises(TypeError, match="PlanRequest has no field 'modle'; did you mean 'model'"):
        fourfold.CalendarRequest(modle="llama-3.1-8b")
    with pytest.raises(UserError, match=r"trace none\.json"):
        fourfold.diagnose(fourfold.DiagnoseRequest(traces=["none.json"]))
    model = fourfold.model("llama-3.1-8b")
    assert fourfold.PlanRequest(**asked | {"model": model}, gpu="h100-80gb").model == model.shape
    assert answer.best is not None
    of_model = fourfold.RunSpec(**asked | {"model": model}, layout="tp2 dp4", sharding="zero1")
    one = fourfold.predict(of_model, "megatron", gpu="h100-80gb")
    assert one.step_s == answer.best.step_s
    with pytest.raises(TypeError, match="not a PlanRow; a RunSpec takes the layout, micro_batch"):
        fourfold.predict(answer.best, "megatron", gpu="h100-80gb")
    explained = fourfold.explain(plan, answer.best).explanation
    assert explained.row is not None
    assert explained.row.step_s == answer.best.step_s
    in_table = fourfold.CalendarRequest(plan=asked, gpu="h100-80gb", tokens="1B")
    assert in_table.plan == fourfold.PlanRequest(**asked, gpu="h100-80gb", tokens="1B")
    advice = fourfold.AdviseRequest(model="llama-3.1-8b", gpu="h100-80gb", layout="pp4 tp2 mbs2")
    assert (advice.tp, advice.ep, advice.micro_batch) == (2, None, 2)
    with pytest.raises(UserError, match="tp=4 contradicts layout = tp2; omit one"):
        fourfold.AdviseRequest(gpu="h100-80gb", hidden=4096, layout="tp2", tp=4)
    shapes = fourfold.AdviseRequest(params="8B", tokens="1T", gpus=64, gpu="h100-80gb")
    assert fourfold.advise(shapes).gpus == 64
    dated = fourfold.CalendarRequest(plan=plan, gpus=16, tokens="2T")
    assert (dated.plan.gpus, dated.plan.tokens) == (16, 2 * 10**12)


def test_an_answer_is_a_table_in_a_notebook_and_no_name_leaks() -> None:
    shown = fourfold.models()._repr_html_()
    assert "<td>llama-3.1-8b</td>" in shown
    assert "more rows" in shown
    assert "&lt;b&gt;\\x1b</td>" in html_table([{"note": "<b>\x1b", "empty": None}])
    assert "empty" not in html_table([{"note": "<b>", "empty": None}])
    assert not {"Any", "TYPE_CHECKING", "annotations", "spec"} & {*dir(fourfold)}


def test_the_page_runs_and_prints_only_what_it_shows() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    scope: dict[str, object] = {}
    for code, shown in re.findall(
        r"^```python\n(.*?)^```\n(?:```\n(.*?)^```\n)?", page, re.M | re.S
    ):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            exec(code, scope)
        assert (out.getvalue(), err.getvalue()) == (shown, ""), code


def assert_one_table(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) > 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(set(rows[0])) == len(rows[0])
    named = list(csv.DictReader(io.StringIO(text)))
    assert all(None not in row and None not in row.values() for row in named)


@pytest.mark.parametrize("words", commands("light"), ids=" ".join)
def test_csv_is_one_table_with_one_header(words: list[str], capsys) -> None:
    main([*words, "--format", "csv"])
    assert_one_table(capsys.readouterr().out)


def _counted() -> DryRun:
    spec = codec.load(RunSpec, {"model": "llama-3.2-3b", "layout": "pp2 dp4 tp8"})
    plain = json.loads((ROOT / "tests/recorded/answers/dryrun-3b.json").read_text())
    stages = plain["answer"]["stages"]
    return DryRun.of_counts(spec, [codec.decode(RankCount, stage) for stage in stages])


def _demonstrated() -> Demo:
    said = {"layout": "dp4", "sharding": "zero1", "micro_batch": 1, "predicted_s": 1.0}
    said |= {"predicted_s_low": 0.5, "predicted_s_high": 2.0, "predicted_peak_bytes": 1.0}
    runs = (
        DemoRun(**said, outcome="ok", measured_s=1.0, flags=["hot", "cold"], loss=2.0),
        DemoRun(**said, outcome="oom", failure="no, more"),
    )
    return Demo.of_runs(scene(0), catalog.cluster("jean-zay"), runs)


def _exported() -> ExportedWeights:
    files = ["config.json", "model.safetensors"]
    return ExportedWeights(
        out="o", model_type="llama", model="m", checkpoint="c", step=1, files=files, size_bytes=2,
        dtype="bf16",
    )  # fmt: skip


# Answers of commands that start ranks or take minutes, as they stand when those are done.
ANSWERS = {
    "calibrate": lambda: Calibrated.of_profile(read_profile("h200"), 1),
    "demo": _demonstrated,
    "dryrun": _counted,
    "fit": lambda: Fitted.of_calibration(shipped()),
    "weights": _exported,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_csv_of_an_answer_is_one_table(name: str) -> None:
    assert_one_table(text_of(Output.of(ANSWERS[name](), list), "csv"))


def _ranks_started(monkeypatch) -> None:
    """Of verify: two layouts, one of which an error ended."""

    def carry_out(found, *rest):
        gaps = {"loss_diff": 0.0, "norm_rel": 0.0, "grad_rel": 1e-9, "param_rel": 0.0}
        sizes = {"micro_batch": 1, "global_batch": 2, "micro_sizes": ((1,), (1,))}
        named = {"family": "mpt", "model": "mpt-tiny", "layout": "dp2", "policy": "zero1"}
        passed = VerifiedLayout(**named, **sizes, **gaps, passed=True)
        return [passed, replace(passed, passed=False, error="crash: rank 1, 2")]

    monkeypatch.setattr("fourfold.verbs.verify._carry_out", carry_out)


def _trained(folder: Path) -> str:
    spec = codec.load(RunSpec, {"model": "llama-tiny", "gpus": 1})
    folder.mkdir()
    TrainingFolder(str(folder)).describe(spec, TrainSettings(steps=3))
    return str(folder)


# Refused and stored, so that no rank starts.
SIZES = {"seq_len": 128, "global_batch": 4}
ILLEGAL = {"model": "llama-tiny", "gpus": 3, "layout": "tp3", "batch": SIZES}


def _words(tmp_path: Path) -> dict[str, list[str]]:
    runs = str(tmp_path / "runs")
    (tmp_path / "sweep.toml").write_text(toml_text(ILLEGAL | {"sweep": {"seq_len": [128, 256]}}))
    (tmp_path / "run.toml").write_text(toml_text(ILLEGAL))
    (tmp_path / "text").write_text("a text, with a comma")
    stored = sorted(path.name[:6] for path in Path(RECORDED).iterdir() if path.is_dir())
    release = tmp_path / "engines" / "deepspeed-1.0"
    release.mkdir(parents=True)
    (release / ".ready").write_text("deepspeed==1.0")
    (tmp_path / "trace.json").write_text(json.dumps(simulated.trace(simulated.Shape())))
    return {
        "diagnose": ["diagnose", str(tmp_path / "trace.json")],
        "engines": ["engines", "--engines", str(release.parent)],
        "bench": ["bench", "--spec", str(tmp_path / "run.toml"), "--runs", runs],
        "sweep": ["sweep", str(tmp_path / "sweep.toml"), "--runs", runs],
        "sweep --dry-run": ["sweep", str(tmp_path / "sweep.toml"), "--runs", runs, "--dry-run"],
        "train": ["train", "--show", _trained(tmp_path / "trained")],
        "verify": ["verify", "--world", "2"],
        "diff": ["diff", stored[0], stored[1], "--runs", RECORDED],
        "predict": ["predict", str(ROOT / "tests/golden/mpt.csv")],
        "runs show": ["runs", "show", stored[0], "--runs", RECORDED],
        "fit --suggest": ["fit", str(ROOT / "tests/golden/mpt.csv"), "--suggest", "2"],
        "data make": ["data", "make", str(tmp_path / "text"), "--out", str(tmp_path / "corpus")],
        "data show": ["data", "show", str(tmp_path / "corpus")],
    }


def test_csv_of_the_other_commands_is_one_table(tmp_path: Path, capsys, monkeypatch) -> None:
    _ranks_started(monkeypatch)
    words = _words(tmp_path)
    for one in words.values():
        main([*one, "--format", "csv"])
        out, err = capsys.readouterr()
        assert out, err
        assert_one_table(out)
    covered = {one[0] for one in (*commands("light"), *words.values())} | {*ANSWERS}
    with_format = {
        name
        for name in COMMANDS
        for command in (load(name), *load(name).actions.values())
        if any(option.names == ("--format",) for option in command.options)
    }
    assert covered == with_format


@pytest.mark.slow
def test_csv_of_commands_that_start_ranks_is_one_table(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands("started"):
        main([*words, "--format", "csv"])
        assert_one_table(capsys.readouterr().out)


def test_first_help_is_short() -> None:
    for name in COMMANDS:
        shown = [one for one in load(name).options if not one.rare and one.names[0][0] == "-"]
        assert len(shown) <= 25, f"{name}: {len(shown)}"
