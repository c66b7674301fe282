"""Accuracy of predictions: errors, bias, ranking, regret, fit verdicts, coverage, per source; of
tables as fitted, held out, left out, from few rows.

Percent throughout. A group of layouts that compete with each other shares model, GPUs, sequence,
batch, precision and network state; ranking only counts pairs over 2% apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.fold_scores import FoldScore, fold_scores
from fourfold.cost.fit.folds import KINDS
from fourfold.cost.fit.validate import (
    few_shot,
    fit_tables,
    held_out,
    joined_parts,
    left_out,
    only,
    others_of,
    strangers,
)
from fourfold.cost.fit.widths import LeftOut, Widths, left_out_rows
from fourfold.cost.memory.peak import REFUSED, SURE
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import NoteWords
from fourfold.cost.table.rows import Rows

GROUP = (
    "source", "stack", "cluster", "hardware", "n_layers", "d_model", "n_heads", "n_gpus",
    "seq_len", "gbs", "precision",
)  # fmt: skip
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
    interval_score: float
    rank_correlation: float
    regret_pct: float
    groups: int
    memory_pct: float
    fit_pct: float
    refused_pct: float
    missed_pct: float
    unsure_pct: float

    @classmethod
    def empty(cls, source: str) -> Score:
        nan = float("nan")
        return cls(source, 0, nan, nan, nan, nan, nan, nan, nan, 0, nan, nan, nan, nan, nan)


def score(rows: Rows, answers: RowPredictions, *, within: NDArray[np.bool_] | None = None) -> Score:
    """Compare with what was measured; `within` limits it to some rows."""
    inside = rows.usable if within is None else rows.usable & within
    timed = inside & (rows.status != "oom") & np.isfinite(rows.step_s) & np.isfinite(answers.step_s)
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
        interval_score=_interval_score(rows, answers, timed),
        rank_correlation=ranking,
        regret_pct=regret,
        groups=groups,
        memory_pct=100 * float(np.median(memory)) if memory.size else nan,
        **_fit(rows, answers, inside),
    )


def _fit(rows: Rows, answers: RowPredictions, inside: NDArray[np.bool_]) -> dict[str, float]:
    """Verdicts against what happened. Of runs that ran, those whose chance to fit is under 10%; of
    runs out of memory, those over 90%; of all, those between. `fit_pct` is the mean of the shares
    judged right, at even chances, among runs that ran and those out of memory."""
    ran, oom = inside & (rows.status == "ok"), inside & (rows.status == "oom")
    yes, no = answers.fit_chance > SURE, answers.fit_chance < REFUSED

    def share(these: NDArray[np.bool_], of: NDArray[np.bool_]) -> float:
        return 100.0 * float(these[of].mean()) if of.any() else float("nan")

    return {
        "fit_pct": 0.5 * (share(answers.fits, ran) + share(~answers.fits, oom)),
        "refused_pct": share(no, ran),
        "missed_pct": share(yes, oom),
        "unsure_pct": share(~yes & ~no, ran | oom),
    }


def _interval_score(rows: Rows, answers: RowPredictions, timed: NDArray[np.bool_]) -> float:
    """Width of the 80% interval of the log, and ten times what a run lies outside of it, in
    percent: the smaller, the better (Gneiting and Raftery, 2007)."""
    if not timed.any():
        return float("nan")
    low, high = np.log(answers.low_s[timed]), np.log(answers.high_s[timed])
    truth = np.log(rows.step_s[timed])
    missed = np.maximum(0.0, low - truth) + np.maximum(0.0, truth - high)
    return 100.0 * float(np.mean(high - low + 10.0 * missed))


def group_labels(rows: Rows) -> list[tuple[str, ...]]:
    """What makes two rows compete; the network state is the word in the note."""
    network = ["slow" if NoteWords(note).slow_network else _network(note)
               for note in rows.table.column("note")]  # fmt: skip
    return list(zip(*(rows.table.column(name) for name in GROUP), network, strict=True))


def _network(note: str) -> str:
    place = note.find("network ")
    return note[place + 8 :].split(";")[0].strip() if place >= 0 else ""


def _ranking(rows: Rows, step: Floats, timed: NDArray[np.bool_]) -> tuple[float, float, int]:
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
    """One table scored in one way; `free` is the most free coefficients, time + memory."""

    how: str
    score: Score
    free: str
    rows: Rows
    answers: RowPredictions
    within: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Study:
    """Scores of tables; of all kinds of folds where they were asked for."""

    results: tuple[Result, ...]
    folds: tuple[FoldScore, ...] = ()


def study(
    tables: list[Rows],
    calibration: Calibration,
    *,
    asked: list[str],
    tell: Callable[[str], None],
) -> Study:
    """Score every table with the calibration as it is, and in the ways asked for."""
    results = [_as_is(rows, calibration) for rows in tables]
    strange: tuple[FoldScore, ...] = ()
    if not asked:
        return Study(tuple(results))
    tell("fitting all tables together")
    entries = fit_tables(tables)
    for how in asked:
        if how == "folds":
            found, widths = left_out_by_kind(tables, entries, tell)
            results += found
            tell("checking intervals, with each source left out of their widths")
            strange = fold_scores(widths)
            continue
        for rows in tables:
            tell(f"{how}: {rows.table.name}")
            others = others_of(entries, rows)
            within = np.ones(rows.table.length, dtype=bool)
            if how == "cv":
                answers = held_out(rows, others)
            elif how == "leave-out":
                answers = left_out(rows, others)
            else:
                answers, within = few_shot(rows, others)
            free = _free(rows, Calibration(name="", sources=(), entries=entries))
            results.append(
                Result(how, score(rows, answers, within=within), free, rows, answers, within)
            )
    return Study(tuple(results), strange)


def left_out_by_kind(
    tables: list[Rows], entries: tuple[FittedStack, ...], tell: Callable[[str], None]
) -> tuple[list[Result], Widths]:
    """Every kind of fold: its scores by the column `source`, and what its intervals are made of."""
    results, rows_left_out = [], list[LeftOut]()
    for kind in KINDS:
        tell(f"leaving out by {kind}")
        answers: list[list[RowPredictions]] = [[] for _ in tables]
        masks: list[list[NDArray[np.bool_]]] = [[] for _ in tables]
        for out, calibration in strangers(tables, entries, kind):
            for at, (rows, gone) in enumerate(zip(tables, out, strict=True)):
                if gone.any():
                    answers[at].append(predict(only(rows, gone), calibration))
                    masks[at].append(gone)
                    rows_left_out += left_out_rows(kind, rows, gone, calibration)
        for rows, parts, scored in zip(tables, answers, masks, strict=True):
            if parts:
                merged = joined_parts(parts, scored, rows)
                results += _by_source(kind, rows, merged, np.logical_or.reduce(scored))
    return results, Widths(rows_left_out)


def _by_source(
    kind: str, rows: Rows, answers: RowPredictions, scored: NDArray[np.bool_]
) -> list[Result]:
    sources = np.array(rows.table.column("source"), dtype=str)
    found = []
    for name in sorted(set(sources[scored].tolist())):
        within = scored & (sources == name)
        one = replace(score(rows, answers, within=within), source=name)
        found.append(Result(kind, one, "-", rows, answers, within))
    return found


def _as_is(rows: Rows, calibration: Calibration) -> Result:
    answers = predict(rows, calibration)
    within = np.ones(rows.table.length, dtype=bool)
    name = "as fitted"
    return Result(name, score(rows, answers), _free(rows, calibration), rows, answers, within)


def _free(rows: Rows, calibration: Calibration) -> str:
    """Largest number of free coefficients of a key in this table: time+memory."""
    mine = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
    found = [e for e in calibration.entries if (e.stack, e.cluster) in mine]
    if not found:
        return "0+0"
    time = max(len(e.free_time) for e in found)
    memory = max(len(e.free_memory) for e in found)
    return f"{time}+{memory}"
