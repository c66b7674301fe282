"""The exam. A season: tasks.csv has runs without results, answers.csv what was measured, and
entrants/ a submission and a card of each entrant.

Tasks and answers are made of tables in the reference schema. Of a note only a setting stays; who
knows the table would find its rows by the rest. fourfold sits it in two ways, with two baselines.

A submission: one line for each task, as `fourfold predict` writes them.

`step_s` is needed; blank where an entrant declines a task. An 80% interval, memory and the chance
to fit are welcome. Anything else that is wrong is an error that names its line.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fourfold import files
from fourfold.cost.columns import Floats
from fourfold.cost.count.flops import FlopsQuery
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.folds import Bools, keys_of
from fourfold.cost.fit.validate import others_of
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import SCHEMA, RowTable, read_table
from fourfold.cost.table.rows import Rows, parse
from fourfold.errors import UserError, inside
from fourfold.escape import csv_text
from fourfold.spec import check, codec, texts
from fourfold.units import plain_float

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
    with inside(path):
        return codec.decode(Card, texts.parse_toml(files.read_text(path, field="card")))


def read_submission(path: str | Path, ids: list[str]) -> RowPredictions:
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
    if np.isnan(found["step_s"]).all():
        rule = "answers no task: step_s is blank in every line"
        raise UserError(rule, field="submission", value=str(path))
    return predictions_of(**found)


def _number(text: str, column: str, where: str) -> float:
    if not text.strip():
        return math.nan
    value = plain_float(text)
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


RESULTS = ("step_s", "tokens_s_gpu", "tflops_gpu", "flop_rule", "mem_gb", "status")
ANSWERS = ("row_id", "step_s", "mem_gb", "status", "seen")
_SETTING = re.compile(r"\b(pure|default)\b")


@dataclass(frozen=True, slots=True)
class Season:
    """`rows` have what was measured; `seen`: those that the shipped calibration was fitted to."""

    name: str
    rows: Rows
    seen: Bools

    @property
    def ids(self) -> list[str]:
        return self.rows.table.column("row_id")

    def of_source(self, name: str) -> Bools:
        return np.array([one == name for one in self.rows.table.column("source")], dtype=bool)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rows.table.column("source")))


def make_season(tables: Sequence[str], shipped: Calibration) -> dict[str, str]:
    """(name of a file -> its text) of a season that asks about the rows of these tables."""
    columns = [name for name in SCHEMA if name not in RESULTS]
    tasks, answers = [columns], [list(ANSWERS)]
    fitted = {entry.key for entry in shipped.entries if entry.rows_time}
    for path in tables:
        rows = parse(read_table(path))
        seen = [key in fitted for key in keys_of(rows).tolist()]
        for i in np.flatnonzero(rows.usable).tolist():
            cells = {name: rows.table.column(name)[i] for name in SCHEMA}
            setting = _SETTING.search(cells["note"])
            cells["note"] = setting[0] if setting else ""
            tasks.append([cells[name] for name in columns])
            told = [cells[name] for name in ANSWERS if name != "seen"]
            answers.append([*told, str(int(seen[i]))])
    return {"tasks.csv": csv_text(tasks), "answers.csv": csv_text(answers)}


def read_season(folder: str) -> Season:
    base = Path(folder)
    if not (base / "tasks.csv").is_file():
        hint = "name a season, a folder with tasks.csv and answers.csv, such as exam/season1"
        raise UserError("has no tasks.csv", field="folder", value=folder, hint=hint)
    tasks = read_table(base / "tasks.csv")
    text = files.read_text(base / "answers.csv", field="answers")
    answers = {row["row_id"]: row for row in csv.DictReader(text.splitlines())}
    ids = tasks.column("row_id")
    lacking = [one for one in ids if one not in answers]
    if lacking or len(set(ids)) != len(ids):
        rule = f"has no answer for {lacking[0]}" if lacking else "names a task twice"
        raise UserError(rule, field="folder", value=folder)
    filled = {name: [answers[one][name] for one in ids] for name in ("step_s", "mem_gb", "status")}
    table = RowTable(base.name, tasks.texts | filled, tasks.length)
    seen = np.array([answers[one]["seen"] == "1" for one in ids], dtype=bool)
    return Season(base.name, parse(table), seen)


# Of the peak: what training of dense models is usually said to reach on A100 and H100.
USUAL_MFU = 0.40
# Guides give directions; these sizes are ours. More for each doubling of tensor parallelism in a
# host, times as much across hosts, less for each doubling of the micro batch up to 8.
PER_TP_DOUBLING, ACROSS_HOSTS, PER_MICRO_DOUBLING = 0.05, 2.0, 0.05
STATE_BYTES = 18.0  # bf16 weights, fp32 gradients, fp32 weights and two moments
LAYER_BYTES = 34.0  # of a layer's activations, times sequence, micro batch and hidden size
USED_OF_MEMORY = 0.9


def season_left_out(rows: Rows, shipped: Calibration) -> RowPredictions:
    """By the calibrations of other engines and machines alone."""
    return predict(rows, replace(shipped, entries=others_of(shipped.entries, rows)))


def constant_mfu(rows: Rows) -> RowPredictions:
    """Six FLOPs per parameter and token at 40% of the peak, whatever the layout."""
    return predictions_of(_six_n(rows) / USUAL_MFU)


def rule_of_thumb(rows: Rows) -> RowPredictions:
    """What guides say in words, as numbers: recompute costs a third, a pipeline its bubble
    (stages - 1) / (virtual stages x micro batches), tensor parallelism some percent within a host
    and twice the time across hosts, a larger micro batch runs faster; memory is states, sharded as
    ZeRO does, and activations."""
    c = rows.columns
    stretch = 1.0 + c.full_ckpt / 3.0
    stretch = stretch * (1.0 + (c.pp - 1.0) / (c.vpp * c.micros))
    stretch = stretch * (1.0 + PER_TP_DOUBLING * np.log2(c.tp))
    stretch = np.where(c.tp > c.node, ACROSS_HOSTS, 1.0) * stretch
    stretch = stretch / (1.0 + PER_MICRO_DOUBLING * np.log2(np.minimum(c.micro, 8.0)))
    held = _params(rows) / (c.tp * c.pp)
    shards = c.gpus / (c.tp * c.pp * c.cp)
    weights, moments = (np.where(c.zero >= stage, shards, 1.0) for stage in (3, 1))
    state = held * ((STATE_BYTES - 12.0) / weights + 12.0 / moments)
    kept = np.where(c.full_ckpt > 0, 2.0, LAYER_BYTES)
    layers = c.layers * np.minimum(c.micros, c.pp) / c.pp
    tokens = c.seq * c.micro / c.cp
    need = state + kept * tokens * c.hidden * layers / c.tp
    fits = need < USED_OF_MEMORY * c.capacity
    return predictions_of(
        _six_n(rows) / USUAL_MFU * stretch,
        mem_gb=need / 2**30,
        fit_chance=np.where(fits, 0.95, 0.05),
    )


def _params(rows: Rows) -> Floats:
    return np.asarray(FlopsQuery.of_columns(rows.columns, learned_positions=0.0).params)


def _six_n(rows: Rows) -> Floats:
    c = rows.columns
    return 6.0 * _params(rows) * c.batch * c.seq / (c.gpus * c.peak_low)


_OWN = {"by": "this project", "url": "docs/cost-model.md"}
# Name of the files -> card, answers.
ENTRANTS: dict[str, tuple[dict[str, str], Callable[[Rows, Calibration], RowPredictions]]] = {
    "fourfold": (
        {"name": "fourfold, as shipped", "how": "fourfold predict, shipped calibration",
         "saw": "all rows of this season: open book", **_OWN},
        predict,
    ),
    "fourfold-left-out": (
        {"name": "fourfold, season left out",
         "how": "the shipped calibration without the engines and machines of this season",
         "saw": "no row of it, but for general constants that were fitted to all", **_OWN},
        season_left_out,
    ),
    "constant-mfu": (
        {"name": "constant MFU", "how": "6 x parameters x tokens at 40% of the peak",
         "saw": "nothing", "by": "baseline"},
        lambda rows, _: constant_mfu(rows),
    ),
    "rule-of-thumb": (
        {"name": "rules of thumb",
         "how": "40% of the peak; + 1/3 for full recompute, bubble (p - 1) / (v m), 5% for each "
         "doubling of tp, twice the time across hosts, 5% less for each doubling of the micro "
         "batch; 18 bytes per parameter and 34 s b h per "
         "layer (NVIDIA's and torchtitan's guides)",
         "saw": "no row, but the rule of the micro batch was added after a look at its ranks",
         "by": "baseline",
         "url": "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-guide.html"},
        lambda rows, _: rule_of_thumb(rows),
    ),
}  # fmt: skip


def card_of(name: str, version: str) -> Card:
    about, _ = ENTRANTS[name]
    return Card(**{"version": version, **about})
