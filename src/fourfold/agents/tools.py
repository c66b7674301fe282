"""The tools: a name, a typed request in, the JSON of a verb out (as `--format json` has it)."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeVar

import fourfold
from fourfold.agents import schema
from fourfold.agents.schema import Schema
from fourfold.errors import UserError, nearest
from fourfold.flag import flag
from fourfold.page import planner
from fourfold.result.report import Prediction
from fourfold.search.explain import Explanation
from fourfold.search.plan_answer import PlanAnswer
from fourfold.spec import Layout, ModelShape, Policy, RunSpec, catalog, check, codec
from fourfold.spec.run import nested
from fourfold.spec.words import OURS
from fourfold.verbs import Request
from fourfold.verbs.collect import Collected, CollectRequest
from fourfold.verbs.diagnosis import Diagnosis
from fourfold.verbs.plan import FitChecked, fit_check
from fourfold.verbs.predict import NamedRun, Predicted
from fourfold.verbs.requests import CALIBRATION, DiagnoseRequest, PlanRequest, Rate, Size
from fourfold.verbs.shapes import Flops, FlopsRequest

T = TypeVar("T")
Call = Mapping[str, Any]  # what a client passes: any JSON, by the names of a tool's fields


class JsonAnswer(Protocol):
    """An answer of a verb, which has a JSON."""

    def plain(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class PredictedRuns:
    """Predictions under a name: a tool's answer is a table, never a list."""

    predicted: Predicted

    def plain(self) -> dict[str, Any]:
        return {"runs": self.predicted.plain()}


