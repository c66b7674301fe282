"""What a PlanRequest asks: machines, calibration, engine and what is decided, as a PlanQuery."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.cost.columns import joined
from fourfold.cost.count import flops as conventions
from fourfold.cost.dispatch import ALWAYS_THERE
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.table.reference import read_table, table_of
from fourfold.cost.table.reports import report_rows
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.search import export as exports
from fourfold.search import query as queries
from fourfold.search.export.setup import Setup
from fourfold.search.legal import Target, certain_refusals, why_not
from fourfold.search.plan_answer import PlanAnswer
from fourfold.search.query import OwnRuns, PlanQuery
from fourfold.search.resolve import (
    Resolved,
    default_engine,
    evidence_for,
    match_engine,
    resolve,
)
from fourfold.search.rows.read import parse as parse_rows
from fourfold.spec import Batch, Cluster, ModelShape, Policy, catalog, check, codec, words
from fourfold.spec.engine import EXPORTS, Engine, engine_of, release_of
from fourfold.spec.expression import parse
from fourfold.spec.layout import AXES, EXPERT_AXES, MODEL_AXES, Layout
from fourfold.spec.run import fill_dp, gpu_counts_near, wrong_size
from fourfold.spec.supported import without_idle_window
from fourfold.units import counted
from fourfold.verbs.machine import beyond_source, planned_calibration, planned_cluster
from fourfold.verbs.requests import PlanRequest

# Engines that are compared where none is named; the first that can run the model answers.
EXPORTED = tuple(dict.fromkeys(engine.export.predicted_as for engine in EXPORTS.values()))
# Policy fields the search varies unless the request decides them.
SEARCHED = ("sharding", "cp_kind", "schedule", "virtual_stages", "recompute")


def with_export_named(request: PlanRequest) -> PlanRequest:
    """Return the request with the name that --export has for its engine; the name of a stack there
    also says whose numbers it takes."""
    if not request.export:
        return request
    engine = exports.engine_named(request.export)
    is_stack = engine != request.export.strip().lower()
    stack = request.stack or (request.export if is_stack else None)
    return replace(request, export=engine, stack=stack)


def require_plan_request(request: object) -> None:
    """Raise the TypeError of a verb that was called with anything but what a plan is asked."""
    if not isinstance(request, PlanRequest):
        is_answer = isinstance(request, PlanAnswer)
        hint = "pass the request that it answers" if is_answer else "make it of its fields"
        raise TypeError(f"needs a PlanRequest, not a {type(request).__name__}; {hint}")


def resolved(request: PlanRequest, on_event: OnEvent = ignore) -> tuple[PlanQuery, list[int]]:
    """(the question at the largest number of GPUs, all numbers of GPUs to try). How names were read
    is told once all of it can be answered."""
    require_plan_request(request)
    said: list[Event] = []
    query, counts = _resolved(with_export_named(request), said.append)
    for one in said:
        on_event(one)
    return replace(query, on_event=on_event), counts


def _resolved(request: PlanRequest, on_event: OnEvent) -> tuple[PlanQuery, list[int]]:
    layout, named = named_axes(request.layout)
    policy = codec.decode(Policy, dict(request.policy), "policy")
    cluster, remark = _machines(request, on_event)
    known = planned_calibration(request.calibration, request.profile, cluster)
    model = catalog.model(request.model) if isinstance(request.model, str) else request.model
    batch = Batch(seq_len=request.seq_len, global_batch=request.global_batch, ramp=request.ramp)
    counts = _divided(layout, named, _gpu_counts(request, cluster), model, batch)
    if model.moe:
        _check_dispatcher(policy, cluster)
    fixed = _fixed(request, layout, named, policy)
    names = _engines_to_try(request, cluster, known, model, policy, layout, named)
    asked, engine, policy = _first_that_can(
        request, names, cluster, known, model, batch, policy, counts[0]
    )
    _tell_engine(asked, engine, known, on_event, experts=model.moe is not None)
    query = PlanQuery(
        model=model,
        resolved=engine,
        gpus=counts[0],
        batch=batch,
        policy=policy,
        release=release_of(request.export or asked),
        evidence=evidence_for(known, engine.entry),
        remarks=(remark,) if remark else (),
        fixed=fixed,
        decided=frozenset(request.policy),
        export_engines=_export_engines(engine, known, experts=model.moe is not None),
        where=tuple(parse(text) for text in request.where),
        explore=request.explore,
        safe=request.safe,
        risk=request.risk,
        own_runs=_own_runs(request, known, engine),
        tokens=request.tokens,
        lost=request.lost,
        convention=conventions.convention(request.convention).id,
    )
    return query, counts


def _export_engines(engine: Resolved, known: Calibration, *, experts: bool) -> dict[str, Engine]:
    """Return whose numbers each --export has beside this engine: its own, where the rules are the
    same, else what the short name of the export's engine stands for."""
    own = engine.stack
    short = {
        name: exports.stack_of(name) for name in EXPORTS if not exports.has_rules_of(name, own)
    }
    measured = {
        stack: engine_of(match_engine(stack, engine.cluster, known, experts=experts))
        for stack in dict.fromkeys(short.values())
    }
    return {name: measured[short[name]] if name in short else engine.engine for name in EXPORTS}


