"""Makes the planner's answer to a ranking: rows in full, ties, what would reverse it, and why there
is none.

Seconds of a candidate by part, and as a reader thinks of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.cost.fit.interval import provenance
from fourfold.cost.memory.peak import Memory, memory, memory_bounds
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.power import mean_power_w
from fourfold.cost.predict import predictions
from fourfold.cost.step.traffic import crosses
from fourfold.search.alternatives import (
    alternative,
    deciding,
    evidence,
    faster,
    near_miss,
    outside,
    reversals,
    unproven_best,
)
from fourfold.search.culprit import culprit
from fourfold.search.export import is_written, runs_in
from fourfold.search.fixes import ways_out
from fourfold.search.legal import why_not
from fourfold.search.listed import only
from fourfold.search.plan_answer import Alternative, CalibrationFacts, Choice, PlanAnswer, PlanRow
from fourfold.search.query import PlanQuery
from fourfold.search.ranking import Ranking
from fourfold.search.training import Whole, whole_training
from fourfold.spec.layout import AXES, EXPERT_AXES, Layout
from fourfold.spec.run import RunSpec
from fourfold.units import counted, short_s

# Parts of a step as a reader thinks of them: work, and what is paid beside it.
EXPOSED = {
    "compute": ("gemm", "attention", "elementwise", "head"),
    "recompute": ("recompute",),
    "tp": ("tp_comm",),
    "cp": ("cp_comm",),
    "ep": ("ep_comm",),
    "pp": ("pp_comm", "bubble"),
    "dp": ("dp_comm", "fsdp_comm"),
    "host": ("host",),
    "other": ("optimizer", "fixed", "jitter"),
}


def parts_of(ranking: Ranking, i: int) -> dict[str, float]:
    """Seconds by part; of exchanges only where any operation is one."""
    c = ranking.predicted.columns.take(slice(i, i + 1))
    sent = any(op.axis in EXPERT_AXES for op in decoder_layer(c, c.micro))
    hidden = () if sent else EXPOSED["ep"]
    parts = ranking.predicted.times.parts.items()
    return {name: float(part[i]) for name, part in parts if name not in hidden}


def exposed(parts: Mapping[str, float]) -> dict[str, float]:
    known = {name: some for name, some in EXPOSED.items() if some[0] in parts}
    return {name: sum(parts[part] for part in some) for name, some in known.items()}


def best_row(ranking: Ranking) -> tuple[PlanRow | None, str]:
    """(the first choice or None, why there is none): a small part of the answer."""
    if not len(ranking):
        return None, _nothing(ranking)
    return _rows(ranking, whole_training(ranking, top=1), 1)[0], ""


def answer(ranking: Ranking, *, top: int, tried: Mapping[int, float] | None = None) -> PlanAnswer:
    """Everything `plan` says; `tried` are numbers of GPUs and the seconds of their best."""
    query, count = ranking.query, min(top, len(ranking))
    train = whole_training(ranking, top=top)
    rows = _rows(ranking, train, count)
    return PlanAnswer(
        **_asked(query),
        candidates=ranking.grid.looked_at,
        legal=ranking.grid.legal,
        too_slow=ranking.slower,
        fitting=ranking.fitting,
        dropped_by_where=ranking.dropped,
        set_aside=ranking.set_aside,
        ranked_in_all=ranking.ways,
        played=ranking.predicted.played,
        axes={name: list(values) for name, values in ranking.grid.values.items()},
        refused={str(reason): count for reason, count in ranking.grid.refused.items()},
        flop_rule=query.convention,
        ranked=rows,
        flips=reversals(ranking)[:3],
        deciding=tuple(ranking.choice(i) for i in deciding(ranking)),
        faster=faster(ranking),
        bf16_gradients=_bf16_gradients(ranking),
        risk=query.risk,
        tied=ranking.tied,
        like=query.resolved.like,
        unproven_best=unproven_best(ranking),
        near_miss=near_miss(ranking),
        training=train.facts(rows),
        reason="" if count else _nothing(ranking),
        tried_gpus=tuple({"gpus": gpus, "step_s": s} for gpus, s in (tried or {}).items()),
    )


def _asked(query: PlanQuery) -> dict[str, Any]:
    errors = query.resolved.entry.errors_pct
    return {
        "model": query.model.name,
        "params": model_params(query.model, query.batch.seq_len),
        "remarks": (*query.remarks, *query.left_out),
        "cluster": query.resolved.cluster.name,
        "gpu": query.resolved.cluster.device.id,
        "gpus": query.gpus,
        "host_gpus": query.resolved.cluster.host_gpus,
        "memory_bytes": query.resolved.cluster.device.memory_bytes,
        "seq_len": query.batch.seq_len,
        "global_batch": query.batch.global_batch,
        "stack": query.resolved.stack,
        "precision": query.policy.scaled_name,
        "calibration": CalibrationFacts(
            name=query.resolved.calibration,
            rows=query.resolved.entry.rows_time,
            memory_rows=query.resolved.entry.rows_memory,
            error_median_pct=errors.get("cv_median"),
            error_p90_pct=errors.get("cv_p90"),
            note=query.resolved.no_rows,
        ),
    }


def _memory(ranking: Ranking, c: Columns, i: int) -> dict[str, Any]:
    entry, room = ranking.query.resolved.entry, ranking.predicted.room
    low, high = memory_bounds(c, entry)
    return {
        "peak_bytes": float(room.worst_bytes[i]),
        "peak_bytes_low": float(low[0]),
        "peak_bytes_high": float(high[0]),
        "fit_chance": float(ranking.fits[i]),
        "memory_bytes": {name: float(part[i]) for name, part in room.parts.items()},
    }


def _rows(ranking: Ranking, train: Whole, count: int) -> tuple[PlanRow, ...]:
    ranking = ranking.take(np.arange(count))
    wide = ranking.predicted.interval.why_wide()
    train = replace(train, ranking=ranking)
    exported = [is_written(ranking.query, ranking.spec(i)) for i in range(count)]
    rows = (_row(ranking, train, i, wide[i], exported=exported[i]) for i in range(count))
    # Where even the first has no export, that is said once for all.
    has_export = any(exported[:1])
    return tuple(
        replace(row, note=_note(ranking, i, exported=row.exported or not has_export))
        for i, row in enumerate(rows)
    )


def _row(ranking: Ranking, train: Whole, i: int, wide: str, *, exported: bool) -> PlanRow:
    query, predicted = ranking.query, ranking.predicted
    c = predicted.columns.take(slice(i, i + 1))
    step_s = float(ranking.step_s[i])
    tokens_s = query.batch.tokens / step_s / query.gpus
    spec = ranking.spec(i)
    flops, causal = (_flops_per_token(spec, rule) for rule in (query.convention, "causal"))
    parts = parts_of(ranking, i)
    power_w = _power_w(query, parts, float(c.peak_low[0] / c.peak[0]), causal * tokens_s)
    took = train.of_row(i, power_w)
    hours = (took.get("training_s") or step_s) * query.gpus / 3600.0
    return PlanRow(
        rank=i + 1,
        layout=spec.layout,
        policy=spec.policy,
        micro_batch=spec.batch.micro_batch,
        step_s=step_s,
        step_s_low=float(predicted.low_s[i]),
        step_s_high=float(predicted.high_s[i]),
        closed_form_s=float(ranking.closed_s[i]),
        parts_s=parts,
        exposed_s=exposed(parts),
        note="",
        measured_s=None if np.isnan(ran_s := float(ranking.points["measured_s"][i])) else ran_s,
        tied=ranking.tied > 1 and bool(ranking.points["tied"][i]),
        exported=exported,
        runs_in=runs_in(query, spec),
        wide=wide,
        **_memory(ranking, c, i),
        tokens_s_gpu=tokens_s,
        tflops_gpu=flops * tokens_s / 1e12,
        mfu_pct=100.0 * flops * tokens_s / float(c.peak_low[0]),
        power_w=power_w,
        joule_per_token=power_w / tokens_s,
        gpu_hours=hours,
        gpu_hours_of="training" if took else "step",
        **took,
        ramp_s=float(train.ramp_s[i]) if train.stages and i < len(train.ramp_s) else None,
        cost=hours * price
        if (price := query.resolved.cluster.price_per_gpu_hour) is not None
        else None,
        evidence=evidence(query, c),
        provenance=provenance(c, query.resolved.entry)[0],
        outside=tuple(outside(query, c)),
    )


def _flops_per_token(spec: RunSpec, rule: str) -> float:
    return float(convention(rule).count(FlopsQuery.of_spec(spec)).printed)


def _note(ranking: Ranking, i: int, *, exported: bool) -> str:
    """Return what keeps a row back, and that tensor parallelism leaves a host."""
    step_s = ranking.points["step_s"]  # measured where it was, else predicted
    less = 100.0 * float(1.0 - step_s[i] / step_s[0])
    held = [] if exported else ["no export"]
    if less > 0.0 and ranking.fits[i] < ranking.min_fit_chance:
        held.append(f"{100 * ranking.fits[i]:.0f}% likely to fit")
    if less > 0.0:
        held = [f"{less:.1f}% less time", *(held or ["a tie"])]
    said = [", ".join(held)] if held else []
    if np.isfinite(ran_s := float(ranking.points["measured_s"][i])):
        said.append(f"measured: {short_s(ran_s)} s")
    c = ranking.predicted.columns.take(slice(i, i + 1))
    if crosses(c, c.tp, np.ones_like(c.tp))[0]:
        said.append("tp across hosts")
    return "; ".join(said)


def _bf16_gradients(ranking: Ranking) -> Alternative | None:
    """The first choice with sums of gradients in bf16, where that is the engine's other setting."""
    if not len(ranking) or ranking.query.policy.grad_dtype != "fp32":
        return None
    query, first = ranking.query, only(ranking.points, slice(0, 1))
    narrow = replace(query, policy=replace(query.policy, grad_dtype="bf16", reduce_dtype="bf16"))
    found = predictions(narrow.columns(first), query.resolved.entry)
    first["step_s"] = found.step_s
    size = float(found.room.worst_bytes[0])
    return alternative(narrow, first, fit_chance=float(found.fits[0]), peak_bytes=size)


