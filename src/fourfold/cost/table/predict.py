"""What each row of a table will take: seconds with an interval, memory, fit, and why.

Rows are grouped by calibration and answered a few thousand at a time, to stay in the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.count.flops import ALIASES, CONVENTIONS, DEFAULT, FlopsQuery
from fourfold.cost.fit.calibration import Calibration, FittedStack, Provenance
from fourfold.cost.fit.interval import provenance
from fourfold.cost.fit.ranges import offsets
from fourfold.cost.memory.peak import GIB, REFUSED, fit_chance
from fourfold.cost.predict import predictions
from fourfold.cost.table.reference import RowTable
from fourfold.cost.table.rows import Rows
from fourfold.spec.catalog import generation_of
from fourfold.spec.engine import engine_of, is_known

CHUNK = 8192
FIELDS = (
    "row_id",
    "step_s",
    "step_s_low",
    "step_s_high",
    "tokens_s_gpu",
    "tflops_gpu",
    "mfu_pct",
    "mem_gb",
    "fits",
    "fit_chance",
    "reason",
    "provenance",
)


@dataclass(frozen=True, slots=True)
class RowPredictions:
    """Arrays as long as the table; NaN where a row cannot be expressed. mem_gb is in GiB, of the
    rank the stack prints; `fits` and its chance look at the fullest stage."""

    step_s: Floats
    low_s: Floats
    high_s: Floats
    tokens_s_gpu: Floats
    tflops_gpu: Floats
    mfu_pct: Floats
    mem_gb: Floats
    worst_gb: Floats
    fits: NDArray[np.bool_]
    fit_chance: Floats
    reasons: list[str]
    provenance: list[str]


# Coefficients of a row, and why they are not its machine's own.
Priced = tuple[FittedStack, str]


def predict(
    rows: Rows, calibration: Calibration, priced: Sequence[Priced | None] = ()
) -> RowPredictions:
    """Predict every usable row; `priced`: by these coefficients, row by row, in place of the
    calibration's entry of its key."""
    n = rows.table.length
    out = {
        name: np.full(n, np.nan)
        for name in ("step", "low", "high", "mem", "worst", "chance", "beyond")
    }
    unstated = _unstated(rows.table)
    reasons, words = list(rows.reasons), [""] * n
    for index, entry, why in entries_of(rows, calibration, priced):
        for start in range(0, len(index), CHUNK):
            part = index[start : start + CHUNK]
            for i, text, word in zip(part, *_answer(rows, part, entry, out), strict=True):
                reasons[i] = "; ".join(said for said in (reasons[i], why, text) if said)
                words[i] = word
    _finish_reasons(rows, out, reasons)
    words = [word if step == step else "" for word, step in zip(words, out["step"], strict=True)]
    tokens = rows.columns.batch * rows.columns.seq / (rows.columns.gpus * out["step"])
    tflops, mfu = _rates(rows, tokens)
    chance = np.where(unstated, np.maximum(out["chance"], REFUSED), out["chance"])
    return RowPredictions(
        out["step"],
        out["low"],
        out["high"],
        tokens,
        tflops,
        mfu,
        out["mem"],
        out["worst"],
        np.nan_to_num(chance) >= 0.5,
        chance,
        reasons,
        words,
    )


def _unstated(table: RowTable) -> NDArray[np.bool_]:
    """Rows that may need far less than what is assumed: layout, micro batch or recompute is not
    stated, or "selective" is, of an engine whose meaning of it is unknown."""
    names = ("tp", "pp", "mbs", "act_ckpt")
    blank = np.array([[cell == "" for cell in table.column(name)] for name in names], dtype=bool)
    kinds = zip(table.column("act_ckpt"), table.column("stack"), strict=True)
    unknown = [kind == "selective" and not is_known(stack) for kind, stack in kinds]
    return blank.any(axis=0) | np.array(unknown, dtype=bool)


def entries_of(
    rows: Rows, calibration: Calibration, priced: Sequence[Priced | None] = ()
) -> Iterator[tuple[NDArray[np.intp], FittedStack, str]]:
    """Yield (rows, entry, reason) of rows with the same coefficients."""
    groups: dict[tuple[object, ...], list[int]] = {}
    keys = zip(
        rows.measured_as.tolist(), rows.cluster.tolist(), rows.hardware.tolist(), strict=True
    )
    for i, key in enumerate(keys):
        if rows.usable[i]:
            known = priced[i] if priced else None
            groups.setdefault((id(known[0]), known[1]) if known else key, []).append(i)
    for index in groups.values():
        first = index[0]
        known = priced[first] if priced else None
        if known is None:
            generation = generation_of(str(rows.hardware[first]))
            known = calibration.entry(rows.measured_as[first], str(rows.cluster[first]), generation)
        yield np.array(index), *known


def _answer(
    rows: Rows, part: NDArray[np.intp], entry: FittedStack, out: dict[str, Floats]
) -> tuple[list[str], list[Provenance]]:
    """Fills in these rows; returns what to say of their networks, and what they rest on."""
    c = rows.columns.take(part)
    found = predictions(c, entry)
    room, usual = found.room, engine_of(entry.measured_as).habits
    printed = room.first_bytes if usual.reports_rank0 else room.worst_bytes
    printed = room.last_bytes if usual.reports_last else printed
    out["step"][part], out["low"][part], out["high"][part] = found.step_s, found.low_s, found.high_s
    out["mem"][part] = printed / GIB
    out["worst"][part] = room.worst_bytes / GIB
    out["chance"][part] = fit_chance(c, entry)
    away = offsets(c, entry.ranges).values()
    out["beyond"][part] = sum((np.abs(one) for one in away), np.zeros(len(c)))
    return found.interval.open_network(), provenance(c, entry)


def _finish_reasons(rows: Rows, out: dict[str, Floats], reasons: list[str]) -> None:
    far = np.nan_to_num(out["beyond"]) > 1.0
    wrong = rows.usable & ~np.isfinite(out["step"])
    for i in np.flatnonzero(far):
        note = "outside the calibrated range: wider interval"
        reasons[i] = f"{reasons[i]}; {note}" if reasons[i] else note
    for i in np.flatnonzero(wrong):
        reasons[i] = "not expressible: the numbers are out of any range"
        for name in out:
            out[name][i] = np.nan


def _rates(rows: Rows, tokens: Floats) -> tuple[Floats, Floats]:
    """(TFLOPs per GPU, MFU percent) in the row's own convention, the default when blank."""
    tflops = np.full(len(tokens), np.nan)
    rules = np.array(rows.table.column("flop_rule"), dtype=str)
    learned = np.array([f in ("mpt", "gpt") for f in rows.table.column("family")], dtype=float)
    for rule in np.unique(rules):
        here = np.flatnonzero(rules == rule)
        query = FlopsQuery.of_columns(rows.columns.take(here), learned_positions=learned[here])
        name = ALIASES.get(str(rule), str(rule))
        flops = CONVENTIONS.get(name, CONVENTIONS[DEFAULT]).count(query).printed
        tflops[here] = flops * tokens[here] / 1e12
    return tflops, 100.0 * tflops * 1e12 / rows.columns.peak_low