# Of the answers' schema: a field more is the same version, a field less or another type the next.
VERSION = 2
_FILES_CPU_S = 5.0  # of reading logs and traces, whose sizes are not known
MOST_RUNS, MOST_LISTED, LISTED = 256, 50, 5
_NOT_OF_PLAN = ("export",)
_OF_PREDICT: Schema = {
    "type": "object",
    "properties": {"runs": {"type": "array", "items": {"allOf": [NamedRun, Prediction]}}},
    "required": ["runs"],
}
_OF_COLLECT: Schema = {
    "type": "object",
    "properties": {
        "rows": {"type": "array", "items": {"type": "object"}},
        "out": {"type": "string"},
        "usable": {"type": "integer"},
        "incomplete": {"type": "integer"},
        "files": {"type": "array", "items": {"type": "object"}},
    },
    "required": ["rows", "out", "usable", "incomplete", "files"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """A run in flat fields, beside those of its policy; what is left out has its default."""

    model: str | ModelShape = flag("", default=MISSING)
    gpus: int = flag("", default=MISSING)
    seq_len: Size = flag("", default=MISSING)
    global_batch: int = flag("", default=1)
    micro_batch: Size = flag("sequences per micro batch (default 1)", default=1)
    layout: Layout = flag("axes, such as 'tp8 pp2'; dp is what they leave", default=Layout())
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictTool(Request):
    """Runs, and where and by which engine they would run."""

    runs: tuple[RunTable, ...]
    cluster: str | None = flag("a known cluster, or a file of the folder")
    gpu: str | None = flag("instead of a cluster: GPUs of this kind in typical hosts")
    network: Rate | None = flag("rate of a host's network, with gpu (default: typical)")
    stack: str = flag("engine to predict (default fourfold)", default=OURS)
    calibration: str | None = flag(*CALIBRATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayout(Request):
    explain: str = flag("the layout in question, such as 'tp8 pp4 dp16'", default=MISSING)


def _plan(given: Call) -> PlanAnswer:
    request = _of(PlanRequest, {"top": LISTED, **given})
    check.whole(1, MOST_LISTED, top=request.top)
    planner.estimated_cpu_s(request)
    return fourfold.plan(request)


def _explain(given: Call) -> Explanation:
    return fourfold.explain(*_with_layout(given)).explanation


def _fit_check(given: Call) -> FitChecked:
    return fit_check(*_with_layout(given))


def _with_layout(given: Call) -> tuple[PlanRequest, str]:
    rest = dict(given)
    layout = rest.pop("explain", "")
    check.that(
        isinstance(layout, str) and layout,
        "explain",
        layout,
        "must be a layout",
        "such as 'tp8 pp4 dp16'",
    )
    return _of(PlanRequest, rest), layout


def _predict(given: Call) -> PredictedRuns:
    rest, runs = dict(given), given.get("runs")
    rule = f"must be a list of 1 to {MOST_RUNS} runs"
    check.that(isinstance(runs, list) and 0 < len(runs) <= MOST_RUNS, "runs", runs, rule)
    asked = _of(PredictTool, rest | {"runs": []})
    specs = [_spec(run, f"runs[{at}]") for at, run in enumerate(runs)]  # type: ignore[arg-type]
    answer = fourfold.predict(
        specs,
        asked.stack,
        cluster=asked.cluster,
        gpu=asked.gpu,
        network=asked.network,
        calibration=asked.calibration,
    )
    return PredictedRuns(answer)


def _spec(run: Any, path: str) -> RunSpec:
    names = [one.name for cls in (RunTable, Policy) for one in fields(cls)]
    check.that(isinstance(run, Mapping), path, run, f"must be a table of {', '.join(names)}")
    try:
        table = nested(run)
        for name in {*table} - {"batch", *names}:
            raise UserError("unknown field", field=name, hint=nearest(name, names))
        return codec.load(RunSpec, table)
    except UserError as error:
        raise error.within(path) from None


def _flops(given: Call) -> Flops:
    names = {one.name for one in fields(FlopsRequest)}
    own = {name: value for name, value in given.items() if name in names}
    run = {name: value for name, value in given.items() if name not in names}
    return fourfold.flops(run, _of(FlopsRequest, own))


def _collect(given: Call) -> Collected:
    return fourfold.collect(_of(CollectRequest, given))


def _diagnose(given: Call) -> Diagnosis:
    return fourfold.diagnose(_of(DiagnoseRequest, given))


def estimated_cpu_s(name: str, given: Call) -> float:
    """Return the CPU seconds of a call, about, by its arguments alone: no file is opened."""
    if name in ("diagnose", "collect"):
        return _FILES_CPU_S
    if name not in ("plan", "explain", "fit_check"):
        return 0.0
    names = {
        "model": catalog.model_names(),
        "cluster": catalog.cluster_names(),
        "gpu": catalog.device_names(),
        "calibration": (),
    }
    used = {field: given[field] for field in names if given.get(field) is not None}
    if not all(isinstance(value, str) and value in names[field] for field, value in used.items()):
        return _FILES_CPU_S
    try:
        request = _of(PlanRequest, {key: given[key] for key in given if key != "explain"})
        return planner.estimated_cpu_s(request)
    except Exception:  # the call explains it, in its own process
        return 0.0


def _of(cls: type[T], given: Call) -> T:
    """Return the request of a call; a field that is null is left out."""
    given = {name: value for name, value in given.items() if value is not None}
    own = fields(cls)  # type: ignore[arg-type]
    names = {one.name for one in own} - {*_NOT_OF_PLAN}
    if cls is PlanRequest:
        given = nested(given, names)
    for name in given:
        if name not in names:
            raise UserError("unknown field", field=name, hint=f"use {', '.join(sorted(names))}")
    missing = {one.name for one in own if schema.is_required(one)} - {*given}
    check.given(not missing, ", ".join(sorted(missing)))
    return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`about` is what an agent chooses by; `writes`: a file of the folder."""

    about: str
    requests: tuple[type, ...]
    call: Callable[[Call], JsonAnswer]
    answer: type | Schema
    without: tuple[str, ...] = ()
    writes: bool = False


TOOLS = {
    "plan": Tool(
        about="Rank layouts (tp, pp, dp, cp, sharding, recompute, micro batch) for pretraining a "
        "model on GPUs: seconds per step with an 80% interval, memory, chance to fit. Base units: "
        "seconds, bytes, tokens/s. Use the first row unless told otherwise.",
        requests=(PlanRequest,),
        call=_plan,
        answer=PlanAnswer,
        without=_NOT_OF_PLAN,
    ),
    "explain": Tool(
        about="All about one layout: which rules it breaks and what is legal near it, or its "
        "seconds and bytes by part, its rank, and what makes the best one faster.",
        requests=(OneLayout, PlanRequest),
        call=_explain,
        answer=Explanation,
        without=_NOT_OF_PLAN,
    ),
    "fit_check": Tool(
        about="Whether one layout fits in memory: chance, peak bytes with interval and by part, "
        "and the way to run it that needs least.",
        requests=(OneLayout, PlanRequest),
        call=_fit_check,
        answer=FitChecked,
        without=_NOT_OF_PLAN,
    ),
    "predict": Tool(
        about="Seconds and memory of runs whose layouts are given, to compare them; `provenance` "
        "says what each rests on: measured, near, blended or physics.",
        requests=(PredictTool,),
        call=_predict,
        answer=_OF_PREDICT,
    ),
    "flops": Tool(
        about="FLOPs per token of a model and, of a measured speed, TFLOP/s, MFU and HFU by every "
        "published convention.",
        requests=(RunTable, FlopsRequest),
        call=_flops,
        answer=Flops,
    ),
    "diagnose": Tool(
        about="Why a traced run is slower than it should be: measured and expected seconds by "
        "part, causes and remedies, from profiler traces in the folder.",
        requests=(DiagnoseRequest,),
        call=_diagnose,
        answer={"type": "object"},
        without=("spec",),
        writes=True,
    ),
    "collect": Tool(
        about="Turn logs and tables of training engines in the folder into measured rows.",
        requests=(CollectRequest,),
        call=_collect,
        answer=_OF_COLLECT,
        writes=True,
    ),
}


@functools.cache
def input_schema(name: str) -> Schema:
    tool = TOOLS[name]
    return schema.of_request(*tool.requests, without=tool.without)


@functools.cache
def answers_schema() -> Schema:
    """Of every tool's answer: the file data/answers.schema.json."""
    parts: dict[str, Schema] = {}
    for name, tool in TOOLS.items():
        parts[f"{name}_answer"] = _enveloped(name, _answered(tool.answer, parts))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Answers of fourfold's tools, version {VERSION}",
        "oneOf": [{"$ref": f"#/$defs/{name}_answer"} for name in TOOLS],
        "$defs": parts,
    }


def schema_text() -> str:
    """As the file has it: a line for each definition."""
    whole = answers_schema()
    parts = ",\n".join(f"{json.dumps(n)}: {json.dumps(d)}" for n, d in whole["$defs"].items())
    head = "".join(f"{json.dumps(n)}: {json.dumps(v)},\n" for n, v in whole.items() if n != "$defs")
    return f'{{\n{head}"$defs": {{\n{parts}\n}}\n}}\n'


def _enveloped(name: str, answer: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"schema": {"const": VERSION}, "tool": {"const": name}, "answer": answer},
        "required": ["schema", "tool", "answer"],
    }


def _answered(answer: Any, parts: dict[str, Schema]) -> Any:
    if isinstance(answer, type):
        return schema.of_answer(answer, parts)
    if isinstance(answer, dict):
        return {name: _answered(value, parts) for name, value in answer.items()}
    return [_answered(one, parts) for one in answer] if isinstance(answer, list) else answer


def called(name: str, given: Call) -> dict[str, Any]:
    """The answer of a tool, in its envelope."""
    return {"schema": VERSION, "tool": name, "answer": TOOLS[name].call(given).plain()}
