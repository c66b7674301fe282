"""Accuracy of predictions: errors, bias, ranking, regret, fit verdicts, coverage, per source; of
tables as fitted, held out, left out, from few rows.

Percent throughout. A group of layouts that compete with each other shares model, GPUs, sequence,
batch, precision and network state; ranking only counts pairs over 2% apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.fit import fit_entries
from fourfold.cost.fit.folds import KINDS, MANY_ROWS, Bools, sample
from fourfold.cost.fit.validate import few_shot, held_out, left_out_of, others_of
from fourfold.cost.memory.peak import REFUSED, SURE
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import NoteWords
from fourfold.cost.table.rows import Rows

GROUP = (
    "source",
    "stack",
    "cluster",
    "hardware",
    "n_layers",
    "d_model",
    "n_heads",
    "n_gpus",
    "seq_len",
    "gbs",
    "precision",
)
SMALLEST_GROUP = 4
APART = 0.02


@dataclass(frozen=True, slots=True)
class Score:
    """Of one source. NaN where the table has nothing to compare with."""

    source: str
    rows: int
    median_pct: float
    p90_pct: float
    bias_pct: float
    coverage_pct: float
    width_pct: float
    interval_score: float
    rank_correlation: float
    regret_pct: float
    groups: int
    memory_pct: float
    fit_pct: float
    refused_pct: float
    missed_pct: float
    unsure_pct: float


def timed_rows(rows: Rows, answers: RowPredictions) -> Bools:
    """Those whose seconds were measured and predicted."""
    ran = rows.usable & (rows.status != "oom")
    return ran & np.isfinite(rows.step_s) & np.isfinite(answers.step_s)


def score(rows: Rows, answers: RowPredictions, *, within: Bools | None = None) -> Score:
    """Compare with what was measured; `within` limits it to some rows."""
    inside = rows.usable if within is None else rows.usable & within
    timed = inside & timed_rows(rows, answers)
    error = answers.step_s[timed] / rows.step_s[timed] - 1.0
    nan = float("nan")
    covered = (answers.low_s <= rows.step_s) & (rows.step_s <= answers.high_s)
    ranking, regret, groups = _ranking(rows, answers.step_s, timed)
    sized = timed & np.isfinite(rows.mem_gb)
    memory = np.abs(answers.mem_gb[sized] / rows.mem_gb[sized] - 1.0)
    return Score(
        source=rows.table.name,
        rows=int(timed.sum()),
        median_pct=100 * float(np.median(np.abs(error))) if error.size else nan,
        p90_pct=100 * float(np.percentile(np.abs(error), 90)) if error.size else nan,
        bias_pct=100 * float(np.median(error)) if error.size else nan,
        coverage_pct=100 * float(covered[timed].mean()) if error.size else nan,
        **_interval(rows, answers, timed),
        rank_correlation=ranking,
        regret_pct=regret,
        groups=groups,
        memory_pct=100 * float(np.median(memory)) if memory.size else nan,
        **_fit(rows, answers, inside),
    )


def _fit(rows: Rows, answers: RowPredictions, inside: Bools) -> dict[str, float]:
    """Verdicts against what happened. Of runs that ran, those whose chance to fit is under 10%; of
    runs out of memory, those over 90%; of all, those between. `fit_pct` is the mean of the shares
    judged right, at even chances, among runs that ran and those out of memory."""
    ran, oom = inside & (rows.status == "ok"), inside & (rows.status == "oom")
    yes, no = answers.fit_chance > SURE, answers.fit_chance < REFUSED

    def share(these: Bools, of: Bools) -> float:
        return 100.0 * float(these[of].mean()) if of.any() else float("nan")

    return {
        "fit_pct": 0.5 * (share(answers.fits, ran) + share(~answers.fits, oom)),
        "refused_pct": share(no, ran),
        "missed_pct": share(yes, oom),
        "unsure_pct": share(~yes & ~no, ran | oom),
    }


def _interval(rows: Rows, answers: RowPredictions, timed: Bools) -> dict[str, float]:
    """Width of the 80% interval of the log; and with ten times what a run lies outside of it the
    score of intervals: the smaller, the better (Gneiting and Raftery, 2007)."""
    if not timed.any():
        return {"width_pct": float("nan"), "interval_score": float("nan")}
    low, high = np.log(answers.low_s[timed]), np.log(answers.high_s[timed])
    truth = np.log(rows.step_s[timed])
    missed = np.maximum(0.0, low - truth) + np.maximum(0.0, truth - high)
    score = 100.0 * float(np.mean(high - low + 10.0 * missed))
    return {"width_pct": 100.0 * float(np.mean(high - low)), "interval_score": score}


def group_labels(rows: Rows) -> list[tuple[str, ...]]:
    """What makes two rows compete; the network state is the word in the note."""
    network = [
        "slow" if NoteWords(note).slow_network else _network(note)
        for note in rows.table.column("note")
    ]
    return list(zip(*(rows.table.column(name) for name in GROUP), network, strict=True))


def _network(note: str) -> str:
    place = note.find("network ")
    return note[place + 8 :].split(";")[0].strip() if place >= 0 else ""


def _ranking(rows: Rows, step: Floats, timed: Bools) -> tuple[float, float, int]:
    """(mean correlation, mean regret percent, groups); ties of the first choice are averaged."""
    labels = group_labels(rows)
    places: dict[tuple[str, ...], list[int]] = {}
    for i in np.flatnonzero(timed):
        places.setdefault(labels[i], []).append(int(i))
    taus, regrets = [], []
    for index in places.values():
        if len(index) < SMALLEST_GROUP:
            continue
        guess, truth = step[index], rows.step_s[index]
        first = guess <= guess.min() * (1 + 1e-9)
        regrets.append(float(truth[first].mean() / truth.min() - 1.0))
        tau = pair_agreement(guess, truth)
        if tau == tau:
            taus.append(tau)
    if not regrets:
        return float("nan"), float("nan"), 0
    return (
        (float(np.mean(taus)) if taus else float("nan")),
        100 * float(np.mean(regrets)),
        len(regrets),
    )


def pair_agreement(guess: Floats, truth: Floats) -> float:
    """Kendall's tau over pairs whose measured times are over 2% apart; a tied guess counts 0."""
    wide = np.abs(np.log(truth[:, None] / truth[None, :])) > np.log1p(APART)
    upper = np.triu(wide, 1)
    if not upper.any():
        return float("nan")
    agree = np.sign(guess[:, None] - guess[None, :]) * np.sign(truth[:, None] - truth[None, :])
    return float(agree[upper].mean())


