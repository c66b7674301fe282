"""What does the planner say? A ranking as a typed answer, base units; its JSON and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import exp
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.count.flops import FlopsQuery, convention
from fourfold.cost.count.params import model_params
from fourfold.cost.fit.interval import choices, features
from fourfold.cost.memory.interval import memory_bounds
from fourfold.cost.memory.peak import USABLE
from fourfold.search.legal import why_not
from fourfold.search.query import PlanQuery
from fourfold.search.ramp import Training
from fourfold.search.ranking import Pool, Ranking
from fourfold.search.sensitivity import (
    Flip,
    deciding,
    flips,
    tie_width,
    tied_with_first,
)
from fourfold.spec import codec
from fourfold.spec.layout import MODEL_AXES, Layout
from fourfold.spec.model import remarks
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec, chosen_layout, chosen_policy

# Parts of a step as a reader thinks of them: work, and what is paid beside it.
EXPOSED = {
    "compute": ("gemm", "attention", "elementwise", "head"),
    "recompute": ("recompute",),
    "tp": ("tp_comm",),
    "cp": ("cp_comm",),
    "pp": ("pp_comm", "bubble"),
    "dp": ("dp_comm", "fsdp_comm"),
    "host": ("host",),
    "other": ("optimizer", "fixed", "jitter"),
}
# Calibration files keep six digits of a range's ends.
ROUNDED = 1e-4
_SIZES = (*MODEL_AXES, "gpus", "seq", "hidden", "tokens")
_SHOWN = ("precision", "sharding", "sequence_parallel", "cp_kind", "schedule", "virtual_stages",
          "recompute", "attention")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What names a candidate."""

    layout: Layout
    policy: Policy
    micro_batch: int

    def __str__(self) -> str:
        """`pp8 dp4 cp2 tp8 ulysses v4`: the layout and the kinds that go with it."""
        parts = [str(self.layout)]
        if self.layout.cp > 1:
            parts.append(self.policy.cp_kind)
        if self.policy.virtual_stages > 1:
            parts.append(f"v{self.policy.virtual_stages}")
        if self.policy.schedule in ("gpipe", "zero-bubble") and self.layout.pp > 1:
            parts.append(self.policy.schedule)
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(Choice):
    """One ranked layout. `exposed_s` are seconds by part that nothing hides; `tight`: the upper end
    of its memory's interval does not fit."""

    rank: int
    step_s: float
    step_s_low: float
    step_s_high: float
    closed_form_s: float
    parts_s: dict[str, float]
    exposed_s: dict[str, float]
    peak_bytes: float
    peak_bytes_low: float
    peak_bytes_high: float
    tight: bool
    memory_bytes: dict[str, float]
    tokens_s_gpu: float
    tflops_gpu: float
    mfu_pct: float
    gpu_hours: float
    gpu_hours_of: str
    training_s: float | None
    ramp_s: float | None
    cost: float | None
    evidence: dict[str, int]
    outside: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that is not ranked: over the memory by the best estimate, or never measured."""

    layout: Layout
    sharding: str
    recompute: str
    virtual_stages: int
    micro_batch: int
    step_s: float
    peak_bytes: float | None = None
    without_rows: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reversal:
    """An uncertain coefficient that would make another layout the winner."""

    knob: str  # the name that answers have for a coefficient
    about: str
    value: float
    other: float
    winner: int
    layout: Layout
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFacts:
    name: str
    rows: int
    memory_rows: int
    error_median_pct: float | None
    error_p90_pct: float | None
    interval_low_pct: float
    interval_high_pct: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The ranking, best first, and what makes it believable; base units."""

    model: str
    params: int
    remarks: tuple[str, ...]
    cluster: str
    gpu: str
    gpus: int
    host_gpus: int
    memory_bytes: float
    seq_len: int
    global_batch: int
    stack: str
    precision: str
    calibration: CalibrationFacts
    candidates: int
    legal: int
    fitting: int
    dropped_by_where: int
    set_aside: int
    ranked_in_all: int
    played: int
    axes: dict[str, list[Any]]
    refused: dict[str, int]
    flop_rule: str
    ranked: tuple[PlanRow, ...]
    tied_with_first: int
    tie_width_pct: float
    flips: tuple[Reversal, ...]
    deciding: tuple[Choice, ...]
    unproven_best: Alternative | None
    near_miss: Alternative | None
    training: dict[str, Any]
    reason: str
    tried_gpus: tuple[dict[str, Any], ...] = ()

    @property
    def best(self) -> PlanRow | None:
        return self.ranked[0] if self.ranked else None

    def plain(self) -> dict[str, Any]:
        return plain(self)

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict for each ranked layout, a key for every axis, field and number."""
        return [_flat(self, row) for row in self.ranked]


def plain(value: Any) -> Any:
    """Answers as plain data: layouts as texts, of a policy what the search decides."""
    if isinstance(value, Policy):
        encoded = codec.encode(value)
        return {name: encoded[name] for name in _SHOWN}
    if isinstance(value, Layout):
        return str(value)
    if is_dataclass(value):
        found = {one.name: plain(getattr(value, one.name)) for one in fields(value)}
        optional = isinstance(value, Alternative)
        return {k: v for k, v in found.items() if v is not None or not optional}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def _flat(said: PlanAnswer, row: PlanRow) -> dict[str, Any]:
    shared = ("model", "cluster", "gpu", "stack", "gpus", "seq_len", "global_batch")
    numbers = ("step_s", "step_s_low", "step_s_high", "peak_bytes", "peak_bytes_low",
               "peak_bytes_high", "tight", "tokens_s_gpu", "tflops_gpu", "mfu_pct")  # fmt: skip
    return {
        "rank": row.rank,
        **{name: getattr(said, name) for name in shared},
        "micro_batch": row.micro_batch,
        **row.layout.sizes,
        "dp_replicate": row.layout.replicate,
        "dp_shard": row.layout.shard,
        **plain(row.policy),
        **{name: getattr(row, name) for name in numbers},
        **{f"{name}_s": seconds for name, seconds in row.exposed_s.items()},
        **{name: getattr(row, name) for name in ("training_s", "gpu_hours", "cost")},
    }


def answer(
    ranking: Ranking, train: Training, *, top: int, tried: Mapping[int, float] | None = None
) -> PlanAnswer:
    """Everything `plan` says; `tried` are numbers of GPUs and the seconds of their best."""
    query = ranking.query
    count = min(top, len(ranking))
    return PlanAnswer(
        **_asked(query),
        candidates=ranking.grid.looked_at,
        legal=ranking.grid.legal,
        fitting=ranking.fitting,
        dropped_by_where=ranking.dropped,
        set_aside=ranking.set_aside,
        ranked_in_all=len(ranking.all_step_s),
        played=ranking.predicted.played,
        axes={name: list(values) for name, values in ranking.grid.values.items()},
        refused={str(reason): count for reason, count in ranking.grid.refused.items()},
        flop_rule=query.convention,
        ranked=tuple(_row(ranking, train, i) for i in range(count)),
        tied_with_first=tied_with_first(ranking),
        tie_width_pct=100.0 * (exp(tie_width(query.entry)) - 1.0),
        flips=tuple(_flip(ranking, one) for one in flips(ranking)[:3]),
        deciding=tuple(Choice(**_short(ranking, i)) for i in deciding(ranking)),
        unproven_best=_unproven(ranking),
        near_miss=_near_miss(ranking),
        training={"ramp_stages": train.stages, "steps": train.steps},
        reason="" if count else _nothing(ranking),
        tried_gpus=tuple({"gpus": gpus, "step_s": s} for gpus, s in (tried or {}).items()),
    )


def _asked(query: PlanQuery) -> dict[str, Any]:
    errors = query.entry.errors_pct
    return {
        "model": query.model.name,
        "params": model_params(query.model, query.batch.seq_len),
        "remarks": tuple(remarks(query.model, query.batch.seq_len)),
        "cluster": query.cluster.name,
        "gpu": query.cluster.device.id,
        "gpus": query.gpus,
        "host_gpus": query.cluster.host_gpus,
        "memory_bytes": query.cluster.device.memory_bytes,
        "seq_len": query.batch.seq_len,
        "global_batch": query.batch.global_batch,
        "stack": query.stack,
        "precision": query.policy.precision,
        "calibration": CalibrationFacts(
            name=query.calibration,
            rows=query.entry.rows_time,
            memory_rows=query.entry.rows_memory,
            error_median_pct=errors.get("cv_median"),
            error_p90_pct=errors.get("cv_p90"),
            interval_low_pct=100.0 * (exp(query.entry.low) - 1.0),
            interval_high_pct=100.0 * (exp(query.entry.high) - 1.0),
            note=query.no_rows,
        ),
    }


def _flops_per_token(spec: RunSpec, name: str) -> float:
    query = FlopsQuery.of(
        model=spec.model, seq_len=spec.batch.seq_len, layout=spec.layout, policy=spec.policy
    )
    return float(convention(name).count(query).printed)


def _row(ranking: Ranking, train: Training, i: int) -> PlanRow:
    """One ranked layout."""
    query, predicted = ranking.query, ranking.predicted
    c = predicted.columns.take(slice(i, i + 1))
    step_s = float(ranking.step_s[i])
    low, high = memory_bounds(c, query.entry)
    tokens_s = query.batch.tokens / step_s / query.gpus
    flops = _flops_per_token(ranking.spec(i), query.convention)
    total_s = float(train.total_s[i]) if i < len(train.total_s) else 0.0
    hours = (total_s or step_s) * query.gpus / 3600.0
    price = query.cluster.price_per_gpu_hour
    return PlanRow(
        rank=i + 1,
        **_short(ranking, i),
        step_s=step_s,
        step_s_low=float(predicted.low_s[i]),
        step_s_high=float(predicted.high_s[i]),
        closed_form_s=float(ranking.closed_s[i]),
        parts_s={name: float(part[i]) for name, part in predicted.times.parts.items()},
        exposed_s={
            name: float(sum(predicted.times.parts[part][i] for part in parts))
            for name, parts in EXPOSED.items()
        },
        peak_bytes=float(predicted.room.worst_bytes[i]),
        peak_bytes_low=float(low[0]),
        peak_bytes_high=float(high[0]),
        tight=bool(high[0] > query.cluster.device.memory_bytes * USABLE),
        memory_bytes={name: float(part[i]) for name, part in predicted.room.parts.items()},
        tokens_s_gpu=tokens_s,
        tflops_gpu=flops * tokens_s / 1e12,
        mfu_pct=100.0 * flops * tokens_s / float(c.peak_low[0]),
        gpu_hours=hours,
        gpu_hours_of="training" if total_s else "step",
        training_s=total_s or None,
        ramp_s=float(train.ramp_s[i]) if train.stages and i < len(train.ramp_s) else None,
        cost=hours * price if price is not None else None,
        evidence=evidence(query, c),
        outside=tuple(outside(query, c)),
    )


def _short(ranking: Ranking, i: int) -> dict[str, Any]:
    return {
        "layout": ranking.layout(i),
        "policy": ranking.policy(i),
        "micro_batch": int(ranking.points["micro_batch"][i]),
    }


def evidence(query: PlanQuery, c: Columns) -> dict[str, int]:
    """Measured rows behind each choice that one run makes."""
    made = (name for name, mask in choices(c).items() if mask[0])
    return {name: query.evidence.get(name, 0) for name in made} if query.evidence else {}


def outside(query: PlanQuery, c: Columns) -> list[str]:
    """Sizes beyond what was measured: 'tp 4 (measured 8 to 8)'."""
    found = []
    for name, value in features(c).items():
        low, high = query.entry.ranges.get(name, (-np.inf, np.inf))
        if name in _SIZES and not low - ROUNDED <= value[0] <= high + ROUNDED:
            sizes = [f"{2.0**end:.0f}" for end in (float(value[0]), low, high)]
            found.append(f"{name} {sizes[0]} (measured {sizes[1]} to {sizes[2]})")
    return found


def _flip(ranking: Ranking, flip: Flip) -> Reversal:
    return Reversal(
        knob=flip.coefficient,
        about=flip.about,
        value=flip.value,
        other=flip.other,
        winner=flip.winner + 1,
        layout=ranking.layout(flip.winner),
        gain=flip.gain,
    )


def _unproven(ranking: Ranking) -> Alternative | None:
    """The fastest of what was set aside for want of evidence."""
    points, query = ranking.unproven_best, ranking.query
    if not points or not len(points["pp"]):
        return None
    rows = evidence(query, query.columns(points))
    without = tuple(name for name, count in rows.items() if not count)
    return _alternative(query, points, without_rows=without)


def _near_miss(ranking: Ranking) -> Alternative | None:
    """The fastest that may fit although our best estimate says no, if nothing ranked is faster."""
    points, query = ranking.near_miss, ranking.query
    if not points or not len(points["pp"]) or points["step_s"][0] >= ranking.closed_s.min():
        return None
    return _alternative(query, points, peak_bytes=float(points["peak_bytes"][0]))


def _alternative(query: PlanQuery, points: Pool, **more: Any) -> Alternative:
    policy = chosen_policy(query.policy, points, 0)
    return Alternative(
        layout=chosen_layout(points, 0),
        sharding=policy.sharding,
        recompute=policy.recompute,
        virtual_stages=policy.virtual_stages,
        micro_batch=int(points["micro_batch"][0]),
        step_s=float(points["step_s"][0]),
        **more,
    )


def _nothing(ranking: Ranking) -> str:
    """Why there is no answer."""
    query, grid = ranking.query, ranking.grid
    if not grid.legal:
        counts = sorted(((count, name) for name, count in grid.refused.items()), reverse=True)
        said = ", ".join(f"{name} {count:,}" for count, name in counts[:4])
        why = _rule_in_words(query, counts[0][1]) if counts else ""
        said = said or "the flags given"
        return f"no legal layout among {grid.looked_at:,}; rejected by: {said}{why}"
    if not ranking.fitting:
        gib = query.cluster.device.memory_bytes / 2**30
        return f"nothing fits: every legal layout needs more than {gib:.0f} GiB on its fullest rank"
    return f"--where excludes all {ranking.fitting} layouts that fit"


def _rule_in_words(query: PlanQuery, reason: str) -> str:
    """What the rule that refused most says of the plainest layout that breaks it."""
    batch = replace(query.batch, micro_batch=1)
    plain = (
        Layout(shard=query.gpus),
        Layout(tp=query.gpus),
        Layout(pp=query.gpus),
        Layout(cp=query.gpus),
    )
    for layout in plain:
        for refusal in why_not(query.model, layout, batch, query.policy, query.target):
            if refusal.reason == reason:
                words = str(refusal)
                return f" ({words}{'' if layout is plain[0] else f', for {layout}'})"
    return ""