def _power_w(
    query: PlanQuery, parts_s: Mapping[str, float], narrower: float, flops_per_s: float
) -> float:
    """Mean draw of one GPU: what is computed again is paid again, and a format that is `narrower`
    times as fast takes as much less energy for each operation."""
    compute_s = sum(parts_s[name] for name in EXPOSED["compute"])
    executed = flops_per_s * (1.0 + parts_s["recompute"] / compute_s)
    return mean_power_w(query.resolved.cluster.device, executed / narrower)


def _nothing(ranking: Ranking) -> str:
    """Why there is no answer."""
    query, grid = ranking.query, ranking.grid
    if not grid.legal:
        sequences = counted(query.batch.global_batch, "sequence")
        asked = f"{counted(query.gpus, 'GPU')} and {sequences} a step"
        ways = ways_out(query)
        if refused := culprit(query):
            return " or ".join([refused, *ways])
        if ways:
            return f"no layout divides {asked}; use {' or '.join(ways)}"
        counts = sorted(((count, name) for name, count in grid.refused.items()), reverse=True)
        rules = ", ".join(f"{name} {count:,}" for count, name in counts[:4]) or "the flags given"
        why = _rule_in_words(query, counts[0][1]) if counts else ""
        return f"no legal layout among {grid.looked_at:,}; rejected by: {rules}{why}"
    if not ranking.fitting:
        gib = query.resolved.cluster.device.memory_bytes / 2**30
        rule = f"{_least(ranking)} GiB on its fullest GPU, which has {gib:.0f}"
        return f"no layout fits: {rule}; use more GPUs, a smaller model or a shorter sequence"
    return f"no layout is left: --where excludes all {ranking.fitting:,} that fit"


