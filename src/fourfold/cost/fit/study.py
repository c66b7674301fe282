"""Everything `fourfold score` reports: tables as fitted, held out, left out, from few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.fit.accuracy import Score, score
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.validate import few_shot, fit_tables, held_out, left_out, others_of
from fourfold.cost.table.predict import Predictions, predict
from fourfold.cost.table.rows import Rows


@dataclass(frozen=True, slots=True)
class Result:
    """One table scored in one way; `free` is the most free coefficients, time + memory."""

    how: str
    score: Score
    free: str
    rows: Rows
    answers: Predictions
    within: NDArray[np.bool_]


def study(
    tables: list[Rows],
    calibration: Calibration,
    *,
    asked: list[str],
    tell: Callable[[str], None],
) -> list[Result]:
    """Score every table with the calibration as it is, and in the ways asked for."""
    results = [_as_is(rows, calibration) for rows in tables]
    if not asked:
        return results
    tell("fitting all tables together")
    entries = fit_tables(tables)
    for how in asked:
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
    return results


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
