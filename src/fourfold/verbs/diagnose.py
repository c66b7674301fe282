"""diagnose: a profiler's traces beside what the planner expects of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.spec import catalog, codec
from fourfold.spec.run import RunSpec
from fourfold.traces import graphs, parts
from fourfold.traces.cause import LEAST_SHARE, Cause
from fourfold.traces.causes import find_causes
from fourfold.traces.examined import Examined, examine, read_trace, trace_files
from fourfold.traces.expect import Expected
from fourfold.traces.run import run_of
from fourfold.traces.settings import Setting
from fourfold.traces.what_if import fix_all, what_if
from fourfold.verbs.diagnose_log import log_settings
from fourfold.verbs.diagnose_price import case_of, price_of, pricing_of
from fourfold.verbs.diagnosed_run import keep
from fourfold.verbs.diagnosis import Diagnosis, PartRow, RankRow
from fourfold.verbs.trace_requests import DiagnoseRequest


def diagnose(
    traces: Sequence[str], request: DiagnoseRequest | None = None, *, on_event: OnEvent = ignore
) -> Diagnosis:
    """Of one trace, of several ranks' traces, or of folders with them."""
    request = request or DiagnoseRequest()
    paths = trace_files(list(traces))
    if not paths:
        raise UserError("is required", field="trace", hint="a file or a folder")
    examined: list[Examined] = []
    logged = log_settings(request.log) if request.log else {}
    for path in paths:
        on_event(Event(f"reading {path.name}", kind="progress"))
        examined.append(_with_request(examine(read_trace(path)), request, logged))
    ranks = tuple(sorted((_rank(one) for one in examined), key=lambda row: row.rank))
    found = max(examined, key=lambda one: _rank(one).busy_s)
    pricing = pricing_of(found, request)
    case = case_of(found, pricing, request)
    causes = [*find_causes(case), *_between_ranks(ranks, found)]
    causes.sort(key=lambda cause: -cause.seconds)
    price = price_of(pricing, request) if pricing else None
    width = pricing.width if pricing else 0.25
    diagnosis = Diagnosis(
        found=found,
        settings=found.settings,
        expected=case.expected if pricing else None,
        basis=pricing.basis if pricing else "",
        rows_of=_rows(found, case.expected if pricing else None),
        causes=tuple(causes),
        ranks=ranks,
        what_ifs=tuple(what_if(words, case, price, width) for words in request.what_if),
        fixed=fix_all(case, causes) if request.fix else None,
    )
    return replace(diagnosis, stored=keep(diagnosis, request.runs)) if request.runs else diagnosis


def _with_request(found: Examined, request: DiagnoseRequest, logged: dict[str, Any]) -> Examined:
    """What is said on the command line holds; where the trace says otherwise is told."""
    settings = _overruled(found.settings, logged, f"log {request.log}")
    spec = run_of(settings) or found.spec if logged else found.spec
    if request.spec:
        spec = codec.load(RunSpec, dict(request.spec))
    elif request.model and spec is not None:
        spec = replace(spec, model=catalog.model(request.model))
    if request.spec or request.model:
        shape = spec.model if spec is not None else catalog.model(request.model or "")
        known = {
            "layers": shape.layers // (spec.layout.pp if spec else 1), "hidden": shape.hidden,
            "vocab": shape.vocab // (spec.layout.tp if spec else 1), "tied": shape.tied,
        }  # fmt: skip
        settings = _overruled(settings, known, "--spec" if request.spec else "--model")
    if found.is_graphed:
        settings = settings | {"launched": graphs.said(spec)}
    return replace(found, spec=spec, settings=settings)


def _overruled(settings: dict[str, Setting], known: dict[str, Any], by: str) -> dict[str, Setting]:
    told = {
        name: old.overruled(value, by) if (old := settings.get(name)) else Setting(name, value, by)
        for name, value in known.items()
    }
    return settings | told


def _rank(found: Examined) -> RankRow:
    seconds = found.parts
    busy = sum(s for name, s in seconds.items() if name in parts.COMPUTE)
    exposed = sum(s for name, s in seconds.items() if name.startswith(parts.COMMUNICATION))
    waiting = sum(s for name, s in seconds.items() if name in parts.IDLE)
    path = found.linked.trace.path
    return RankRow(found.rank, path, found.steps.seconds, busy, exposed, waiting)


def _between_ranks(ranks: Sequence[RankRow], found: Examined) -> list[Cause]:
    """A rank that computes longer than the others makes all of them wait."""
    if len(ranks) < 2:
        return []
    usual = median(row.busy_s for row in ranks)
    slowest = max(ranks, key=lambda row: row.busy_s)
    over = slowest.busy_s - usual
    if over < LEAST_SHARE * slowest.step_s or over < 0.04 * usual:
        return []
    stages = found.settings["pp"].value if "pp" in found.settings else 1
    name = "imbalance of stages" if stages > 1 else f"straggler: rank {slowest.rank}"
    remedy = (
        "move layers from the fullest stage" if stages > 1
        else "look at that GPU's clock, temperature and neighbours; exchange it"
    )  # fmt: skip
    evidence = (
        f"rank {slowest.rank} computes {1e3 * slowest.busy_s:.0f} ms, others {1e3 * usual:.0f}"
    )
    return [Cause(name, over, 0.7 * over, over, "measured", evidence, remedy, "straggler=0",
                  parts.COMPUTE)]  # fmt: skip


def _rows(found: Examined, expected: Expected | None) -> tuple[PartRow, ...]:
    seconds, step_s = found.parts, found.steps.seconds
    names = [
        *seconds,
        *(name for name in (expected.parts if expected else ()) if name not in seconds),
    ]
    rows = [
        PartRow(name, seconds.get(name, 0.0), seconds.get(name, 0.0) / step_s,
                expected.parts.get(name) if expected else None)
        for name in names
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.seconds))
