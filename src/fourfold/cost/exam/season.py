"""A season of the exam: tasks.csv has runs without results, answers.csv what was measured, and
entrants/ a submission and a card of each entrant.

Tasks and answers are made of tables in the reference schema. Of a note only a setting stays; who
knows the table would find its rows by the rest.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fourfold import files
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.folds import Bools, keys_of
from fourfold.cost.table.reference import SCHEMA, RowTable, read_table
from fourfold.cost.table.rows import Rows, parse
from fourfold.errors import UserError
from fourfold.escape import csv_text

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


def make(tables: Sequence[str], shipped: Calibration) -> dict[str, str]:
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


def read(folder: str) -> Season:
    base = Path(folder)
    if not (base / "tasks.csv").is_file():
        hint = "name a folder with tasks.csv and answers.csv, such as exam/season1 of the source"
        raise UserError("is no season of an exam", field="folder", value=folder, hint=hint)
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