def _own_runs(request: PlanRequest, known: Calibration, engine: Resolved) -> OwnRuns | None:
    """Return the runs that this engine ended, with their seconds: those of a table or a store, and
    those that taught the calibration."""
    tables = [measured_rows(request.measured, engine.cluster)] if request.measured else []
    if known.runs:
        tables.append(parse_rows(table_of(known.runs, request.calibration or known.name)))
    if not tables:
        return None
    rules, columns, seconds = engine_of(engine.stack).rules.name, [], []
    for rows in tables:
        ran = rows.usable & (rows.step_s > 0)
        ran &= np.array([engine_of(runs).rules.name == rules for runs in rows.measured_as.tolist()])
        columns.append(rows.columns.take(ran))
        seconds.append(rows.step_s[ran])
    return OwnRuns(joined(columns), np.concatenate(seconds))


def measured_rows(path: str, cluster: Cluster) -> Rows:
    """Return the rows of a table, or of the runs of a store."""
    return report_rows(path, cluster) if Path(path).is_dir() else parse_rows(read_table(path))


def _check_dispatcher(policy: Policy, cluster: Cluster) -> None:
    """Refuse a dispatcher that the cluster's file does not list."""
    kind, built = policy.dispatcher, cluster.dispatchers
    has = not built or kind in ("auto", *ALWAYS_THERE, *built)
    rule = f"is not among the dispatchers of {cluster.name}"
    hint = f"use {', '.join(dict.fromkeys(('alltoall', *built)))}, or add it to its file"
    check.that(has, "policy.dispatcher", kind, rule, hint)


def _engines_to_try(
    request: PlanRequest,
    cluster: Cluster,
    known: Calibration,
    model: ModelShape,
    policy: Policy,
    layout: Layout,
    named: set[str],
) -> list[str]:
    """Return the engine that the request names or its machines imply; where neither does, those
    whose rules allow the model and what is decided, ours last."""
    if request.stack or request.export:
        return [_implied_stack(request)]
    if cluster.name in known.clusters:
        return [default_engine(cluster, known, experts=bool(model.moe)).stack]
    needed = named & {*MODEL_AXES} | {ax for ax in EXPERT_AXES if getattr(layout, ax) > 1}
    recompute = policy.recompute_kind
    engines = []
    for engine in EXPORTED[:-1]:
        rules = EXPORTS[engine].rules
        kinds = {
            "schedule": rules.schedules,
            "cp_kind": rules.cp_kinds,
            "sharding": [f"zero{stage}" for stage in rules.zeros],
        }
        decided = {name: getattr(policy, name) for name in kinds if name in request.policy}
        if recompute not in rules.recompute or model.family not in rules.families:
            continue
        if needed - {*rules.axes}:
            continue
        if all(value in kinds[name] for name, value in decided.items()):
            engines.append(engine)
    # Where no release needs settings, what the first one refuses is the answer.
    return [*engines, EXPORTED[-1]][: 1 if model.moe else None]


