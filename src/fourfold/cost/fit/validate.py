"""Accuracy on rows that a fit never saw: cross-validated, source left out, few rows.

Everything is refitted without the rows that are then predicted, intervals too. `calibrate` is what
`fourfold fit` does: entries, then everything again with rows held out, so that the file says how
wrong it is on layouts it never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack, between
from fourfold.cost.fit.fit import NOTHING, fit_entries, sample
from fourfold.cost.fit.folds import AXES, FOLDS, folds, labels
from fourfold.cost.fit.interval import counts
from fourfold.cost.fit.nearby import times
from fourfold.cost.fit.suggest import suggest
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.rows import Rows
from fourfold.spec.catalog import generation_of

FEW = 10
FEWEST = 4  # rows that a key must keep, for a fold along an axis to be about the axis
Progress = Callable[[str], None]


def fit_tables(tables: list[Rows]) -> tuple[FittedStack, ...]:
    """Entries of all keys in these tables."""
    return fit_entries(sample(tables))


def only(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    """The same table with all but some rows made unusable: they keep their places."""
    return replace(rows, usable=rows.usable & keep)


def others_of(entries: tuple[FittedStack, ...], rows: Rows) -> tuple[FittedStack, ...]:
    """Entries of keys that do not occur in this table."""
    mine = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
    return tuple(entry for entry in entries if (entry.stack, entry.cluster) not in mine)


def held_out(
    rows: Rows, others: tuple[FittedStack, ...], fixed: Mapping[str, float] = NOTHING
) -> RowPredictions:
    """Every row predicted by a fit on the other folds by layout (and on the other tables)."""
    fold = folds(rows.table)
    rest = [sample([only(rows, fold != f)]) for f in range(FOLDS)]
    made = [fit_entries(one, others, fixed=fixed) for one in rest]
    answers = [predict(only(rows, fold == f), _plain((*others, *made[f]))) for f in range(FOLDS)]
    return joined_parts(answers, [fold == f for f in range(FOLDS)], rows)


def _plain(entries: tuple[FittedStack, ...]) -> Calibration:
    return Calibration(name="held out", sources=(), entries=entries, between=between(entries))


def joined_parts(
    parts: list[RowPredictions], masks: list[NDArray[np.bool_]], rows: Rows
) -> RowPredictions:
    """Predictions of one table, each part answering the rows of its mask."""
    names = ("step_s", "low_s", "high_s", "tokens_s_gpu", "tflops_gpu", "mfu_pct", "mem_gb",
             "worst_gb", "fits", "fit_chance")  # fmt: skip
    chosen: dict[str, Any] = {}
    for name in names:
        chosen[name] = np.full(rows.table.length, False if name == "fits" else np.nan)
        for part, mask in zip(parts, masks, strict=True):
            chosen[name][mask] = getattr(part, name)[mask]
    return RowPredictions(**chosen, reasons=rows.reasons)


def left_out(rows: Rows, others: tuple[FittedStack, ...]) -> RowPredictions:
    """Every row predicted from the other tables alone."""
    return predict(rows, _plain(others))


def strangers(
    tables: list[Rows], entries: tuple[FittedStack, ...], kind: str
) -> Iterator[tuple[list[NDArray[np.bool_]], Calibration]]:
    """(rows of each table that are left out and scored, a calibration without them) for every label
    of a kind of fold. Keys without such rows stay as they were fitted to all."""
    named = [labels(rows, kind) for rows in tables]
    keys = [np.char.add(np.char.add(rows.stack, "|"), rows.cluster) for rows in tables]
    found = (label[rows.usable] for rows, label in zip(tables, named, strict=True))
    for value in sorted({str(one) for label in found for one in label} - {""}):
        out = [r.usable & (label == value) for r, label in zip(tables, named, strict=True)]
        touched = {str(key) for key, gone in zip(keys, out, strict=True) for key in key[gone]}
        others = tuple(entry for entry in entries if entry.key not in touched)
        rest = [
            only(rows, ~gone & np.isin(key, list(touched)))
            for rows, gone, key in zip(tables, out, keys, strict=True)
        ]
        left = sample(rest)
        made = fit_entries(left, others, rounds=1) if len(left) else ()
        scored = {entry.key for entry in made if entry.rows_time >= FEWEST}
        if kind in AXES:
            out = [gone & np.isin(key, list(scored)) for gone, key in zip(out, keys, strict=True)]
        yield out, _plain((*others, *made))


def few_shot(
    rows: Rows, others: tuple[FittedStack, ...], count: int = FEW
) -> tuple[RowPredictions, NDArray[np.bool_]]:
    """(predictions, rows not used) after a fit on `count` runs per key, picked without results."""
    used = picked(rows, others, count)
    entries = fit_entries(sample([only(rows, used)]), others)
    return predict(rows, _plain((*others, *entries))), ~used


def picked(rows: Rows, others: tuple[FittedStack, ...], count: int) -> NDArray[np.bool_]:
    """The runs `suggest` names in every key of the table."""
    used = np.zeros(rows.table.length, dtype=bool)
    generic = _plain(others)
    pairs = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
    for stack, cluster in sorted(pairs):
        index = np.flatnonzero(rows.usable & (rows.stack == stack) & (rows.cluster == cluster))
        entry, _ = generic.entry(stack, cluster, generation_of(str(rows.hardware[index][0])))
        used[index[suggest(rows.columns.take(index), entry, count)]] = True
    return used


KEPT_RESIDUALS = 200


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
    fresh = {f"{stack}|{cluster}" for stack, cluster in rows.all_keys()}
    kept = tuple(e for e in (prior.entries if prior else ()) if e.key not in fresh)
    tell(f"fitting {len(rows)} rows of {len(fresh)} stacks and clusters")
    entries = fit_entries(rows, kept, fixed=fixed)
    for table in tables:
        tell(f"cross-validating {table.table.name}")
        step = held_out(table, others_of((*kept, *entries), table), fixed).step_s
        entries = _with_evidence(table, entries, step)
    return Calibration(
        name=name,
        sources=tuple(table.table.name for table in tables) + (prior.sources if prior else ()),
        entries=(*kept, *entries),
        between=between((*kept, *entries)),
    )


def _with_evidence(
    table: Rows, entries: tuple[FittedStack, ...], step: Floats
) -> tuple[FittedStack, ...]:
    """Entries of the table's keys with their errors; `step`: every row predicted held out."""
    mine = {(s, c) for s, c in zip(table.stack.tolist(), table.cluster.tolist(), strict=True)}
    out = []
    for entry in entries:
        if (entry.stack, entry.cluster) not in mine:
            out.append(entry)
            continue
        own = (table.stack == entry.stack) & (table.cluster == entry.cluster) & table.usable
        own = own & np.isfinite(table.step_s) & np.isfinite(step)
        out.append(_errors(entry, table, step, own))
    return tuple(out)


def _errors(entry: FittedStack, table: Rows, step: Floats, own: np.ndarray) -> FittedStack:
    """With in-sample and cross-validated errors; residuals sorted, so that no row shows."""
    if not own.any():
        return entry
    c = table.columns.take(np.flatnonzero(own))
    fitted = times(c, entry.coefficients, entry.nearby).step_s
    inside = 100.0 * (fitted / table.step_s[own] - 1.0)
    across = 100.0 * (step[own] / table.step_s[own] - 1.0)
    picks = np.linspace(0, 1, min(len(inside), KEPT_RESIDUALS))
    return replace(
        entry,
        residuals_pct=tuple(float(v) for v in np.quantile(inside, picks).round(3)),
        counts=counts(c),
        errors_pct={
            "median": float(np.median(np.abs(inside))),
            "p90": float(np.percentile(np.abs(inside), 90)),
            "cv_median": float(np.median(np.abs(across))),
            "cv_p90": float(np.percentile(np.abs(across), 90)),
            "cv_bias": float(np.median(across)),
        },
    )
