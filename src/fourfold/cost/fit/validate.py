"""Predictions of rows that a fit never saw: cross-validated, left out, from few rows.

Everything is refitted without the rows that are then predicted, intervals too. `calibrate` is what
`fourfold fit` does: entries, then everything again with rows held out, so that the file says how
wrong it is on layouts it never saw.

Runs that would teach most: names K configurations; sees layouts, never results.

Greedy Bayesian design: each pick is the run whose measurement would shrink the mean predictive
variance of all candidates most, with priors as the starting uncertainty (V-optimal;
Chaloner and Verdinelli, "Bayesian Experimental Design", 1995).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack, settled
from fourfold.cost.fit.fit import NOTHING, fit_entries, fit_many
from fourfold.cost.fit.folds import AXES, FOLDS, Bools, folds, keys_of, left_out, sample
from fourfold.cost.fit.interval import sensitivities
from fourfold.cost.memory.peak import limit_bytes, memory
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.rows import Rows
from fourfold.spec.catalog import generation_of
from fourfold.units import counted

NOISE = 0.05  # log error of one measured run under a good model


def suggest(c: Columns, entry: FittedStack, count: int) -> list[int]:
    """Places of the `count` most telling runs among the candidates, best first."""
    slopes = sensitivities(c, entry)
    fits = memory(c, entry.coefficients).worst_bytes < 0.97 * limit_bytes(c, entry.coefficients)
    allowed = fits if int(fits.sum()) >= count else np.ones(len(c), dtype=bool)
    covariance = np.eye(slopes.shape[1])
    chosen: list[int] = []
    for _ in range(min(count, len(c))):
        spread = slopes @ covariance  # rows x coefficients
        own = np.einsum("ij,ij->i", spread, slopes) + NOISE**2
        # fall of the summed variance of all candidates if row i were measured
        gain = np.einsum("ij,ij->i", spread @ (slopes.T @ slopes), spread) / own
        gain = np.where(allowed, gain, -1.0)
        gain[chosen] = -2.0
        best = int(np.argmax(gain))
        chosen.append(best)
        covariance = covariance - np.outer(spread[best], spread[best]) / own[best]
    return chosen


FEW = 10
FEWEST = 4  # rows that a key must keep, for a fold along an axis to be about the axis


def only(rows: Rows, keep: Bools) -> Rows:
    """The same table with all but some rows made unusable: they keep their places."""
    return replace(rows, usable=rows.usable & keep)


def others_of(entries: tuple[FittedStack, ...], rows: Rows) -> tuple[FittedStack, ...]:
    """Entries of keys that do not occur in this table."""
    mine = set(keys_of(rows).tolist())
    return tuple(entry for entry in entries if entry.key not in mine)


def _plain(entries: tuple[FittedStack, ...]) -> Calibration:
    return Calibration(name="held out", sources=(), entries=entries)


def held_out(
    rows: Rows, others: tuple[FittedStack, ...], fixed: Mapping[str, float] = NOTHING
) -> RowPredictions:
    """Every row predicted by a fit on the other folds by layout (and on the other tables)."""
    fold = folds(rows.table)
    jobs = [(sample([only(rows, fold != f)]), others) for f in range(FOLDS)]
    made = fit_many(jobs, fixed=fixed)
    answers = [predict(only(rows, fold == f), _plain((*others, *made[f]))) for f in range(FOLDS)]
    return joined_parts(answers, [fold == f for f in range(FOLDS)], rows)


def joined_parts(parts: list[RowPredictions], masks: list[Bools], rows: Rows) -> RowPredictions:
    """Predictions of one table, each part answering the rows of its mask."""
    names = (
        "step_s",
        "low_s",
        "high_s",
        "tokens_s_gpu",
        "tflops_gpu",
        "mfu_pct",
        "mem_gb",
        "worst_gb",
        "fits",
        "fit_chance",
    )
    chosen: dict[str, Any] = {}
    for name in names:
        chosen[name] = np.full(rows.table.length, False if name == "fits" else np.nan)
        for part, mask in zip(parts, masks, strict=True):
            chosen[name][mask] = getattr(part, name)[mask]
    rests_on = [""] * rows.table.length
    for part, mask in zip(parts, masks, strict=True):
        for i in np.flatnonzero(mask):
            rests_on[i] = part.provenance[i]
    return RowPredictions(**chosen, reasons=rows.reasons, provenance=rests_on)


def left_out_of(
    tables: list[Rows], entries: tuple[FittedStack, ...], kind: str
) -> list[tuple[RowPredictions, Bools]]:
    """(predictions, rows that were predicted) of every table, each fold by a fit without its rows.
    Keys without such rows stay as they were fitted to all."""
    keys, jobs, scored = [keys_of(rows) for rows in tables], [], []
    for wanted, gone in left_out(tables, kind):
        touched = {str(key) for of, out in zip(keys, gone, strict=True) for key in of[out]}
        rest = [
            only(rows, ~out & np.isin(of, list(touched)))
            for rows, out, of in zip(tables, gone, keys, strict=True)
        ]
        jobs.append((sample(rest), tuple(e for e in entries if e.key not in touched)))
        scored.append(wanted)
    parts: list[list[RowPredictions]] = [[] for _ in tables]
    masks: list[list[Bools]] = [[] for _ in tables]
    for wanted, (_, others), made in zip(scored, jobs, fit_many(jobs, rounds=1), strict=True):
        known = _plain((*others, *made))
        enough = [entry.key for entry in known.entries if entry.rows_time >= FEWEST]
        for at, (rows, mask) in enumerate(zip(tables, wanted, strict=True)):
            asked = mask & np.isin(keys[at], enough) if kind in AXES else mask
            if asked.any():
                parts[at].append(predict(only(rows, asked), known))
                masks[at].append(asked)
    nobody = [np.zeros(rows.table.length, dtype=bool) for rows in tables]
    return [
        (joined_parts(found, mask, rows), np.logical_or.reduce([*mask, none]))
        for found, mask, rows, none in zip(parts, masks, tables, nobody, strict=True)
    ]


def few_shot(
    rows: Rows, others: tuple[FittedStack, ...], count: int = FEW
) -> tuple[RowPredictions, Bools]:
    """(predictions, rows not used) after a fit on `count` runs per key, picked without results."""
    used = np.zeros(rows.table.length, dtype=bool)
    generic, keys = _plain(others), keys_of(rows)
    for key in sorted(set(keys[rows.usable].tolist())):
        index = np.flatnonzero(rows.usable & (keys == key))
        runs, cluster = rows.measured_as[index][0], str(rows.cluster[index][0])
        entry, _ = generic.entry(runs, cluster, generation_of(str(rows.hardware[index][0])))
        used[index[suggest(rows.columns.take(index), entry, count)]] = True
    entries = fit_entries(sample([only(rows, used)]), others)
    return predict(rows, _plain((*others, *entries))), ~used


def calibrate(
    tables: list[Rows],
    *,
    name: str,
    prior: Calibration | None,
    tell: Callable[[str], None],
    fixed: Mapping[str, float] = NOTHING,
) -> Calibration:
    """Fit all keys of the tables; entries of the prior stay where the tables say nothing new."""
    rows = sample(tables)
    fresh = {f"{runs}|{cluster}" for runs, cluster in rows.all_keys()}
    kept = tuple(e for e in (prior.entries if prior else ()) if e.key not in fresh)
    tell(f"fitting {counted(len(rows), 'row')}: {counted(len(fresh), 'key')} of stack and cluster")
    entries = (*kept, *fit_entries(rows, kept, rounds=3, fixed=fixed))
    if not kept:
        entries = settled(entries)
    for table in tables:
        tell(f"cross-validating {table.table.name}")
        step = held_out(table, others_of(entries, table), fixed).step_s
        entries = tuple(_with_errors(entry, table, step) for entry in entries)
    return Calibration(
        name=name,
        sources=tuple(table.table.name for table in tables) + (prior.sources if prior else ()),
        entries=entries,
    )


def _with_errors(entry: FittedStack, table: Rows, step: Floats) -> FittedStack:
    """With its cross-validated errors in a table; `step`: every row predicted held out."""
    own = (table.measured_as == entry.measured_as) & (table.cluster == entry.cluster) & table.usable
    own = own & np.isfinite(table.step_s) & np.isfinite(step)
    if not own.any():
        return entry
    across = 100.0 * (step[own] / table.step_s[own] - 1.0)
    errors = {
        "cv_median": float(np.median(np.abs(across))),
        "cv_p90": float(np.percentile(np.abs(across), 90)),
        "cv_bias": float(np.median(across)),
    }
    return replace(entry, errors_pct=errors)