def smallest(ranking: Ranking) -> tuple[Choice, Memory]:
    """What needs least memory of all that is legal, and how much."""
    table, query = ranking.grid.table, ranking.query
    index = np.flatnonzero(table.legal)
    points = table.points(index[[np.argmin(table.peak_bytes(index))]])
    room = memory(query.columns(points), query.resolved.entry.coefficients)
    return Choice.at(0, points, query.policy), room


def _least(ranking: Ranking) -> str:
    one, room = smallest(ranking)
    policy, gib = one.policy, room.worst_bytes[0] / 2**30
    named = f"{one}, micro batch {one.micro_batch}, {policy.sharding}, recompute {policy.recompute}"
    return f"the smallest ({named}) needs about {gib:.0f}"


def _rule_in_words(query: PlanQuery, reason: str) -> str:
    """What the rule that refused most says of the plainest layout that breaks it."""
    batch = replace(query.batch, micro_batch=1)
    fixed = {axis: size for axis in AXES if isinstance(size := query.fixed.get(axis), int)}
    left = query.gpus // math.prod(fixed.values())
    for axis in ("dp", "tp", "pp", "cp"):
        sizes = {axis: left} | fixed
        layout = Layout.parse(" ".join(f"{name}{sizes[name]}" for name in AXES if name in sizes))
        for refusal in why_not(query.model, layout, batch, query.policy, query.target):
            if refusal.reason == reason:
                is_plain = axis == "dp" and not fixed
                return f" ({refusal}{'' if is_plain else f', for {layout}'})"
    return ""
