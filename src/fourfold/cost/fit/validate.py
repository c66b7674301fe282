"""Accuracy on rows that a fit never saw: cross-validated, source left out, few rows.

Everything is refitted without the rows that are then predicted; the intervals come from residuals
of other folds, never from the rows they are to cover. Folds go by layout, so that no row is
predicted by its twin: sha256 of the values as the CSV has them, joined by '|', modulo 5, of the
columns that were varied by hand in a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.fit.fit import fit_entries, sample
from fourfold.cost.fit.suggest import suggest
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import RowTable
from fourfold.cost.table.rows import Rows
from fourfold.spec.catalog import generation_of
from fourfold.spec.layout import MODEL_AXES

FOLDS = 5
BY_TABLE: dict[str, tuple[str, ...]] = {
    "mpt": ("model", "hardware"),
    "bloom": ("d_model", "n_heads"),
    "par4d": ("hardware", *MODEL_AXES, "seq_len"),
    "nanotron": ("model", "tp", "pp"),
    "aleph": ("tp", "pp", "seq_len", "n_gpus"),
    "newer": ("source", "model", "hardware", "precision", "n_gpus"),
}
OTHER = ("model", "n_layers", "d_model", "n_heads", "hardware", "seq_len", *MODEL_AXES)


def folds(table: RowTable) -> NDArray[np.int64]:
    """Fold of every row, 0..4."""
    names = BY_TABLE.get(table.name, OTHER)
    values = zip(*(table.column(name) for name in names), strict=True)
    return np.array([_fold("|".join(row)) for row in values], dtype=np.int64)


def _fold(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % FOLDS


FEW = 10
SAFETY = 1.15  # held-out residuals of a few folds understate those of the next
KIN = 12.0  # rows that the common spread counts for in a key's own
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


def held_out(rows: Rows, others: tuple[FittedStack, ...]) -> RowPredictions:
    """Every row predicted by a fit on the other folds (and on the other tables)."""
    fold = folds(rows.table)
    made = [fit_entries(sample([only(rows, fold != f)]), others) for f in range(FOLDS)]
    first = [predict(only(rows, fold == f), _plain(others, made[f])) for f in range(FOLDS)]
    step = merged(first, fold)
    spread = [with_spread(made[f], rows, step, fold != f) for f in range(FOLDS)]
    answers = [predict(only(rows, fold == f), _plain(others, spread[f])) for f in range(FOLDS)]
    return _merge_all(answers, fold, rows)


def _plain(others: tuple[FittedStack, ...], made: tuple[FittedStack, ...]) -> Calibration:
    low, high = common_spread((*others, *made))
    return Calibration(
        name="held out", sources=(), entries=(*others, *made), generic_low=low, generic_high=high
    )


def common_spread(entries: tuple[FittedStack, ...]) -> tuple[float, float]:
    """Interval of a key nobody measured: twice what measured keys show."""
    if not entries:
        return -0.25, 0.25
    low = float(np.median([entry.low for entry in entries]))
    high = float(np.median([entry.high for entry in entries]))
    return 2.0 * low, 2.0 * high


def merged(parts: list[RowPredictions], fold: NDArray[np.int64]) -> Floats:
    """Step times, each row from its own fold."""
    return np.choose(fold, [part.step_s for part in parts])


def _merge_all(parts: list[RowPredictions], fold: NDArray[np.int64], rows: Rows) -> RowPredictions:
    names = ("step_s", "low_s", "high_s", "tokens_s_gpu", "tflops_gpu", "mfu_pct", "mem_gb",
             "worst_gb", "fits", "tight")  # fmt: skip
    chosen: dict[str, Any] = {
        name: np.choose(fold, [getattr(part, name) for part in parts]) for name in names
    }
    return RowPredictions(**chosen, reasons=rows.reasons)


def with_spread(
    entries: tuple[FittedStack, ...], rows: Rows, step: Floats, use: NDArray[np.bool_]
) -> tuple[FittedStack, ...]:
    """Entries with `low`, `high` from held-out residuals of the rows in `use`.

    A key with few rows borrows from all rows of the table.
    """
    timed = rows.usable & use & np.isfinite(rows.step_s) & np.isfinite(step)
    log = np.full(len(step), np.nan)
    log[timed] = np.log(rows.step_s[timed] / step[timed])
    if not timed.any():
        return entries
    pool = np.quantile(log[timed], [0.1, 0.9])
    out = []
    for entry in entries:
        own = timed & (rows.stack == entry.stack) & (rows.cluster == entry.cluster)
        n = float(own.sum())
        mine = np.quantile(log[own], [0.1, 0.9]) if n >= 4 else pool
        weight = n / (n + KIN)
        low, high = SAFETY * (weight * mine + (1.0 - weight) * pool)
        out.append(replace(entry, low=float(low), high=float(high)))
    return tuple(out)


def left_out(rows: Rows, others: tuple[FittedStack, ...]) -> RowPredictions:
    """Every row predicted from the other tables alone."""
    return predict(rows, _plain(others, ()))


def few_shot(
    rows: Rows, others: tuple[FittedStack, ...], count: int = FEW
) -> tuple[RowPredictions, NDArray[np.bool_]]:
    """(predictions, rows not used) after a fit on `count` runs per key, picked without results."""
    used = picked(rows, others, count)
    entries = fit_entries(sample([only(rows, used)]), others)
    return predict(rows, _plain(others, entries)), ~used


def picked(rows: Rows, others: tuple[FittedStack, ...], count: int) -> NDArray[np.bool_]:
    """The runs `suggest` names in every key of the table."""
    used = np.zeros(rows.table.length, dtype=bool)
    generic = _plain(others, ())
    pairs = set(zip(rows.stack.tolist(), rows.cluster.tolist(), strict=True))
    for stack, cluster in sorted(pairs):
        index = np.flatnonzero(rows.usable & (rows.stack == stack) & (rows.cluster == cluster))
        entry, _ = generic.entry(stack, cluster, generation_of(str(rows.hardware[index][0])))
        used[index[suggest(rows.columns.take(index), entry, count)]] = True
    return used
