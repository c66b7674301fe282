"""What a calibration is worth: fits tables and stores residuals, rows, cross-validated errors.

`calibrate` is what `fourfold fit` does: entries, then everything again with rows held out, so that
the file says how wrong it is on layouts it never saw and how wide its intervals must be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.fit.calibration import Calibration, FittedStack, blend
from fourfold.cost.fit.fit import Sample, fit_entries, sample
from fourfold.cost.fit.interval import counts
from fourfold.cost.fit.validate import held_out, others_of, with_spread
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.rows import Rows

KEPT_RESIDUALS = 200


def calibrate(
    tables: list[Rows], *, name: str, prior: Calibration | None, tell: Callable[[str], None]
) -> Calibration:
    """Fit all keys of the tables; entries of the prior stay where the tables say nothing new."""
    rows = sample(tables)
    fresh = {f"{stack}|{cluster}" for stack, cluster in rows.all_keys()}
    kept = tuple(e for e in (prior.entries if prior else ()) if e.key not in fresh)
    tell(f"fitting {len(rows)} rows of {len(fresh)} stacks and clusters")
    entries = fit_entries(rows, kept)
    for table in tables:
        entries = _with_evidence(table, entries, kept, tell)
    low, high = _stranger_spread(rows, (*kept, *entries))
    return Calibration(
        name=name,
        sources=tuple(table.table.name for table in tables) + (prior.sources if prior else ()),
        entries=(*kept, *entries),
        generic_low=low,
        generic_high=high,
    )


def _with_evidence(
    table: Rows,
    entries: tuple[FittedStack, ...],
    kept: tuple[FittedStack, ...],
    tell: Callable[[str], None],
) -> tuple[FittedStack, ...]:
    tell(f"cross-validating {table.table.name}")
    mine = {(s, c) for s, c in zip(table.stack.tolist(), table.cluster.tolist(), strict=True)}
    others = others_of((*kept, *entries), table)
    step = held_out(table, others).step_s
    everything = np.ones(table.table.length, dtype=bool)
    here = tuple(e for e in entries if (e.stack, e.cluster) in mine)
    spread = {e.key: e for e in with_spread(here, table, step, everything)}
    out = []
    for entry in entries:
        if entry.key not in spread:
            out.append(entry)
            continue
        own = (table.stack == entry.stack) & (table.cluster == entry.cluster) & table.usable
        own = own & np.isfinite(table.step_s) & np.isfinite(step)
        out.append(_errors(spread[entry.key], table, step, own))
    return tuple(out)


def _errors(entry: FittedStack, table: Rows, step: Floats, own: np.ndarray) -> FittedStack:
    """With in-sample and cross-validated errors; residuals sorted, so that no row shows."""
    if not own.any():
        return entry
    fitted = estimate(table.columns.take(np.flatnonzero(own)), entry.coefficients).step_s
    inside = 100.0 * (fitted / table.step_s[own] - 1.0)
    across = 100.0 * (step[own] / table.step_s[own] - 1.0)
    picks = np.linspace(0, 1, min(len(inside), KEPT_RESIDUALS))
    return replace(
        entry,
        residuals_pct=tuple(float(v) for v in np.quantile(inside, picks).round(3)),
        counts=counts(table.columns.take(np.flatnonzero(own))),
        errors_pct={
            "median": float(np.median(np.abs(inside))),
            "p90": float(np.percentile(np.abs(inside), 90)),
            "cv_median": float(np.median(np.abs(across))),
            "cv_p90": float(np.percentile(np.abs(across), 90)),
            "cv_bias": float(np.median(across)),
        },
    )


def _stranger_spread(rows: Sample, entries: tuple[FittedStack, ...]) -> tuple[float, float]:
    """Interval (log) of a key nobody measured: each key predicted from the others alone.

    Every key counts the same, however many rows it has.
    """
    lows, highs = [], []
    for key in rows.all_keys():
        part = rows.take(rows.where(key))
        timed = np.flatnonzero(np.isfinite(part.step_s))
        own = next(e for e in entries if (e.stack, e.cluster) == key)
        if len(timed) < 4:
            continue
        guess = blend(entries, stack=key[0], cluster=key[1], generation=own.generation)
        step = estimate(part.columns.take(timed), guess.coefficients).step_s
        log = np.log(part.step_s[timed] / step)
        lows.append(np.quantile(log, 0.1))
        highs.append(np.quantile(log, 0.9))
    if not lows:
        return -0.25, 0.25
    return min(-0.1, float(np.mean(lows))), max(0.1, float(np.mean(highs)))
