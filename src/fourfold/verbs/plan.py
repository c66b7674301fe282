"""plan, explain, stacks: the fastest layouts of a model on these machines, and whether they fit.

The best measured run of a plan's model and sequence, to compare its first choice with.

fit_check: whether a layout fits, what fills the fullest rank, and what would need less.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.experts import imbalance
from fourfold.cost.fit.calibration import MEASURED
from fourfold.cost.schedule import Timeline
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.search.answer import answer, best_row
from fourfold.search.assumed import assumed
from fourfold.search.choice import TIE
from fourfold.search.compare import best_of
from fourfold.search.explain import (
    Explanation,
    Smallest,
    explain_ranking,
    timeline,
    way_of_row,
    ways_to_run,
)
from fourfold.search.fixes import rounder_batch
from fourfold.search.legal import Refusal
from fourfold.search.plan_answer import (
    EngineBest,
    MeasuredBest,
    PlanAnswer,
    PlanRow,
    RounderBatch,
    Routed,
)
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.search.resolve import listed
from fourfold.search.routed import routed
from fourfold.spec import Cluster, check
from fourfold.spec.engine import engine_of
from fourfold.spec.layout import AXES, EXPERT_AXES, Layout
from fourfold.spec.run import fill_dp
from fourfold.spec.words import OURS, SHARDINGS
from fourfold.verbs import Answer
from fourfold.verbs.beside import beside, is_worth_it
from fourfold.verbs.machine import known_cluster, planned_calibration, planned_cluster
from fourfold.verbs.question import (
    EXPORTED,
    measured_rows,
    named_axes,
    require_plan_request,
    resolved,
)
from fourfold.verbs.requests import PlanRequest, layout_fields

_CLEARLY_FASTER_PCT = 3.0  # of another batch: below that the asked one stands without a word


@dataclass(frozen=True, slots=True, kw_only=True)
class FitChecked(Answer):
    """One layout, in its fastest way to run of those that the request leaves open. `smallest`: of a
    layout that does not fit, the way that needs least; `refusals`: the rules that it breaks."""

    layout: str
    legal: bool
    fits: bool
    memory_bytes: float  # of a GPU
    refusals: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()
    micro_batch: int | None = None
    sharding: str | None = None
    recompute: str | None = None
    fit_chance: float | None = None
    peak_bytes: float | None = None
    peak_bytes_low: float | None = None
    peak_bytes_high: float | None = None
    parts_bytes: dict[str, float] | None = None
    provenance: str | None = None
    smallest: Smallest | None = None


def fit_check(
    request: PlanRequest, layout: str | Layout, *, on_event: OnEvent = ignore
) -> FitChecked:
    """What the request decides of micro batch, sharding and recompute is kept."""
    found = explain(request, layout, on_event=on_event).explanation
    row = found.row
    sizes: dict[str, Any] = (
        {}
        if row is None
        else {
            "micro_batch": row.micro_batch,
            "sharding": row.policy.sharding,
            "recompute": row.policy.recompute,
            "fit_chance": row.fit_chance,
            "peak_bytes": row.peak_bytes,
            "peak_bytes_low": row.peak_bytes_low,
            "peak_bytes_high": row.peak_bytes_high,
            "parts_bytes": row.memory_bytes,
            "provenance": row.provenance,
        }
    )
    return FitChecked(
        layout=str(found.layout),
        legal=found.legal,
        fits=found.fits,
        memory_bytes=found.memory_bytes,
        refusals=tuple(str(Refusal(**one)) for one in found.refusals),
        nearest=found.nearest,
        smallest=found.smallest,
        **sizes,
    )


def best_measured(path: str, query: PlanQuery) -> MeasuredBest:
    """Of a table's rows or a store's runs, the one with most tokens per second and GPU: other
    numbers of GPUs and batches compare too. Vocabularies are padded, so their size is not asked."""
    rows = measured_rows(path, query.resolved.cluster)
    c, model = rows.columns, query.model
    same = rows.usable & (rows.step_s > 0)
    asked = {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.ffn,
        "seq": query.batch.seq_len,
    }
    for name, value in asked.items():
        same &= getattr(c, name) == value
    if not same.any():
        return MeasuredBest(source=path)
    speed = np.where(same, c.seq * c.batch / (rows.step_s * c.gpus), 0.0)
    return _named(rows, int(np.argmax(speed)), path, float(speed.max()))


def _named(rows: Rows, i: int, path: str, tokens_s_gpu: float) -> MeasuredBest:
    c = rows.columns
    pp, dp, cp, tp, looped = (int(sizes[i]) for sizes in (c.pp, c.dp, c.cp, c.tp, c.vpp))
    layout = Layout(pp=pp, shard=dp, cp=cp, tp=tp)
    return MeasuredBest(
        source=path,
        row=rows.table.column("row_id")[i],
        name=f"{layout} v{looped}" if looped > 1 else str(layout),
        micro_batch=int(c.micro[i]),
        sharding=SHARDINGS[int(c.zero[i])],
        gpus=int(c.gpus[i]),
        step_s=float(rows.step_s[i]),
        tokens_s_gpu=tokens_s_gpu,
    )


def plan(
    request: PlanRequest, *, on_event: OnEvent = ignore, second_process: bool = False
) -> PlanAnswer:
    """The best layouts, the first choice first, with intervals, memory and what the order rests on;
    where no engine is asked for, also the best of each. `second_process`: our own engine, which has
    by far the most layouts, may be looked through beside the others."""
    query, counts = resolved(request, on_event)
    needs = "needs a model with experts"
    check.that(not request.capacity or query.model.moe, "capacity", None, needs)
    measured = best_measured(request.measured, query) if request.measured else None
    compares = not (request.stack or request.export)
    apart = compares and second_process and query.resolved.stack != OURS and len(counts) == 1
    aside = contextlib.nullcontext()
    if apart and is_worth_it(counts[0]):
        aside = beside(engine_best, request, OURS, counts[0])
    with aside as ours:
        ranking, tried = best_of(query, counts, least=request.top)
        found = replace(answer(ranking, top=request.top, tried=tried), measured=measured)
        found = replace(found, routed=_routed(request, ranking))
        found = replace(found, assumes=assumed(ranking, plans=True))
        found = replace(found, rounder_batch=_rounder_batch(ranking.query, found.best))
        if not compares:
            return found
        return replace(found, engines=_engines(request, found, ours, on_event))


def _rounder_batch(query: PlanQuery, first: PlanRow | None) -> RounderBatch | None:
    """Return a batch near the asked one that trains clearly more tokens per second."""
    size = rounder_batch(query) if first is not None else None
    if size is None or first is None:
        return None
    batch = replace(query.batch, global_batch=size)
    row, _ = best_row(rank_layouts(replace(query, batch=batch), least=1))
    faster_pct = 100 * (row.tokens_s_gpu / first.tokens_s_gpu - 1) if row else 0.0
    if row is None or faster_pct < _CLEARLY_FASTER_PCT or row.fit_chance < 1 - query.risk:
        return None
    return RounderBatch(
        global_batch=size,
        layout=str(row),
        step_s=row.step_s,
        tokens_s_gpu=row.tokens_s_gpu,
        faster_pct=faster_pct,
    )


def _routed(request: PlanRequest, ranking: Ranking) -> Routed | None:
    """Natural routing beside forced, whichever the plan is for."""
    policy = replace(ranking.query.policy, routing="natural")
    return routed(ranking, imbalance(ranking.query.model, policy), capacity=request.capacity)


def _engines(
    request: PlanRequest,
    first: PlanAnswer,
    ours: Callable[[], EngineBest] | None,
    on_event: OnEvent,
) -> tuple[EngineBest, ...]:
    """Return the best of each engine on as many GPUs: first the one that the plan is for, then
    those that are likely to fit by seconds. `ours`: that of our own, where another process looks
    for it."""
    found = []
    for engine in EXPORTED:
        on_event(Event(f"best layout of {engine}", "progress"))
        if engine == OURS and ours is not None:
            found.append(ours())
        else:
            found.append(engine_best(request, engine, first.gpus, first))

    if first.best is not None and not any(one.row is first.best for one in found):
        found.append(EngineBest(engine=first.stack, stack=first.stack, row=first.best))

    def place(one: EngineBest) -> tuple[bool, bool, bool, float]:
        row = one.row
        if row is None:
            return True, True, True, 0.0
        is_other = row is not first.best
        return False, is_other, row.fit_chance < 1.0 - request.risk, row.step_s

    found = [replace(one, held_back=_engine_held_back(one.row, first)) for one in found]
    return tuple(sorted(found, key=place))


def _engine_held_back(row: PlanRow | None, first: PlanAnswer) -> str:
    """Return why a plan is not for the engine of a row that is faster than its first choice."""
    if row is None or first.best is None or row.step_s >= first.best.step_s:
        return ""
    if row.fit_chance < 1.0 - first.risk:
        return "risky"
    if not row.exported and first.best.exported:
        return "no export"
    if row.provenance not in MEASURED:
        return "estimated"
    return "a tie" if first.best.step_s <= (1.0 + TIE) * row.step_s else "not asked for"


def engine_best(
    request: PlanRequest, engine: str, gpus: int, first: PlanAnswer | None = None
) -> EngineBest:
    """`first`: an answer for all, which may be this engine's."""
    try:
        query, _ = resolved(replace(request, stack=engine))
        if first is not None and _is_for(first, query):
            return EngineBest(engine=engine, stack=first.stack, row=first.best)
        row, why = best_row(rank_layouts(replace(query, gpus=gpus), least=1))
        return EngineBest(engine=engine, stack=query.resolved.stack, row=row, reason=why)
    except UserError as error:
        return EngineBest(engine=engine, reason=str(error))