@dataclass(frozen=True, slots=True)
class Result:
    """One table, or one source of a kind of fold, scored in one way; `free` is the most free
    coefficients of a key, time + memory."""

    how: str
    score: Score
    free: str
    rows: Rows
    answers: RowPredictions
    within: Bools


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldScore:
    """One kind of fold, its sources alike, however many rows they have. `least_pct`, `most_pct`: in
    the interval, of its sources with MANY_ROWS rows; NaN where none has."""

    left_out: str
    sources: int
    rows: int
    median_pct: float
    pooled_pct: float
    p90_pct: float
    coverage_pct: float
    least_pct: float
    most_pct: float
    width_pct: float
    interval_score: float


def fold_scores(results: tuple[Result, ...]) -> tuple[FoldScore, ...]:
    """Of every kind of fold among the results."""
    found = []
    for kind in KINDS:
        mine = [one for one in results if one.how == kind and one.score.rows]
        if not mine:
            continue
        names = ("median_pct", "p90_pct", "coverage_pct", "width_pct", "interval_score")
        means = {n: float(np.mean([getattr(one.score, n) for one in mine])) for n in names}
        many = [one.score.coverage_pct for one in mine if one.score.rows >= MANY_ROWS]
        errors = [np.abs(o.answers.step_s / o.rows.step_s - 1.0)[_timed(o)] for o in mine]
        found.append(
            FoldScore(
                left_out=kind,
                sources=len(mine),
                rows=sum(one.score.rows for one in mine),
                pooled_pct=100.0 * float(np.median(np.concatenate(errors))),
                least_pct=min(many, default=float("nan")),
                most_pct=max(many, default=float("nan")),
                **means,
            )
        )
    return tuple(found)


def _timed(one: Result) -> Bools:
    return one.within & timed_rows(one.rows, one.answers)


def study(
    tables: list[Rows], calibration: Calibration, *, asked: list[str], tell: Callable[[str], None]
) -> tuple[Result, ...]:
    """Score every table with the calibration as it is, and in the ways asked for."""
    every = [np.ones(rows.table.length, dtype=bool) for rows in tables]
    results = [
        _result("as fitted", rows, predict(rows, calibration), all_rows, calibration)
        for rows, all_rows in zip(tables, every, strict=True)
    ]
    if not asked:
        return tuple(results)
    tell("fitting all tables together")
    prior = _prior(tables, calibration)
    entries = (*prior, *fit_entries(sample(tables), prior))
    known = Calibration(name="all", sources=(), entries=entries)
    for how in asked:
        if how == "folds":
            results += _by_kind(tables, known, tell)
            continue
        for rows, all_rows in zip(tables, every, strict=True):
            tell(f"{how}: {rows.table.name}")
            others, within = others_of(entries, rows), all_rows
            if how == "cv":
                answers = held_out(rows, others)
            elif how == "leave-out":
                answers = predict(rows, replace(known, entries=others))
            else:
                answers, within = few_shot(rows, others)
            results.append(_result(how, rows, answers, within, known))
    return tuple(results)


def _prior(tables: list[Rows], calibration: Calibration) -> tuple[FittedStack, ...]:
    """Runs with experts learn from those without, which learn nothing from them: of tables that
    have only the former, what the calibration knows of the latter is no answer that leaks."""
    routed = all(runs.experts for rows in tables for runs in rows.measured_as[rows.usable])
    return tuple(e for e in calibration.entries if routed and not e.measured_as.experts)


def _by_kind(tables: list[Rows], known: Calibration, tell: Callable[[str], None]) -> list[Result]:
    """Every kind of fold, by the column `source`."""
    results = []
    for kind in KINDS:
        tell(f"leaving out by {kind}")
        found = left_out_of(tables, known.entries, kind)
        for rows, (answers, scored) in zip(tables, found, strict=True):
            sources = np.array(rows.table.column("source"), dtype=str)
            for name in sorted(set(sources[scored].tolist())):
                one = _result(kind, rows, answers, scored & (sources == name), known)
                results.append(replace(one, score=replace(one.score, source=name)))
    return results


def _result(
    how: str, rows: Rows, answers: RowPredictions, within: Bools, calibration: Calibration
) -> Result:
    mine = set(zip(rows.measured_as.tolist(), rows.cluster.tolist(), strict=True))
    found = [e for e in calibration.entries if (e.measured_as, e.cluster) in mine]
    time, memory = (
        max((len(getattr(e, part)) for e in found), default=0)
        for part in ("free_time", "free_memory")
    )
    scored = score(rows, answers, within=within)
    return Result(how, scored, f"{time}+{memory}", rows, answers, within)
