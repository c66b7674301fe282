"""How well did the planner predict the runs that were measured since? Errors and regret."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fourfold.result.profile import HardwareProfile
from fourfold.search.forecast import Forecast, forecast
from fourfold.spec.cluster import Cluster
from fourfold.spec.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`inside_pct`: measured times within the stated 80% interval. `regret`: time of the planner's
    first choice over the best time, the median over groups of comparable runs; None without any."""

    runs: int
    median_error_pct: float
    inside_pct: float
    regret: float | None
    basis: str

    def __str__(self) -> str:
        text = (
            f"Planner's score ({self.basis}): median error {self.median_error_pct:.1f}% over "
            f"{self.runs} runs, {self.inside_pct:.0f}% within its interval"
        )
        return (
            text if self.regret is None else f"{text}, regret of its first choice {self.regret:.3f}"
        )


def score_runs(
    pairs: Sequence[tuple[RunSpec, float]],
    *,
    cluster: Cluster | None = None,
    profile: HardwareProfile | None = None,
) -> Score | None:
    """(run, measured seconds per step) against what would be predicted today."""
    if not pairs:
        return None
    answers = forecast([spec for spec, _ in pairs], cluster=cluster, profile=profile)
    errors = [
        abs(answer.step_s / step_s - 1) for answer, (_, step_s) in zip(answers, pairs, strict=True)
    ]
    inside = [
        answer.low_s <= step_s <= answer.high_s
        for answer, (_, step_s) in zip(answers, pairs, strict=True)
    ]
    return Score(
        runs=len(pairs),
        median_error_pct=100 * median(errors),
        inside_pct=100 * sum(inside) / len(inside),
        regret=_regret(pairs, answers),
        basis=cluster.name if cluster else profile.device_name if profile else "a rough guess",
    )


def _regret(pairs: Sequence[tuple[RunSpec, float]], answers: Sequence[Forecast]) -> float | None:
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for (spec, step_s), answer in zip(pairs, answers, strict=True):
        key = (spec.model, spec.gpus, spec.batch.seq_len, spec.batch.global_batch)
        groups[key].append((answer.step_s, step_s))
    ratios = [
        min(group)[1] / min(measured for _, measured in group)
        for group in groups.values()
        if len(group) > 1
    ]
    return median(ratios) if ratios else None