def _is_for(first: PlanAnswer, query: PlanQuery) -> bool:
    """Return whether a plan's first choice is one of the query's engine, which --export writes."""
    has_rules = query.resolved.engine.rules.name == engine_of(first.stack).rules.name
    return has_rules and first.best is not None and first.best.exported


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One layout, and its pipeline (None: not asked for, or it does not fit)."""

    explanation: Explanation
    timeline: Timeline | None


def explain(
    request: PlanRequest,
    layout: str | Layout | PlanRow,
    *,
    draw: bool = False,
    operations: bool = False,
    on_event: OnEvent = ignore,
) -> Explained:
    """All about one layout: why it is illegal and what is near it, or what it takes and where it
    stands. Where the request does not say how many GPUs, the layout does; a text that names no
    `ep` leaves it open; a plan's row is read as it is printed. `draw`: its timeline; `operations`:
    what a rank does, one by one."""
    require_plan_request(request)
    whole = request
    layout = str(layout) if isinstance(layout, PlanRow) else layout
    if isinstance(layout, str):
        fields = layout_fields(layout, request.policy, request.micro_batch)
        layout = fields.pop("layout")
        request = replace(request, **fields)
    chosen, named = named_axes(layout) if isinstance(layout, str) else (layout, {*EXPERT_AXES})
    if isinstance(layout, str) and not named & {"dp"}:
        chosen = _with_dp(chosen, request.gpus)
    if chosen.order != AXES:
        asked, chosen = chosen, replace(chosen, order=AXES)
        rule = "rank order is fixed: tp fastest"
        on_event(Event(f"read as: {asked} = {chosen}; {rule}"))
    query = _sized(request, chosen, on_event)
    ranking = ways_to_run(query, chosen, open_experts=named.isdisjoint(EXPERT_AXES))
    is_more = whole.policy != request.policy or whole.micro_batch != request.micro_batch
    rivals = _sized(whole, chosen, ignore) if is_more else query
    explanation = explain_ranking(query, chosen, ranking, plan=rivals, listed=operations)
    way = way_of_row(query, explanation.row) if draw and explanation.row is not None else None
    drawn = timeline(way) if way is not None else None
    return Explained(explanation=explanation, timeline=drawn)


def _with_dp(layout: Layout, gpus: int | None) -> Layout:
    """Return a layout that names no dp with what the GPUs leave of it, as without --dp; as it is,
    where they leave no whole number."""
    divides = gpus is not None and gpus % (layout.pp * layout.cp * layout.tp) == 0
    return fill_dp(layout, gpus) if gpus is not None and divides else layout


def best_timeline(request: PlanRequest, answer: PlanAnswer) -> Timeline | None:
    """The pipeline of an answer's first layout; None where it has no stages, or too many actions
    for a picture. No other layout is looked at again."""
    if answer.best is None or answer.best.layout.pp == 1:
        return None
    ranking = way_of_row(_sized(request, answer.best.layout, ignore), answer.best)
    with contextlib.suppress(UserError):
        return timeline(ranking) if ranking is not None else None
    return None


def _sized(request: PlanRequest, layout: Layout, on_event: OnEvent) -> PlanQuery:
    """The question at the layout's number of GPUs, where the request leaves that open."""
    is_open = request.gpus is None and request.max_nodes is None
    if is_open and request.cluster:
        most = known_cluster(request.cluster, layout.world).gpus
        request = replace(request, gpus=layout.world) if layout.world <= most else request
    query, counts = resolved(request, on_event)
    return replace(query, gpus=layout.world) if layout.world in counts else query


@dataclass(frozen=True, slots=True)
class Stacks(Answer):
    """Engines that --stack names, with the measured runs behind each."""

    stacks: list[dict[str, Any]]

    def plain(self) -> list[dict[str, Any]]:
        return self.stacks

    def rows(self) -> list[dict[str, Any]]:
        return self.stacks


def stacks(
    *,
    gpu: str | None = None,
    cluster: str | Cluster | None = None,
    profile: str | None = None,
    calibration: str | None = None,
) -> Stacks:
    machine = None
    if cluster or gpu or profile:
        machine = planned_cluster(cluster=cluster, gpu=gpu, profile=profile, gpus=1)
    known = planned_calibration(calibration, profile, machine)
    return Stacks(list(listed(known, machine)))