def _first_that_can(
    request: PlanRequest,
    names: list[str],
    cluster: Cluster,
    known: Calibration,
    model: ModelShape,
    batch: Batch,
    policy: Policy,
    gpus: int,
) -> tuple[str, Resolved, Policy]:
    """Return the first name whose engine runs this model, batch and policy in some layout, the
    engine, and the policy with its habits; raises a refusal, where all refuse."""
    refusals: list[UserError] = []
    for name in names:
        engine = resolve(name, cluster, known, experts=model.moe is not None)
        runner = request.export or release_of(name)
        own = queries.usual_policy(
            engine.engine,
            policy,
            set(request.policy),
            release=bool(runner),
            dispatchers=cluster.dispatchers if model.moe else (),
        )
        try:
            _require_runnable(request, runner, engine, model, batch, own, gpus)
        except UserError as error:
            refusals.append(error)
        else:
            return name, engine, own
    # An engine that has no settings for the model says little of what was asked.
    raise next((one for one in refusals if not one.field.startswith("model")), refusals[0])


def _require_runnable(
    request: PlanRequest,
    runner: str,
    engine: Resolved,
    model: ModelShape,
    batch: Batch,
    policy: Policy,
    gpus: int,
) -> None:
    """Raise what an engine refuses in every layout: by the rules of the release that will run it,
    or because that has no settings for it."""
    target = Target(
        engine=engine.engine,
        release=runner if runner and EXPORTS[runner].export.writer else "",
        gpus=gpus,
        device=engine.cluster.device,
        runs=False,
    )
    model = without_idle_window(model, batch.seq_len)
    # Experts are priced for engines whose settings of them are not written.
    is_written = bool(runner) and (request.export is not None or model.moe is None)
    if is_written:
        exports.check(runner, model)
    for refusal in certain_refusals(model, batch, policy, target):
        raise refusal.error
    if is_written:
        setup = Setup(
            model=model,
            layout=Layout(),
            batch=replace(batch, micro_batch=1),
            policy=replace(policy, schedule="1f1b", virtual_stages=1),  # one rank has no pipeline
            host_gpus=1,
            engine=engine.engine,
        )
        exports.check_settings(runner, setup)


def _machines(request: PlanRequest, on_event: OnEvent) -> tuple[Cluster, str]:
    """The cluster, and what to say of its size; how a name was read is an event."""
    check.whole(1, 2**20, gpus=request.gpus)
    cluster = planned_cluster(
        cluster=request.cluster,
        gpu=request.gpu,
        profile=request.profile,
        gpus=request.gpus or (0 if request.cluster else 8 * (request.max_nodes or 0)),
        price=request.price,
        network=request.network,
    )
    if request.gpu and cluster.device.id.startswith(f"{request.gpu.lower()}-"):
        on_event(Event(f"read as: gpu {request.gpu} = {cluster.device.id}"))
    remark = beyond_source(request.cluster, cluster)
    if remark:
        on_event(Event(remark))
    return cluster, remark


