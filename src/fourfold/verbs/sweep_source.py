"""Runs of a sweep: combinations of a table, of the MPT scripts' flags, or the planner's best
layouts; which of them can run, and what is predicted for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.cost.memory.peak import USABLE
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.result.report import Prediction
from fourfold.search.compare import best_of
from fourfold.search.ranking import Ranking
from fourfold.spec import Cluster, RunSpec, check, codec
from fourfold.spec.expression import memory_values, parse
from fourfold.spec.sweep import (
    Combination,
    Expansion,
    Sweep,
    expand,
    read_sweep,
    values_of,
    varied_text,
)
from fourfold.spec.tokens import read_info
from fourfold.verbs.bench import permit_of, predicted_micro_batch, refusals, tokens_of
from fourfold.verbs.machine import Predictor
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest, decided
from fourfold.verbs.run_requests import MptSweep, PlanSweep, SweepRequest
from fourfold.verbs.sites import engine_predictor, site_of

_MAX_EXPONENT, _GPUS_PER_NODE = 30, 8
# Fields of a run that the plan decides.
_PLANNED = ("model", "gpus", "layout", "batch", "policy")


# A run's table with a [sweep] table whose lists are the axes, or one of the requests.
Source = Mapping[str, Any] | MptSweep | PlanSweep


def _expanded(
    source: Source, request: SweepRequest, known: Predictor, on_event: OnEvent
) -> Expansion:
    if isinstance(source, PlanSweep):
        return _planned(source, request, known, on_event)
    sweep = _mpt(source) if isinstance(source, MptSweep) else read_sweep(dict(source))
    return expand(replace(sweep, where=(*sweep.where, *map(parse, request.where))))


def _mpt(request: MptSweep) -> Sweep:
    """Axes in the order of the MPT scripts: models, GPUs, precisions, lengths, batches."""
    fixed = dict(request.base)
    axes: list[tuple[str, tuple[Any, ...]]] = [("model", request.models)]
    if request.gpus:
        axes.append(("gpus", request.gpus))
    elif "gpus" not in fixed and not request.layouts:
        fixed["gpus"] = 1
    if request.layouts:
        axes.append(("layout", request.layouts))
    if request.precisions:
        axes.append(("precision", request.precisions))
    axes.append(("batch", tuple(_batches(request, fixed.pop("batch", {})))))
    if request.micro_batch:
        sizes = ("auto" if word == "auto" else _whole(word) for word in request.micro_batch)
        axes.append(("micro_batch", tuple(sizes)))
    rule, hint = "is an axis of this sweep and is set too", "give one, or write a FILE.toml"
    for name, _ in axes:
        check.that(name not in fixed, name, None, rule, hint)
    return Sweep(base=fixed, axes=tuple(axes))


def _whole(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise UserError("must be a whole number or auto", field="micro-batch", value=word)
    return int(word)


def _exponents(name: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    for number in numbers:
        check.that(0 <= number <= _MAX_EXPONENT, name, number, f"must be from 0 to {_MAX_EXPONENT}")
    if len(numbers) == 2:
        if numbers[0] > numbers[1]:
            raise UserError("is an empty range", field=name, value=f"{numbers[0]} {numbers[1]}")
        return tuple(range(numbers[0], numbers[1] + 1))
    return numbers


def _batches(request: MptSweep, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Length and batch together: a batch of 2^b tokens is 2^b / 2^s sequences."""
    lengths = [2**n for n in _exponents("-s", request.seq_exp)] or [fixed.get("seq_len", 2048)]
    found = []
    for length in lengths:
        if not request.batch_exp:
            found.append({"global_batch": 1, **fixed, "seq_len": length})
            continue
        for power in _exponents("-b", request.batch_exp):
            if 2**power >= length:
                found.append({**fixed, "seq_len": length, "global_batch": 2**power // length})
    hint = f"use at least {min(request.seq_exp or [11])}, the shortest sequence"
    asked = " ".join(map(str, request.batch_exp))
    check.that(found, "-b", asked, "is less than one sequence", hint)
    return found


def _planned(
    source: PlanSweep, request: SweepRequest, known: Predictor, on_event: OnEvent
) -> Expansion:
    """The planner's best, best first; `known` learns their predictions."""
    table, count, gpu = source.table, source.count, source.gpu
    check.that(count >= 1, "count", count, "must be 1 or more")
    if not (request.cluster or gpu or request.profile):
        gpu = _local_gpu(table, known, count)
    plan = PlanRequest(
        **(decided(table) | {"ramp": None}),
        cluster=request.cluster,
        gpu=gpu,
        profile=request.profile,
        calibration=request.calibration,
        max_nodes=source.max_nodes,
        where=request.where,
        explore=source.explore,
        stack=known.stack,  # runs are of one engine, so the plan is too
        export=known.release or None,
    )
    query, counts = resolved(plan, on_event)
    limited = _limited(query.resolved.cluster, table)
    query = replace(query, resolved=replace(query.resolved, cluster=limited))
    ranking, _ = best_of(query, counts, least=count)
    hint = "'fourfold plan' with the same flags shows the reasons"
    check.that(len(ranking), "count", count, "found no legal layout that fits", hint)
    found = []
    basis = f"plan on {query.resolved.cluster.name}, calibration {query.resolved.calibration}"
    for i in range(min(count, len(ranking))):
        spec = _spec(table, ranking, i)
        found.append(Combination(_varied(i, spec), spec))
        known.planned[spec.run_id] = replace(
            ranking.predicted.one(i), limit_bytes=known.limit_bytes(spec), basis=basis
        )
    return Expansion(tuple(found), 0, 0)


def _varied(i: int, spec: RunSpec) -> tuple[tuple[str, Any], ...]:
    """What sets one choice of the planner apart from the others."""
    policy, layout = spec.policy, spec.layout
    varied: dict[str, Any] = {"plan": i + 1, "layout": str(layout)}
    varied |= {"micro_batch": spec.batch.micro_batch, "sharding": policy.sharding}
    varied |= {"cp_kind": policy.cp_kind} if layout.cp > 1 else {}
    varied |= {"schedule": policy.schedule} if layout.pp > 1 else {}
    varied |= {"recompute": policy.recompute} if policy.recompute != "none" else {}
    return tuple(varied.items())


def _local_gpu(table: Mapping[str, Any], known: Predictor, count: int) -> str:
    probe = codec.load(RunSpec, {**table, "layout": {}})
    host = known.cluster_of(probe)
    if host is None:
        raise UserError(
            "needs a description of this machine",
            field="count",
            value=count,
            hint="run 'fourfold calibrate --quick --out profile.json', then pass --profile "
            "profile.json",
        )
    return host.device.id


def _limited(cluster: Cluster, table: Mapping[str, Any]) -> Cluster:
    """A run's own memory_limit binds the plan too."""
    if table.get("memory_limit") is None:
        return cluster
    limit = codec.load(RunSpec, {**table, "layout": {}, "gpus": 1}).memory_limit or 0
    size = min(cluster.device.memory_bytes, round(limit / USABLE))
    return replace(cluster, device=replace(cluster.device, memory_bytes=size))


def _spec(table: Mapping[str, Any], ranking: Ranking, i: int) -> RunSpec:
    """The planner's run, with the table's other fields: steps, device, limits."""
    chosen = codec.encode(ranking.spec(i))
    others = {name: value for name, value in table.items() if name not in _PLANNED}
    return codec.load(RunSpec, {**others, **{name: chosen[name] for name in _PLANNED}})


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRun:
    """A legal combination whose prediction a condition does not allow."""

    combination: dict[str, Any]
    reason: str
    step_s: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    expansion: Expansion
    refused: list[str]
    skipped: list[SkippedRun]
    known: Predictor

    @property
    def is_guess(self) -> bool:
        """Predictions are rough: of the cores alone."""
        return self.known.is_guess and not self.known.planned

    @property
    def legal(self) -> list[int]:
        return [place for place, why in enumerate(self.refused) if not why]


def prepared(source: Source, request: SweepRequest, on_event: OnEvent) -> Prepared:
    known = engine_predictor(request)
    expansion = _expanded(source, request, known, on_event)
    if request.tag:
        tagged = (replace(o, spec=replace(o.spec, tag=request.tag)) for o in expansion.combinations)
        expansion = replace(expansion, combinations=tuple(tagged))
    # Before the first run: one of the last must not end the whole.
    specs = [one.spec for one in expansion.combinations]
    ranks = max((spec.gpus for spec in specs if not spec.refused), default=1)
    is_here = not request.engine and site_of(request) is None
    permit_of(request).require(specs, ranks=ranks if is_here else 1)
    refused = [_refusal(spec, known) for spec in specs]
    if not request.force:
        pairs = zip(specs, refused, strict=True)
        refused = [why or _too_large(spec, known) for spec, why in pairs]
    ready = _foreseen(expansion, refused, known)
    if not ready.expansion.total:
        rule = f"no run is left: conditions exclude all {ready.expansion.dropped}"
        raise UserError(rule, hint="relax --where")
    for one in ready.skipped:
        on_event(Event(f"skipped: {varied_text(one.combination.items())}: {one.reason}"))
    return ready


def _refusal(spec: RunSpec, known: Predictor) -> str:
    reasons = [refusals(spec, known)]
    if spec.data:
        read_info(spec.data)  # without it no run of the sweep can start
    try:
        tokens_of(spec)
    except UserError as error:
        reasons.append(str(error))
    return spec.refused or "; ".join(filter(None, reasons))


def _too_large(spec: RunSpec, known: Predictor) -> str:
    why = known.too_large(spec)
    return f"certainly does not fit: {why} (--force runs it anyway)" if why else ""


def _foreseen(expansion: Expansion, refused: list[str], known: Predictor) -> Prepared:
    """Leave out legal combinations whose predicted bytes or seconds a condition does not allow.
    Illegal ones stay, with their reason."""
    whole = Prepared(expansion=expansion, refused=refused, skipped=[], known=known)
    if not expansion.foreseen:
        return whole
    predicted = dict(zip(whole.legal, predictions(expansion, whole.legal, known), strict=True))
    skipped: list[SkippedRun] = []
    left = []
    for place, one in enumerate(expansion.combinations):
        forecast = predicted.get(place)
        reason = _against(expansion, one.spec, forecast) if forecast else ""
        if not forecast or not reason:
            left.append(place)
            continue
        skipped.append(
            SkippedRun(
                combination=dict(one.varied),
                reason=reason,
                step_s=forecast.step_s,
                peak_bytes=forecast.peak_bytes,
            )
        )
    rest = replace(
        expansion,
        combinations=tuple(expansion.combinations[place] for place in left),
        dropped=expansion.dropped + len(skipped),
    )
    why = [refused[place] for place in left]
    return Prepared(expansion=rest, refused=why, skipped=skipped, known=known)


def predictions(expansion: Expansion, places: list[int], known: Predictor) -> list[Prediction]:
    specs = [predicted_micro_batch(expansion.combinations[p].spec, known) for p in places]
    return known.predictions(specs) if specs else []


def _against(expansion: Expansion, spec: RunSpec, forecast: Prediction) -> str:
    predicted = {**memory_values(forecast.peak_bytes), "step_s": forecast.step_s}
    values = values_of(spec, _GPUS_PER_NODE) | predicted
    for condition in expansion.foreseen:
        if not condition.holds(values):
            names = sorted(condition.names & predicted.keys())
            numbers = ", ".join(f"{name} {predicted[name]:.4g}" for name in names)
            return f"'{condition.text}' does not hold: predicted {numbers} ({forecast.basis})"
    return ""
