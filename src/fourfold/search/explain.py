"""All about one layout: why it is illegal and what is legal near it, or what it takes, where it
stands and what makes the best one faster; and its pipeline as a timeline."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import exp, log2
from typing import Any

import numpy as np

from fourfold.cost.predict import OpRow, Predictions, chunk_times, operations
from fourfold.cost.schedule import Timeline, play
from fourfold.errors import UserError
from fourfold.search.alternatives import tie_width
from fourfold.search.answer import answer, smallest
from fourfold.search.candidates import candidates
from fourfold.search.legal import Refusal, why_not
from fourfold.search.plan_answer import CalibrationFacts, PlanRow, plain
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking, rank_layouts
from fourfold.spec.layout import AXES, EXPERT_AXES, SIZES, Layout
from fourfold.spec.words import SCHEDULES

NEAREST = 4
_CHOSEN_POLICY = ("sharding", "cp_kind", "schedule", "virtual_stages", "recompute")
VARIANTS = 8
# More cannot be read, and a page of them is tens of megabytes.
MOST_ACTIONS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """Of a layout that does not fit: the variant that needs least."""

    micro_batch: int
    sharding: str
    recompute: str
    peak_bytes: float
    limit_bytes: float
    memory_bytes: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All about one layout; what follows `nearest` is there as far as it is legal and fits."""

    layout: Layout
    legal: bool
    fits: bool
    refusals: tuple[dict[str, Any], ...]
    nearest: tuple[str, ...]
    memory_bytes: float
    remarks: tuple[str, ...] = ()  # what the prediction approximates for this model
    smallest: Smallest | None = None
    row: PlanRow | None = None
    variants: tuple[PlanRow, ...] | None = None
    ways: int | None = None
    calibration: CalibrationFacts | None = None
    stack: str | None = None
    rank: int | None = None  # by seconds
    of: int | None = None
    held_back: str | None = None  # why it is not the first choice although it is faster; or ""
    with_unproven: bool | None = None
    best: PlanRow | None = None
    tie_width_pct: float | None = None
    operations: tuple[OpRow, ...] | None = None  # of `row`

    def plain(self) -> dict[str, Any]:
        hidden = ("smallest",) if self.row is not None else _ONLY_FITTING
        hidden = hidden if self.operations is not None else (*hidden, "operations")
        hidden = hidden if self.legal else (*_ONLY_FITTING, "smallest")
        return {name: value for name, value in plain(self).items() if name not in hidden}

    def rows(self) -> list[dict[str, Any]]:
        """The ways to run it, or the rules that it breaks."""
        if self.variants is None:
            return [dict(one) for one in self.refusals] or [self.plain()["smallest"]]
        return [plain(row) for row in self.variants]


_ONLY_FITTING = (
    "row",
    "variants",
    "ways",
    "calibration",
    "stack",
    "rank",
    "of",
    "held_back",
    "with_unproven",
    "best",
    "tie_width_pct",
    "operations",
)


def explain(query: PlanQuery, layout: Layout) -> Explanation:
    return explain_ranking(query, layout, ways_to_run(query, layout))


def ways_to_run(query: PlanQuery, layout: Layout, *, open_experts: bool = False) -> Ranking | None:
    """Every way to run this layout, best first; None if it does not have the asked ranks.
    `open_experts`: with any `ep` and `etp` that the query does not decide. Ties are those of this
    layout alone."""
    left = EXPERT_AXES if open_experts else ()
    only = {axis: size for axis, size in layout.sizes.items() if axis not in left}
    only["replicate"] = layout.replicate
    one = replace(query, fixed=query.fixed | only, where=())
    return rank_layouts(one, least=VARIANTS) if layout.world == query.gpus else None


def way_of_row(query: PlanQuery, row: PlanRow) -> Ranking | None:
    """Return the ranking of one row of an answer alone."""
    fixed = {name: getattr(row.policy, name) for name in _CHOSEN_POLICY}
    fixed |= {"micro_batch": row.micro_batch}
    one = replace(query, policy=row.policy, fixed=query.fixed | fixed, explore=True)
    return ways_to_run(one, row.layout)


def explain_ranking(
    query: PlanQuery,
    layout: Layout,
    ranking: Ranking | None,
    *,
    plan: PlanQuery | None = None,
    listed: bool = False,
) -> Explanation:
    """`plan`: the question that it has a place in, where `query` decides more than that, as
    'pp2 dp8 v4' does; `listed`: with the operations of its best variant."""
    legal = ranking is not None and ranking.grid.legal > 0
    known: dict[str, Any] = {
        "layout": layout,
        "legal": legal,
        "fits": ranking is not None and len(ranking) > 0,
        "refusals": () if legal else tuple(asdict(one) for one in _refusals(query, layout)),
        "memory_bytes": query.resolved.cluster.device.memory_bytes,
        "remarks": (*query.remarks, *query.left_out),
    }
    if ranking is None or not legal:
        return Explanation(**known, nearest=nearest(query, layout))
    if not known["fits"]:
        return Explanation(**known, nearest=_fitting(query, layout), smallest=_smallest(ranking))
    everything = _rivals(plan or query, ranking)
    # Ways to run it stand in the order that they have in the plan.
    if everything.pace_s < ranking.pace_s:
        ranking = rank_layouts(ranking.query, least=VARIANTS, pace_s=everything.pace_s)
    own = answer(ranking, top=VARIANTS)
    best = answer(everything, top=1)
    return Explanation(
        **known,
        nearest=(),
        row=own.ranked[0],
        variants=own.ranked,
        ways=ranking.ways,
        calibration=own.calibration,
        stack=query.resolved.stack,
        rank=everything.place(ranking),
        of=everything.layouts,
        held_back=_held_back(own.ranked[0], best.ranked[0], everything),
        with_unproven=everything.query.explore and not query.explore,
        best=best.best,
        tie_width_pct=100.0 * (exp(tie_width(query.resolved.entry)) - 1.0),
        operations=_operations(ranking, own.ranked[0]) if listed else None,
    )


