"""front, largest: what people ask after a plan, seconds against memory or GPUs, and the largest
model or longest sequence that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fourfold.cost.count.params import model_params
from fourfold.cost.predict import predictions
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, ignore
from fourfold.search.answer import answer
from fourfold.search.compare import best_of, shapes_near
from fourfold.search.fastest import fastest
from fourfold.search.plan_answer import PlanAnswer, PlanRow, plain
from fourfold.search.ran import with_own_runs
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.spec import ModelShape, catalog
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.plan import plan
from fourfold.verbs.question import resolved
from fourfold.verbs.requests import PlanRequest

# Of the device: what two neighbours of a front differ by at least.
STEP = 0.02


def memory_front(ranking: Ranking, most: int) -> Ranking:
    """The ranked points that no other undercuts in both seconds (closed form) and bytes, fastest
    first, each smaller than the one before by 2% of the device or more."""
    space, mask = ranking.bounds.table, ranking.ranked.copy()
    peak_bytes = np.full(mask.size, np.inf)
    members = np.flatnonzero(mask)
    peak_bytes[members] = space.peak_bytes(members)
    step = STEP * ranking.query.resolved.cluster.device.memory_bytes
    front: list[int] = []
    while mask.any() and len(front) < most:
        index, step_s = fastest(ranking.bounds, mask, keep=1, variants=1)
        best = int(index[np.lexsort((peak_bytes[index], step_s))[0]])
        front.append(best)
        mask &= (peak_bytes < peak_bytes[best] - step).reshape(mask.shape)
    points = space.points(np.array(front, dtype=np.intp))
    points["peak_bytes"] = peak_bytes[front]
    points["tied"] = np.zeros(len(front), dtype=bool)  # each differs in bytes
    predicted = predictions(ranking.query.columns(points), ranking.query.resolved.entry)
    points = with_own_runs(ranking.query.own_runs, points, predicted)
    return replace(ranking, points=points, predicted=predicted, held_back={})


Against = Literal["memory", "gpus"]
Of = Literal["sequence", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One layout of a front."""

    gpus: int
    row: PlanRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Front(Answer):
    """Layouts that no other undercuts in both seconds and what they are set `against`, fastest
    first. `asked`: the plan that the fastest is from."""

    against: Against
    asked: PlanAnswer
    points: tuple[FrontPoint, ...]

    def plain(self) -> dict[str, Any]:
        points = [{"gpus": one.gpus, **plain(one.row)} for one in self.points]
        return {"against": self.against, "model": self.asked.model, "points": points}

    def rows(self) -> list[dict[str, Any]]:
        return [{"gpus": one.gpus, **one.row.flat()} for one in self.points]


def front(request: PlanRequest, against: Against, *, on_event: OnEvent = ignore) -> Front:
    """Against memory: on the GPUs asked for. Against GPUs: their number, halved again and again
    while something fits."""
    if against == "memory":
        query, counts = resolved(request, on_event)
        ranking = rank_layouts(replace(query, gpus=counts[0]), whole=True)
        ranking = memory_front(ranking, request.top)
        found = answer(ranking, top=request.top)
        points = tuple(FrontPoint(gpus=found.gpus, row=row) for row in found.ranked)
        return Front(against=against, asked=found, points=points)
    asked = found = _best(request, on_event)
    gpus, listed = asked.gpus, list[FrontPoint]()
    while found.best is not None and _is_likely(found.best) and len(listed) < request.top:
        # A smaller machine that is as fast leaves nothing for the larger one.
        while listed and listed[-1].row.step_s >= found.best.step_s:
            listed.pop()
        listed.append(FrontPoint(gpus=gpus, row=found.best))
        if gpus % 2:
            break
        gpus //= 2
        on_event(Event(counted(gpus, "GPU"), "progress"))
        found = _best(replace(request, gpus=gpus, max_nodes=None))
    return Front(against=against, asked=asked, points=tuple(listed))


def _best(request: PlanRequest, on_event: OnEvent = ignore) -> PlanAnswer:
    """A plan's first choice, without a look at other engines."""
    query, counts = resolved(request, on_event)
    ranking, tried = best_of(query, counts, least=request.top)
    return answer(ranking, top=1, tried=tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Answer):
    """The longest sequence (with as many tokens a step), or the largest model of the same family
    and about the same proportions, for which a layout fits; and its plan."""

    of: Of
    seq_len: int
    model: ModelShape
    params: int
    plan: PlanAnswer

    def plain(self) -> dict[str, Any]:
        sizes = {"of": self.of, "seq_len": self.seq_len, "params": self.params}
        shape = {name: getattr(self.model, name) for name in ("layers", "hidden", "heads", "ffn")}
        return sizes | {"model": shape, "plan": self.plan.plain()}

    def rows(self) -> list[dict[str, Any]]:
        return [{"params": self.params, **row} for row in self.plan.rows()]


def largest(request: PlanRequest, of: Of, *, on_event: OnEvent = ignore) -> Largest:
    """Sizes are tried in doublings, then in eighths between the last that fits and its double.
    With `safe`, a layout must be 90% likely to fit."""
    base = catalog.model(request.model) if isinstance(request.model, str) else request.model
    change = _longer if of == "sequence" else _wider
    made = _most(request, lambda eighths: change(request, base, eighths), on_event)
    if made is None:
        raise UserError(
            "nothing fits, however small", hint="plan without --largest for the reasons"
        )
    best, model = made, made.model
    assert isinstance(model, ModelShape)
    return Largest(
        of=of,
        seq_len=best.seq_len,
        model=model,
        params=model_params(model, best.seq_len),
        plan=plan(best, on_event=on_event),
    )


def _longer(request: PlanRequest, model: ModelShape, eighths: int) -> PlanRequest | None:
    seq_len = 128 * eighths
    sequences = max(1, request.seq_len * request.global_batch // seq_len)
    return replace(request, model=model, seq_len=seq_len, global_batch=sequences)


def _wider(request: PlanRequest, base: ModelShape, eighths: int) -> PlanRequest | None:
    """The shape nearest to the base's proportions, at eighths of 100 million parameters."""
    shapes = shapes_near(base, 12.5e6 * eighths, request.seq_len, 8)
    aspect = base.hidden / base.layers
    nearest = min(shapes, key=lambda one: abs(one.hidden / one.layers - aspect), default=None)
    return replace(request, model=nearest) if nearest is not None else None


MOST_DOUBLINGS = 18


def _most(
    request: PlanRequest, make: Callable[[int], PlanRequest | None], on_event: OnEvent
) -> PlanRequest | None:
    """What `make` makes of the largest number of eighths that fits."""
    best, eighths = None, 0
    for doubling in range(MOST_DOUBLINGS):
        made = make(8 << doubling)
        share = doubling / MOST_DOUBLINGS
        on_event(Event("searching for the largest that fits", "progress", share))
        if made is not None and _fits(made):
            best, eighths = made, 8 << doubling
        elif best is not None:
            break
    for more in range(7, 0, -1) if best is not None else ():
        made = make(eighths + more * eighths // 8)
        if made is not None and _fits(made):
            return made
    return best


def _fits(request: PlanRequest) -> bool:
    """Whether something more likely fits than not; surely, where the request says so."""
    query, counts = resolved(replace(request, top=1))
    ranking = rank_layouts(replace(query, gpus=counts[0]), least=1)
    if not len(ranking):
        return False
    best = answer(ranking, top=1).ranked[0]
    return best.surely_fits if request.safe else _is_likely(best)


def _is_likely(row: PlanRow) -> bool:
    return row.fit_chance >= 0.5
