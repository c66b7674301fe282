"""A submission: one line for each task, as `fourfold predict` writes them.

`step_s` is needed; blank where an entrant declines a task. An 80% interval, memory and the chance
to fit are welcome. Anything else that is wrong is an error that names its line.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold import files
from fourfold.cost.columns import Floats
from fourfold.cost.table.predict import RowPredictions
from fourfold.errors import UserError
from fourfold.escape import csv_text
from fourfold.spec import check, codec

NUMBERS = ("step_s", "step_s_low", "step_s_high", "mem_gb", "fit_chance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Who answered, how, and what of the season was known to them."""

    name: str
    by: str
    version: str
    how: str
    saw: str
    url: str = ""


def read_card(path: Path) -> Card:
    try:
        return codec.decode(Card, codec.parse_toml(files.read_text(path, field="card")))
    except UserError as error:
        raise error.inside(str(path)) from None


def read(path: str | Path, ids: list[str]) -> RowPredictions:
    """In the order of the tasks."""
    text = files.read_text(path, field="submission")
    reader = csv.DictReader(text.splitlines())
    heading = reader.fieldnames or []
    for name in ("row_id", "step_s"):
        check.that(name in heading, "submission", str(path), f"lacks the column {name}")
    known = {one: place for place, one in enumerate(ids)}
    found = {name: np.full(len(ids), np.nan) for name in NUMBERS}
    seen: set[str] = set()
    for line, row in enumerate(reader, 2):
        where = f"{path}, line {line}"
        name = row["row_id"] or ""
        if name not in known:
            raise UserError("is no task of this season", field="row_id", value=name, source=where)
        if name in seen:
            raise UserError("is answered twice", field="row_id", value=name, source=where)
        seen.add(name)
        for column in NUMBERS:
            found[column][known[name]] = _number(row.get(column) or "", column, where)
        _check_order({column: found[column][known[name]] for column in NUMBERS}, where)
    lacking = [one for one in ids if one not in seen]
    if lacking:
        named = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        rule = f"has no line for {len(lacking)} of {len(ids)} tasks: {named}"
        hint = "answer each task; leave step_s blank to decline one"
        raise UserError(rule, field="submission", value=str(path), hint=hint)
    return predictions_of(**found)


def _number(text: str, column: str, where: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    top = 1.0 if column == "fit_chance" else math.inf
    least_ok = value >= 0.0 if column == "fit_chance" else value > 0.0
    if not (least_ok and value <= top and math.isfinite(value)):
        rule = "must be from 0 to 1" if top == 1.0 else "must be a finite number above 0"
        hint = "leave it blank to decline" if column == "step_s" else "leave it blank if not known"
        raise UserError(rule, field=column, value=text, hint=hint, source=where)
    return value


def _check_order(one: dict[str, float], where: str) -> None:
    low, middle, high = (one[name] for name in ("step_s_low", "step_s", "step_s_high"))
    if math.isnan(low) != math.isnan(high):
        raise UserError("needs both ends of the interval", field="step_s_low", source=where)
    if low == low and not (low <= middle <= high):
        rule = f"must lie from step_s_low={low} to step_s_high={high}"
        raise UserError(rule, field="step_s", value=middle, source=where)


def predictions_of(
    step_s: Floats,
    step_s_low: Floats | None = None,
    step_s_high: Floats | None = None,
    mem_gb: Floats | None = None,
    fit_chance: Floats | None = None,
) -> RowPredictions:
    blank = np.full(len(step_s), np.nan)
    low, high, memory, chance = (
        blank if one is None else one for one in (step_s_low, step_s_high, mem_gb, fit_chance)
    )
    return RowPredictions(
        step_s, low, high, blank, blank, blank, memory, blank, np.nan_to_num(chance) >= 0.5, chance,
        [""] * len(step_s), [""] * len(step_s),
    )  # fmt: skip


def written(ids: list[str], said: RowPredictions) -> str:
    columns = (said.step_s, said.low_s, said.high_s, said.mem_gb, said.fit_chance)
    lines = [
        [name, *("" if value != value else f"{value:.6g}" for value in values)]
        for name, *values in zip(ids, *(column.tolist() for column in columns), strict=True)
    ]
    return csv_text([["row_id", *NUMBERS], *lines])
