"""diagnose: a profiler's traces beside what the planner expects of the same run.

What a run's log says of it, in the words of a trace's settings: as one rank sees them.

How a traced run is priced: whose rates, on which GPU, and what it would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.cost.fit import calibration as calibrations
from fourfold.cost.fit.machine import coefficients_of
from fourfold.cost.memory.peak import memory
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.errors import MachineError
from fourfold.events import Event, OnEvent, ignore
from fourfold.logs.nested import whole
from fourfold.logs.row import Row, complete
from fourfold.search.legal import require_legal
from fourfold.search.resolve import resolve
from fourfold.spec import Cluster, RunSpec, catalog, check, codec
from fourfold.spec.engine import ENGINES, engine_of
from fourfold.spec.layout import AXES
from fourfold.spec.words import OURS
from fourfold.traces import parts
from fourfold.traces.cause import LEAST_SHARE, Cause, TraceCase, cause
from fourfold.traces.causes import find_causes
from fourfold.traces.examined import (
    Examined,
    examine,
    graph_setting,
    read_trace,
    run_of,
    sizes_of,
    trace_files,
)
from fourfold.traces.expect import Expected, Pricing, expect
from fourfold.traces.settings import Setting
from fourfold.traces.what_if import Price, fix_all, what_if
from fourfold.verbs.best_engine import find_best_engine
from fourfold.verbs.collect import read_files
from fourfold.verbs.diagnosis import LEAST_SHOWN_S, Diagnosis, PartRow, RankRow, keep
from fourfold.verbs.machine import known_cluster, named_cluster, read_calibration, read_profile
from fourfold.verbs.requests import DiagnoseRequest


def cluster_of(found: Examined, request: DiagnoseRequest) -> Cluster | None:
    ranks = found.spec.gpus if found.spec else 1
    if request.cluster:
        return known_cluster(request.cluster, ranks)
    name = found.value("gpu", "")
    if request.gpu:
        name = catalog.device(request.gpu).name
    return named_cluster(name, ranks) if name else None


def _dense(spec: RunSpec) -> RunSpec:
    """Without experts, but as wide as those a token sees: experts are priced by traced shapes."""
    model = spec.model
    if model.moe is None:
        return spec
    wide = model.top_k * model.moe.ffn + model.moe.shared_ffn
    plain = replace(model, moe=None, experts=0, top_k=0, ffn=wide)
    return replace(spec, model=plain, layout=replace(spec.layout, ep=1, etp=1))


def pricing_of(found: Examined, request: DiagnoseRequest) -> Pricing | None:
    cluster = cluster_of(found, request)
    if cluster is None or found.linked.on_host or found.lacks:
        return None
    if found.is_graphed and found.spec is None:
        return None
    spec = found.spec or _any_run()
    engine = resolve(OURS, cluster, read_calibration(request.calibration))
    entry, why = engine.entry, engine.no_rows
    known = coefficients_of(read_profile(request.profile)) if request.profile else {}
    columns = columns_of([_in_16_bits(_dense(spec))], cluster=cluster, engine=engine_of(OURS))
    basis = (
        f"{cluster.device.name}, {request.profile or 'the planner' + (': ' + why if why else '')}"
    )
    return Pricing(
        columns=columns,
        coefficients={**entry.coefficients, **known},
        width=float(predictions(columns, entry).interval.half[0]),
        basis=basis,
        is_measured=bool(request.profile),
    )


def _in_16_bits(spec: RunSpec) -> RunSpec:
    """A GPU has no reason to multiply in fp32."""
    if spec.policy.precision != "fp32":
        return spec
    return replace(spec, policy=replace(spec.policy, precision="bf16-mixed"))


def _any_run() -> RunSpec:
    """For the columns of a machine alone."""
    batch = {"seq_len": 1024, "global_batch": 1}
    return codec.load(RunSpec, {"model": "llama-3.2-1b", "gpus": 1, "batch": batch})


def case_of(found: Examined, pricing: Pricing | None, request: DiagnoseRequest) -> TraceCase:
    return TraceCase(
        run=found,
        expected=expect(found, pricing) if pricing else Expected({}),
        fits_without=_without_recompute(found, request),
        is_priced=pricing is not None,
    )


def _without_recompute(found: Examined, request: DiagnoseRequest) -> tuple[float, float] | None:
    """(bytes the run would hold if nothing were computed again, bytes of the GPU)."""
    cluster, spec = cluster_of(found, request), found.spec
    if spec is None or cluster is None or spec.model.moe is not None:
        return None
    asked = replace(spec, policy=replace(spec.policy, recompute="none"))
    calibration = calibrations.shipped()
    engine = found.value("engine", OURS)
    priced = resolve(engine if engine in ENGINES else OURS, cluster, calibration)
    columns = columns_of([asked], cluster=cluster, engine=priced.engine)
    room = memory(columns, priced.entry.coefficients)
    return float(room.worst_bytes[0]), float(cluster.device.memory_bytes)


def price_of(pricing: Pricing, request: DiagnoseRequest) -> Price:
    def price(spec: RunSpec) -> dict[str, float]:
        require_legal(spec, only=("stages", "heads"))  # what no engine could cut has no seconds
        cluster = known_cluster(request.cluster, spec.gpus) if request.cluster else None
        if cluster is None:
            name = request.gpu and catalog.device(request.gpu).name
            cluster = named_cluster(name or pricing.basis.partition(",")[0], spec.gpus)
        assert cluster is not None
        entry = resolve(OURS, cluster, read_calibration(request.calibration)).entry
        columns = columns_of([_dense(spec)], cluster=cluster, engine=engine_of(OURS))
        many = predictions(columns, replace(entry, coefficients=dict(pricing.coefficients)))
        return {name: float(part[0]) for name, part in many.times.parts.items()}

    return price


# Setting: column of the row, and the axis that divides it on a rank.
_NUMBERS = {
    "layers": ("n_layers", "pp"),
    "hidden": ("d_model", ""),
    "ffn": ("d_ff", "tp"),
    "heads": ("n_heads", "tp"),
    "kv_heads": ("n_kv_heads", "tp"),
    "vocab": ("vocab", "tp"),
    "seq_len": ("seq_len", "cp"),
    "micro_batch": ("mbs", ""),
    "gpus": ("n_gpus", ""),
}
_WORDS = {"recompute": "act_ckpt", "sharding": "sharding", "gpu": "hardware"}


def log_settings(path: str) -> dict[str, Any]:
    """Of the run in a log; of several in one file the last."""
    rows = read_files([path]).rows
    hint = "an engine's log as 'fourfold collect' reads it"
    check.that(rows, "log", path, "has no run in it that can be read", hint)
    return settings_of(complete(rows[-1], {}))


def settings_of(row: Row) -> dict[str, Any]:
    axes = {axis: whole(row[axis]) or 1 for axis in AXES}
    found: dict[str, Any] = {axis: size for axis, size in axes.items() if row[axis]}
    for name, (column, axis) in _NUMBERS.items():
        number = whole(row[column])
        if number:
            found[name] = number // axes.get(axis, 1) or 1
    found |= {name: row[column] for name, column in _WORDS.items() if row[column]}
    batch = whole(row["gbs"])
    if batch and "micro_batch" in found:
        found["micro_batches"] = max(1, batch // (axes["dp"] * found["micro_batch"]))
    if row["tied"]:
        found["tied"] = row["tied"] not in ("0", "False")
    return found


def diagnose(
    traces: Sequence[str] | DiagnoseRequest,
    request: DiagnoseRequest | None = None,
    *,
    on_event: OnEvent = ignore,
) -> Diagnosis:
    """Of one trace, of several ranks' traces, or of folders with them; a request may name them."""
    if isinstance(traces, DiagnoseRequest):
        traces, request = traces.traces, traces
    request = request or DiagnoseRequest()
    traces = [traces] if isinstance(traces, str) else [*traces]
    paths = check.given(trace_files(traces), "trace", "a file or a folder")
    examined: list[Examined] = []
    logged = log_settings(request.log) if request.log else {}
    for path in paths:
        on_event(Event(f"reading {path.name}", kind="progress"))
        examined.append(_with_request(_examined(path), request, logged))
    ranks = tuple(sorted((_rank(one) for one in examined), key=lambda row: row.rank))
    found = max(examined, key=lambda one: _rank(one).busy_s)
    pricing = pricing_of(found, request)
    case = case_of(found, pricing, request)
    causes = [*find_causes(case), *_between_ranks(ranks, found)]
    causes.sort(key=lambda one: -one.seconds)
    price = price_of(pricing, request) if pricing else None
    width = pricing.width if pricing else 0.25
    diagnosis = Diagnosis(
        found=found,
        settings=found.settings,
        expected=case.expected if pricing else None,
        basis=pricing.basis if pricing else "",
        best=find_best_engine(
            found, pricing, cluster_of(found, request), read_calibration(request.calibration)
        ),
        rows_of=_rows(found, case.expected if pricing else None),
        causes=tuple(causes),
        ranks=ranks,
        what_ifs=tuple(what_if(words, case, price, width) for words in request.what_if),
        fixed=fix_all(case, causes) if request.fix else None,
    )
    return replace(diagnosis, stored=keep(diagnosis, request.runs)) if request.runs else diagnosis


