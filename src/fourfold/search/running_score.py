"""How well the planner predicted the runs that were measured since: errors, fit and regret. Time
needs an outcome `ok`; whether a run fits is also answered by an out-of-memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from fourfold.result.report import Prediction
from fourfold.result.stored_run import StoredRun
from fourfold.units import counted


@dataclass(frozen=True, slots=True)
class Judged:
    """A prediction and what was measured then. `compared`: what runs have in common whose seconds
    are compared."""

    prediction: Prediction
    outcome: str
    step_s: float | None
    peak_bytes: int | None
    compared: tuple[object, ...]

    @classmethod
    def of(cls, run: StoredRun, prediction: Prediction) -> Judged:
        spec = run.spec
        batch = (spec.batch.seq_len, spec.batch.global_batch)
        compared = (spec.model, run.device, spec.gpus, *batch, spec.policy.precision_name)
        return cls(prediction, run.outcome, run.step_s, run.peak_bytes, compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningScore:
    """`bias_pct`: median of predicted over measured, less 100%. `inside_pct`: measured times within
    the stated 80% interval. `fit_right` of `fit_runs`: the verdict "fits" or "does not" was true;
    `missed_oom` were said to fit and did not. `regret_pct`: by how much the planner's first choice
    is slower than the fastest run, the median over groups of comparable runs. None: no run could
    tell."""

    basis: str
    runs: int
    median_error_pct: float | None
    bias_pct: float | None
    inside_pct: float | None
    memory_runs: int
    memory_error_pct: float | None
    memory_bias_pct: float | None
    fit_runs: int
    fit_right: int
    missed_oom: int
    regret_pct: float | None

    def __str__(self) -> str:
        parts = []
        if self.median_error_pct is not None:
            parts.append(
                f"median error {self.median_error_pct:.1f}% (bias {self.bias_pct:+.1f}%) over "
                f"{counted(self.runs, 'run')}, {self.inside_pct:.0f}% within its 80% interval"
            )
        if self.memory_error_pct is not None:
            parts.append(
                f"memory {self.memory_error_pct:.1f}% (bias {self.memory_bias_pct:+.1f}%) over "
                f"{self.memory_runs}"
            )
        if self.fit_runs:
            missed = f", {self.missed_oom} out-of-memory not foreseen" if self.missed_oom else ""
            parts.append(f"whether it fits right for {self.fit_right} of {self.fit_runs}{missed}")
        if self.regret_pct is not None:
            parts.append(f"regret of its first choice {self.regret_pct:.1f}%")
        return f"Planner's score ({self.basis}): {'; '.join(parts)}"


def stored_predictions(runs: Sequence[StoredRun]) -> list[Judged]:
    """Runs with what was predicted before they ran."""
    return [Judged.of(run, run.predicted) for run in runs if run.predicted]


def scores(judged: Sequence[Judged]) -> list[RunningScore]:
    """One for each basis, the most used first; what no run can judge is left out."""
    by_basis: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_basis[one.prediction.basis].append(one)
    every = (_score(basis, group) for basis, group in by_basis.items())
    useful = [score for score in every if score.runs or score.fit_runs]
    return sorted(useful, key=lambda score: (-score.runs, score.basis))


def _score(basis: str, group: Sequence[Judged]) -> RunningScore:
    timed = [one for one in group if one.step_s]
    ratios = [one.prediction.step_s / (one.step_s or 1.0) for one in timed]
    inside = [
        one.prediction.step_s_low <= (one.step_s or 0.0) <= one.prediction.step_s_high
        for one in timed
    ]
    full = [one for one in timed if one.peak_bytes]
    sizes = [one.prediction.peak_bytes / (one.peak_bytes or 1) for one in full]
    verdicts = [
        (bool(one.prediction.fits), one.outcome == "ok")
        for one in group
        if one.prediction.fits is not None and one.outcome in ("ok", "oom")
    ]
    return RunningScore(
        basis=basis,
        runs=len(timed),
        median_error_pct=_median_pct([abs(ratio - 1) for ratio in ratios]),
        bias_pct=_median_pct([ratio - 1 for ratio in ratios]),
        inside_pct=100 * sum(inside) / len(inside) if inside else None,
        memory_runs=len(full),
        memory_error_pct=_median_pct([abs(ratio - 1) for ratio in sizes]),
        memory_bias_pct=_median_pct([ratio - 1 for ratio in sizes]),
        fit_runs=len(verdicts),
        fit_right=sum(predicted == ran for predicted, ran in verdicts),
        missed_oom=sum(predicted and not ran for predicted, ran in verdicts),
        regret_pct=_regret_pct(timed),
    )


def _median_pct(values: Sequence[float]) -> float | None:
    return 100 * median(values) if values else None


def _regret_pct(timed: Sequence[Judged]) -> float | None:
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in timed:
        groups[one.compared].append((one.prediction.step_s, one.step_s or 0.0))
    ratios = [
        min(group)[1] / min(measured for _, measured in group) - 1.0
        for group in groups.values()
        if len(group) > 1
    ]
    return _median_pct(ratios)
