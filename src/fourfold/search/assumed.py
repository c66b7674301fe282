"""What the seconds of a model with experts assume of how tokens reach experts: the dispatcher, CUDA
graphs around it and an overlap of its exchange; and what they are without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.cost import dispatch
from fourfold.cost.columns import Columns
from fourfold.cost.dispatch import DISPATCHERS, KINDS
from fourfold.cost.predict import predictions
from fourfold.events import ignore
from fourfold.search.legal import why_not
from fourfold.search.plan_answer import Assumed, Unassumed
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts, spec_at
from fourfold.units import short_s

PARTIAL, FULL = "attention and router", "the whole step"  # what CUDA graphs capture
PLAIN = "alltoall"  # NCCL's, which every cluster and engine with experts has


def assumed(ranking: Ranking, place: int = 0, *, plans: bool = False) -> Assumed | None:
    """Return what the seconds of a row assume; None for a dense model. `plans`: also what would
    come first with all-to-all, which takes another search."""
    query = ranking.query
    if query.model.moe is None or not len(ranking):
        return None
    point = {name: column[place : place + 1] for name, column in ranking.points.items()}
    c = query.columns(point)
    kind = DISPATCHERS[int(c.dispatcher[0])]
    graphs, without = _graphs(query, c), []
    ungraphed = _with(query, cuda_graph=False)
    if graphs:
        plain = replace(ungraphed.columns(point), graphed=np.zeros(1))
        without.append(Unassumed(what="graphs", step_s=_step_s(query, plain)))
    others = (_with(query, dispatcher=PLAIN), _with(ungraphed, dispatcher=PLAIN))
    basic = next((one for one in others if _is_legal(one, ranking, place)), None)
    if kind not in ("local", "allgather", PLAIN) and basic is not None:
        best = rank_layouts(replace(basic, on_event=ignore), least=1) if plans else None
        first_s = float(best.step_s[0]) if best is not None and len(best) else None
        layout = str(best.choice(0)) if best is not None and len(best) else ""
        without.append(
            Unassumed(
                what=PLAIN,
                step_s=_step_s(query, basic.columns(point)),
                best_s=first_s,
                best_layout=layout,
            )
        )
    overlap = ""
    if query.policy.overlap_exchange:
        overlap = list(dispatch.OVERLAPS)[int(c.overlap[0])]
        still = _with(query, overlap_exchange=False)
        without.append(Unassumed(what="overlap", step_s=_step_s(query, still.columns(point))))
    return Assumed(
        dispatcher=kind,
        graphs=graphs,
        overlap=overlap,
        without=tuple(without),
        text=_text(kind, graphs, overlap, without, keeps_graph=basic is others[0]),
    )


def _with(query: PlanQuery, **policy: Any) -> PlanQuery:
    return replace(query, policy=replace(query.policy, **policy))


def _is_legal(query: PlanQuery, ranking: Ranking, place: int) -> bool:
    """Return whether the engine runs a row's layout with the policy of this question."""
    spec = spec_at(query, ranking.points, place)
    return not why_not(spec.model, spec.layout, spec.batch, spec.policy, query.target)


def _graphs(query: PlanQuery, c: Columns) -> str:
    """Return what is captured as CUDA graphs, as far as the seconds depend on it."""
    if query.policy.cuda_graph:
        return FULL
    waits = dispatch.fact(c.dispatcher, "waits")[0] > 0 and c.dropped_above[0] == 0
    return PARTIAL if c.graphed[0] > 0 and not waits else ""


def _step_s(query: PlanQuery, c: Columns) -> float:
    return float(predictions(c, query.resolved.entry).step_s[0])


def _text(
    kind: str, graphs: str, overlap: str, without: list[Unassumed], *, keeps_graph: bool
) -> str:
    """`keeps_graph`: with all-to-all as without it."""
    parts = [] if kind == "local" else [KINDS[kind].title]
    parts += [f"CUDA graphs of {graphs}"] if graphs else ["no CUDA graphs"]
    parts += [f"an exchange hidden by {overlap}"] if overlap else []
    said = [f"Assumes {' and '.join(parts)}"]
    words = {"graphs": "without the graphs", "overlap": "without the overlap"}
    words[PLAIN] = f"with {KINDS[PLAIN].title}{'' if keeps_graph else ' and without the graphs'}"
    for less in without:
        same, other = short_s(less.step_s), short_s(less.best_s or less.step_s)
        best = f" (best then: {less.best_layout}, {other} s)" if other != same else ""
        said.append(f"{words[less.what]} {same} s{best}")
    return f"{said[0]}{'; ' if said[1:] else ''}{', '.join(said[1:])}"