def _examined(path: Path) -> Examined:
    try:
        return examine(read_trace(path))
    except MemoryError:
        rule = "needs more memory than this process may have"
        raise MachineError(
            rule, field="trace", value=str(path), hint="profile fewer steps"
        ) from None


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
            "layers": shape.layers // (spec.layout.pp if spec else 1),
            "hidden": shape.hidden,
            "vocab": shape.vocab // (spec.layout.tp if spec else 1),
            "tied": shape.tied,
        }
        settings = _overruled(settings, known, "--spec" if request.spec else "--model")
    if found.is_graphed:
        settings = settings | {"launched": graph_setting(spec)}
    shapes, counts, lacks = found.shapes, found.counts, found.lacks
    if found.is_graphed and spec is not None:
        shapes, counts = sizes_of(spec, shapes, counts)
        lacks = ()  # a graph's kernels may have no names that tell
    return replace(found, spec=spec, settings=settings, shapes=shapes, counts=counts, lacks=lacks)


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
    slowest = max(ranks, key=lambda row: row.busy_s)
    usual = median(row.busy_s for row in ranks if row is not slowest)
    over = slowest.busy_s - usual
    if over < LEAST_SHARE * slowest.step_s or over < 0.04 * usual:
        return []
    kind = "stages" if found.value("pp", 1) > 1 else "straggler"
    evidence = (
        f"rank {slowest.rank} computes {1e3 * slowest.busy_s:.0f} ms, others {1e3 * usual:.0f}"
    )
    return [cause(kind, over, evidence, *parts.COMPUTE, rank=slowest.rank)]


def _rows(found: Examined, expected: Expected | None) -> tuple[PartRow, ...]:
    seconds, step_s = found.parts, found.steps.seconds
    names = [
        *seconds,
        *(name for name in (expected.parts if expected else ()) if name not in seconds),
    ]
    rows = [
        PartRow.of_part(
            name,
            seconds.get(name, 0.0),
            seconds.get(name, 0.0) / step_s,
            expected.parts.get(name) if expected else None,
        )
        for name in names
    ]
    return tuple(sorted(rows, key=_by_outside))


def _by_outside(row: PartRow) -> tuple[float, float]:
    """What is above its expectation first, the rest by its seconds."""
    above = row.outside_s if row.outside_s >= LEAST_SHOWN_S else 0.0
    return -above, -row.seconds
