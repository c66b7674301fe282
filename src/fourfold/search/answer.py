"""What does the planner say? A ranking as plain data: the JSON of `fourfold plan`, base units."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns
from fourfold.cost.count.counting import flops_per_token
from fourfold.cost.count.params import model_params
from fourfold.cost.fit.choices import choices
from fourfold.cost.fit.interval import features
from fourfold.cost.memory.interval import memory_bounds
from fourfold.cost.memory.peak import USABLE
from fourfold.cost.run import chosen_layout, chosen_policy
from fourfold.search.legal import why_not
from fourfold.search.question import Question
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
from fourfold.spec.layout import Layout
from fourfold.spec.runnable import remarks

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
_SIZES = ("tp", "cp", "pp", "gpus", "seq", "hidden", "tokens")
_SHOWN = ("precision", "sharding", "sequence_parallel", "cp_kind", "schedule", "virtual_stages",
          "recompute", "attention")  # fmt: skip


def answer(ranking: Ranking, train: Training, *, top: int) -> dict[str, Any]:
    """Everything `plan` prints."""
    ask = ranking.ask
    count = min(top, len(ranking))
    tied = tied_with_first(ranking)
    return {
        **_asked(ask),
        "candidates": ranking.grid.looked_at,
        "legal": ranking.grid.legal,
        "fitting": ranking.fitting,
        "dropped_by_where": ranking.dropped,
        "set_aside": ranking.set_aside,
        "ranked_in_all": len(ranking.all_step_s),
        "played": ranking.predicted.played,
        "axes": {name: list(values) for name, values in ranking.grid.values.items()},
        "refused": dict(ranking.grid.refused),
        "flop_rule": ask.convention,
        "ranked": [_row(ranking, train, i) for i in range(count)],
        "tied_with_first": tied,
        "tie_width_pct": 100.0 * (exp(tie_width(ask.entry)) - 1.0),
        "flips": [_flip(ranking, one) for one in flips(ranking)[:3]],
        "deciding": [_short(ranking, i) for i in deciding(ranking)],
        "unproven_best": _unproven(ranking),
        "near_miss": _near_miss(ranking),
        "training": {"ramp_stages": train.stages, "steps": train.steps},
        "reason": "" if count else _nothing(ranking),
    }


def _asked(ask: Question) -> dict[str, Any]:
    errors = ask.entry.errors_pct
    return {
        "model": ask.model.name,
        "params": model_params(ask.model, ask.batch.seq_len),
        "remarks": list(remarks(ask.model, ask.batch.seq_len)),
        "cluster": ask.cluster.name,
        "gpu": ask.cluster.device.id,
        "gpus": ask.gpus,
        "host_gpus": ask.cluster.host_gpus,
        "memory_bytes": ask.cluster.device.memory_bytes,
        "seq_len": ask.batch.seq_len,
        "global_batch": ask.batch.global_batch,
        "stack": ask.stack,
        "precision": ask.policy.precision,
        "calibration": {
            "name": ask.calibration,
            "rows": ask.entry.rows_time,
            "memory_rows": ask.entry.rows_memory,
            "error_median_pct": errors.get("cv_median"),
            "error_p90_pct": errors.get("cv_p90"),
            "interval_low_pct": 100.0 * (exp(ask.entry.low) - 1.0),
            "interval_high_pct": 100.0 * (exp(ask.entry.high) - 1.0),
            "note": ask.no_rows,
        },
    }


def _row(ranking: Ranking, train: Training, i: int) -> dict[str, Any]:
    """One ranked layout."""
    ask, predicted = ranking.ask, ranking.predicted
    c = predicted.columns.take(slice(i, i + 1))
    step_s = float(ranking.step_s[i])
    low, high = memory_bounds(c, ask.entry)
    tokens_s = ask.batch.tokens / step_s / ask.gpus
    flops = flops_per_token(c, ask.convention, learned_positions=np.zeros(1))
    assert flops is not None
    total_s = float(train.total_s[i]) if i < len(train.total_s) else 0.0
    hours = (total_s or step_s) * ask.gpus / 3600.0
    price = ask.cluster.price_per_gpu_hour
    return {
        "rank": i + 1,
        **_short(ranking, i),
        "step_s": step_s,
        "step_s_low": float(predicted.low_s[i]),
        "step_s_high": float(predicted.high_s[i]),
        "closed_form_s": float(ranking.closed_s[i]),
        "parts_s": {name: float(part[i]) for name, part in predicted.times.parts.items()},
        "exposed_s": {
            name: float(sum(predicted.times.parts[part][i] for part in parts))
            for name, parts in EXPOSED.items()
        },
        "peak_bytes": float(predicted.room.worst_bytes[i]),
        "peak_bytes_low": float(low[0]),
        "peak_bytes_high": float(high[0]),
        "tight": bool(high[0] > ask.cluster.device.memory_bytes * USABLE),
        "memory_bytes": {name: float(part[i]) for name, part in predicted.room.parts.items()},
        "tokens_s_gpu": tokens_s,
        "tflops_gpu": float(flops[0]) * tokens_s / 1e12,
        "mfu_pct": 100.0 * float(flops[0]) * tokens_s / float(c.peak_low[0]),
        "gpu_hours": hours,
        "gpu_hours_of": "training" if total_s else "step",
        "training_s": total_s or None,
        "ramp_s": float(train.ramp_s[i]) if train.stages and i < len(train.ramp_s) else None,
        "cost": hours * price if price is not None else None,
        "evidence": evidence(ask, c),
        "outside": outside(ask, c),
    }


def _short(ranking: Ranking, i: int) -> dict[str, Any]:
    """What names a candidate."""
    plain = codec.encode(ranking.policy(i))
    return {
        "layout": str(ranking.layout(i)),
        "policy": {name: plain[name] for name in _SHOWN},
        "micro_batch": int(ranking.points["micro_batch"][i]),
    }


def evidence(ask: Question, c: Columns) -> dict[str, int]:
    """Measured rows behind each choice that one run makes."""
    made = (name for name, mask in choices(c).items() if mask[0])
    return {name: ask.evidence.get(name, 0) for name in made} if ask.evidence else {}


def outside(ask: Question, c: Columns) -> list[str]:
    """Sizes beyond what was measured: 'tp 4 (measured 8 to 8)'."""
    found = []
    for name, value in features(c).items():
        low, high = ask.entry.ranges.get(name, (-np.inf, np.inf))
        if name in _SIZES and not low - ROUNDED <= value[0] <= high + ROUNDED:
            sizes = [f"{2.0**end:.0f}" for end in (float(value[0]), low, high)]
            found.append(f"{name} {sizes[0]} (measured {sizes[1]} to {sizes[2]})")
    return found


def _flip(ranking: Ranking, flip: Flip) -> dict[str, Any]:
    return {
        "knob": flip.knob,
        "about": flip.about,
        "value": flip.value,
        "other": flip.other,
        "winner": flip.winner + 1,
        "layout": str(ranking.layout(flip.winner)),
        "gain": flip.gain,
    }


def _unproven(ranking: Ranking) -> dict[str, Any] | None:
    """The fastest of what was set aside for want of evidence."""
    points, ask = ranking.unproven_best, ranking.ask
    if not points or not len(points["pp"]):
        return None
    rows = evidence(ask, ask.columns(points))
    without = [name for name, count in rows.items() if not count]
    return _one_point(ask, points) | {"without_rows": without}


def _near_miss(ranking: Ranking) -> dict[str, Any] | None:
    """The fastest that may fit although our best estimate says no, if nothing ranked is faster."""
    points, ask = ranking.near_miss, ranking.ask
    if not points or not len(points["pp"]) or points["step_s"][0] >= ranking.closed_s.min():
        return None
    return _one_point(ask, points) | {"peak_bytes": float(points["peak_bytes"][0])}


def _one_point(ask: Question, points: Pool) -> dict[str, Any]:
    policy = chosen_policy(ask.policy, points, 0)
    return {
        "layout": str(chosen_layout(points, 0)),
        "sharding": policy.sharding,
        "recompute": policy.recompute,
        "virtual_stages": policy.virtual_stages,
        "micro_batch": int(points["micro_batch"][0]),
        "step_s": float(points["step_s"][0]),
    }


def _nothing(ranking: Ranking) -> str:
    """Why there is no answer."""
    ask, grid = ranking.ask, ranking.grid
    if not grid.legal:
        counts = sorted(((count, name) for name, count in grid.refused.items()), reverse=True)
        said = ", ".join(f"{name} {count:,}" for count, name in counts[:4])
        why = _rule_in_words(ask, counts[0][1]) if counts else ""
        said = said or "the flags given"
        return f"no legal layout among {grid.looked_at:,}; refused by: {said}{why}"
    if not ranking.fitting:
        gib = ask.cluster.device.memory_bytes / 2**30
        return f"nothing fits: every legal layout needs more than {gib:.0f} GiB on its fullest rank"
    return f"--where leaves none of the {ranking.fitting} layouts that fit"


def _rule_in_words(ask: Question, reason: str) -> str:
    """What the rule that refused most says of the plainest layout that breaks it."""
    batch = replace(ask.batch, micro_batch=1)
    plain = (Layout(shard=ask.gpus), Layout(tp=ask.gpus), Layout(pp=ask.gpus), Layout(cp=ask.gpus))
    for layout in plain:
        for refusal in why_not(ask.model, layout, batch, ask.policy, ask.target):
            if refusal.reason == reason:
                words = f"{refusal.field}={refusal.value}: {refusal.rule}; {refusal.hint}"
                return f" ({words}{'' if layout is plain[0] else f', for {layout}'})"
    return ""