def _gpu_counts(request: PlanRequest, cluster: Cluster) -> list[int]:
    most = request.gpus or cluster.gpus
    counts = [most]
    if request.max_nodes is not None:
        most = min(most, min(request.max_nodes, cluster.hosts) * cluster.host_gpus)
        counts = [n * cluster.host_gpus for n in range(most // cluster.host_gpus, 0, -1)] or [most]
    if most > cluster.gpus:
        rule = f"exceeds the {counted(cluster.gpus, 'GPU')} of {cluster.name}"
        hint = "use fewer, or describe a larger cluster with 'fourfold clusters new'"
        raise UserError(rule, field="gpus", value=most, hint=hint)
    return counts


def _divided(
    asked: Layout, named: set[str], counts: list[int], model: ModelShape, batch: Batch
) -> list[int]:
    """The numbers of GPUs that the axes given can make up; none is a mistake in the request."""
    # What no number of GPUs mends is said first.
    plain, cuts = replace(batch, micro_batch=1), ("heads", "expert-dense")
    if named:
        for refusal in why_not(model, asked, plain, Policy(), Target(runs=False), only=cuts):
            raise refusal.error
    if not named & {"dp", "shard", "replicate"}:
        used = asked.pp * asked.cp * asked.tp
        possible = [n for n in counts if n % used == 0]
        if not possible:
            fill_dp(asked, counts[0])  # raises the reason
        return possible
    whole = named >= {*MODEL_AXES}
    possible = [n for n in counts if n == asked.world or (not whole and n % asked.world == 0)]
    if not possible and whole:
        raise wrong_size(asked, counts[0])
    if not possible:
        rule = f"is not divisible by pp x dp x cp x tp = {asked.world}"
        hint = f"use {gpu_counts_near(counts[0], asked.world)} GPUs, or omit dp"
        raise UserError(rule, field="gpus", value=counts[0], hint=hint)
    return possible


def named_axes(layout: str | Mapping[str, Any]) -> tuple[Layout, set[str]]:
    """The layout, and the axes that it names; the others are left open."""
    if isinstance(layout, Mapping):
        return Layout.from_plain(dict(layout), "layout"), set(layout)
    named = {
        axis
        for axis in (*AXES, *EXPERT_AXES)
        if re.search(rf"(?<![a-wyz]){axis}", layout.lower())  # 'etp2' does not name tp
    }
    return (Layout.parse(layout) if layout.strip() else Layout()), named


def _fixed(request: PlanRequest, layout: Layout, named: set[str], policy: Policy) -> dict[str, Any]:
    """What is decided: axes, micro batch and searched policy fields."""
    axes = (*MODEL_AXES, *EXPERT_AXES)
    fixed: dict[str, Any] = {ax: getattr(layout, ax) for ax in axes if ax in named}
    if {"dp", "shard", "replicate"} & named:
        fixed |= {"dp": layout.dp, "replicate": layout.replicate}
    if request.micro_batch:
        fixed["micro_batch"] = request.micro_batch
    if words.is_hybrid(request.policy.get("sharding")) and layout.replicate == 1:
        fixed["replicate"] = "several"
    return fixed | {name: getattr(policy, name) for name in SEARCHED if name in request.policy}


def _tell_engine(
    asked: str, engine: Resolved, known: Calibration, on_event: OnEvent, *, experts: bool
) -> None:
    """Tell what a short name stands for, and where that was measured."""
    stack = engine.stack
    if stack != asked.strip().lower():
        runs = engine.measured_as.with_experts() if experts else engine.measured_as
        rows = {e.cluster: e.rows_time for e in known.by_engine.get(runs, {}).values()}
        runs = {at: counted(count, "run") for at, count in rows.items() if count}
        where = ", ".join([f"{at} ({count})" for at, count in runs.items()])
        measured = f"measured on {where}" if where else "never measured with experts"
        on_event(Event(f"read as: stack {asked} = {stack}, {measured}"))


def _implied_stack(request: PlanRequest) -> str:
    """--export X asks for the numbers of X; a --stack with other rules contradicts it."""
    asked = request.stack or ""
    if not request.export:
        return asked
    implied = exports.stack_of(request.export)
    if asked and not exports.has_rules_of(request.export, asked):
        rule = f"contradicts --export {request.export}: its rules and step times differ"
        hint = f"omit --stack, or use --stack {implied}"
        raise UserError(rule, field="stack", value=asked, hint=hint)
    return asked or implied