def _held_back(row: PlanRow, best: PlanRow, everything: Ranking) -> str:
    """Return why a row that is faster than the first choice does not stand before it."""
    if row.step_s >= best.step_s:
        return ""
    is_likely = row.fit_chance >= everything.min_fit_chance
    why = [] if is_likely else [f"{100 * row.fit_chance:.0f}% likely to fit"]
    why += ["no export"] if best.exported and not row.exported else []
    return ", ".join(why) or "a tie"


def _operations(ranking: Ranking, row: PlanRow) -> tuple[OpRow, ...]:
    one = ranking.predicted.take(np.zeros(1, dtype=np.intp))
    return operations(one.columns, ranking.query.resolved.entry.coefficients, row.parts_s)


def _rivals(query: PlanQuery, ranking: Ranking) -> Ranking:
    """Everything that a layout is compared with: what 'plan' ranks, and where the layout itself is
    not part of that (never measured, or outside --where), all that would be."""
    unproven = bool(ranking.points["unproven"][0])
    inside = not query.where or len(rank_layouts(replace(ranking.query, where=query.where)))
    open_query = replace(
        query, explore=query.explore or unproven, where=query.where if inside else ()
    )
    return rank_layouts(open_query, whole=True)


def _refusals(query: PlanQuery, layout: Layout) -> tuple[Refusal, ...]:
    """Broken rules under the friendliest policy: what the user left open takes a legal value."""
    rules = query.target.rules
    policy, open_fields = query.policy, {"sharding", "cp_kind"} - query.fixed.keys()
    changes: dict[str, Any] = {}
    if "sharding" in open_fields:
        zeros = [z for z in rules.zeros if layout.pp == 1 or z in rules.pipeline_zeros]
        changes["sharding"] = f"zero{1 if 1 in zeros else zeros[-1]}"
    if "cp_kind" in open_fields:
        changes["cp_kind"] = rules.cp_kinds[0]
    if "virtual_stages" in query.fixed and policy.virtual_stages > 1 and policy.schedule == "1f1b":
        changes["schedule"] = "interleaved"
    if layout.pp == 1:  # there is no schedule to choose
        changes |= {"schedule": "1f1b", "virtual_stages": 1}
    micro_batch = query.fixed.get("micro_batch")
    batch = replace(query.batch, micro_batch=micro_batch if isinstance(micro_batch, int) else 1)
    return why_not(query.model, layout, batch, replace(policy, **changes), query.target)


def _distance(layout: Layout, other: Layout) -> float:
    """Doublings between two layouts, axis by axis."""
    return sum(abs(log2(layout.size(axis) / other.size(axis))) for axis in AXES)


def nearest(query: PlanQuery, layout: Layout) -> tuple[str, ...]:
    """Legal layouts of the same ranks that need the fewest doublings from this one."""
    open_query = replace(query, fixed={k: v for k, v in query.fixed.items() if k == "micro_batch"})
    legal = candidates(open_query).table.rows
    layouts = {
        Layout(pp=int(pp), shard=int(replicate * shard), cp=int(cp), tp=int(tp))
        for pp, replicate, shard, cp, tp in zip(*(legal[name] for name in SIZES), strict=True)
    }
    order = sorted(layouts, key=lambda one: (_distance(one, layout), one.cp, str(one)))
    return tuple(str(one) for one in order[:NEAREST])


def _fitting(query: PlanQuery, layout: Layout) -> tuple[str, ...]:
    """The fastest layouts that fit, nearest first."""
    ranking = rank_layouts(query)
    layouts = dict.fromkeys(ranking.layout(i) for i in range(len(ranking)))
    order = sorted(layouts, key=lambda one: _distance(one, layout))
    return tuple(str(one) for one in order[:NEAREST])


def _smallest(ranking: Ranking) -> Smallest:
    """Bytes by kind of the variant that needs least."""
    one, room = smallest(ranking)
    return Smallest(
        micro_batch=one.micro_batch,
        sharding=one.policy.sharding,
        recompute=one.policy.recompute,
        peak_bytes=float(room.worst_bytes[0]),
        limit_bytes=ranking.query.limit_bytes,
        memory_bytes={name: float(part[0]) for name, part in room.parts.items()},
    )


def timeline(ranking: Ranking) -> Timeline:
    """Of the first layout."""
    name = f"{ranking.query.model.name}, {ranking.layout(0)}"
    return pipeline_timeline(ranking.predicted, name)


def pipeline_timeline(predicted: Predictions, name: str) -> Timeline:
    """Of the first run. Gradient reduction and optimizer come after and are not shown."""
    c = predicted.columns
    stages, virtual, micros = int(c.pp[0]), int(c.vpp[0]), int(c.micros[0])
    actions = 3 * stages * virtual * micros
    if actions > MOST_ACTIONS:
        rule = f"has {actions:,} actions, too many for a picture (at most {MOST_ACTIONS:,})"
        hint = "use a smaller --global-batch; the order is the same"
        raise UserError(rule, field="timeline", value=name, hint=hint)
    times, _ = chunk_times(c, predicted.entry.coefficients, predicted.times, micros)
    return play(
        name,
        SCHEDULES[int(c.schedule[0])],
        times,
        stages=stages,
        virtual_stages=virtual,
        micros=micros,
    )
