"""Any table of runs, one a line, by a mapping file that says which column is which field.

[columns]                       # field of the reference schema = heading of the table
tp = "tp_size"
step_s = { column = "iter_ms", unit = "ms" }
[set]                           # the same for every row
model = "llama-3.1-8b"
[values.hardware]               # the table's word = ours
A100 = "a100-80gb"
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import UserError, nearest
from fourfold.logs.nested import number
from fourfold.logs.row import COLUMNS, NEEDED, Row, require_column, text_of
from fourfold.spec import catalog, check, texts

_NAMES = catalog.data("columns.toml")
_UNITS = {
    "step_s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0},
    "mem_gb": {"GiB": 1.0, "GB": 1.0, "MiB": 1 / 1024, "MB": 1 / 1024, "bytes": 2.0**-30},
    "tokens_s_gpu": {"1": 1.0, "k": 1e3},
}
_ENDS = {word: end for end, said in _NAMES["ends"].items() for word in said.split()}
# Innermost pairs alone: without an end, one bracket after the other would look for it.
_BRACKETS = re.compile(r"[\[(][^\[\]()]*[\])]")


@functools.lru_cache(maxsize=4096)
def plain_heading(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    column: str
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """What a mapping file says."""

    columns: dict[str, Mapped] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str]] = field(default_factory=dict)


def read_mapping(text: str) -> ColumnMap:
    data = texts.parse_toml(text)
    for name in data:
        if name not in ("columns", "set", "values"):
            hint = nearest(name, ("columns", "set", "values"))
            raise UserError("unknown table", field=name, hint=hint)
    columns = {}
    for name, said in _table(data, "columns").items():
        require_column(name, field="columns")
        said = {"column": said} if isinstance(said, str) else said
        if not isinstance(said, dict) or not isinstance(said.get("column"), str):
            raise UserError(
                "must name a heading",
                field=f"columns.{name}",
                value=said,
                hint=f'write {name} = "its heading"',
            )
        unit = str(said.get("unit", ""))
        known = _UNITS.get(name, {})
        if unit and unit not in known:
            raise UserError(
                "unknown unit",
                field=f"columns.{name}.unit",
                value=unit,
                hint=f"use one of {', '.join(known) or 'none'}",
            )
        columns[name] = Mapped(column=said["column"], unit=unit)
    fixed = {require_column(k, field="set"): text_of(v) for k, v in _table(data, "set").items()}
    values = {
        require_column(name, field="values"): {
            str(k).strip().lower(): text_of(v) for k, v in _table(said, "").items()
        }
        for name, said in _table(data, "values").items()
    }
    return ColumnMap(columns=columns, fixed=fixed, values=values)


def _table(data: Any, name: str) -> Mapping[str, Any]:
    found = data.get(name, {}) if name else data
    check.that(isinstance(found, dict), name or "values", found, "must be a table")
    return found


def propose(headings: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(field -> heading, headings that nobody understands), from the headings alone."""
    known = {word: name for name, words in _NAMES["headings"].items() for word in words.split()}
    known |= {plain_heading(name): name for name in COLUMNS}
    found: dict[str, str] = {}
    strange = []
    for heading in headings:
        bare = plain_heading(_BRACKETS.sub("", heading))
        name = known.get(plain_heading(heading)) or known.get(bare)
        if name is None or name in found:
            strange.append(heading)
        else:
            found[name] = heading
    return found, strange


def proposal(headings: Sequence[str]) -> str:
    """A mapping file to start from; it asks for what the headings do not say."""
    found, strange = propose(headings)
    lines = ["# Mapping of a table of runs, for 'fourfold collect TABLE.csv --map THIS.toml'."]
    lines.append("[columns]  # field = heading of the table")
    for name in (name for name in COLUMNS if name in found):
        unit = _unit_of(name, found[name])
        quoted = json.dumps(found[name], ensure_ascii=False)
        lines.append(
            f'{name} = {{ column = {quoted}, unit = "{unit}" }}' if unit else f"{name} = {quoted}"
        )
    if strange:
        lines.append(f"# not understood: {', '.join(strange)}"[:400])
    lines += ["", "[set]  # the same for every row; please fill in what no column says"]
    missing = [name for name in (*NEEDED, "cp", "cluster") if name not in found]
    shape = ("n_layers", "d_model", "n_heads", "vocab")
    if "model" not in found and any(name in missing for name in shape):
        lines.append('# model = "llama-3.1-8b"  # a known model fills in its sizes')
    lines += [f"# {name} = {json.dumps(_NAMES['examples'].get(name, 1))}" for name in missing]
    if "hardware" in found:
        lines += [
            "",
            "[values.hardware]  # the table's word = our GPU ('fourfold clusters --gpu all')",
        ]
        lines.append('# A100 = "a100-80gb"')
    return "\n".join([*lines, ""])


def _unit_of(name: str, heading: str) -> str:
    """'iter_ms' and 'Step time (ms)' say their unit."""
    words = re.split(r"[^a-z]+", heading.lower())
    if name == "step_s":
        return next((unit for unit in ("ms", "us", "min") if unit in words), "")
    if name == "mem_gb":
        return next((unit for unit in ("MiB", "MB", "bytes") if unit.lower() in words), "")
    return ""


def mapped_row(cells: Mapping[str, str], mapping: ColumnMap) -> Row:
    row = Row()
    for name, said in mapping.columns.items():
        text = cells.get(said.column, "").strip()
        text = mapping.values.get(name, {}).get(text.lower(), text)
        scale = _UNITS.get(name, {}).get(said.unit, 1.0)
        if text and scale != 1.0:
            value = number(text)
            text = text_of(value * scale) if value is not None else text
        if name == "status":
            _end(row, text)
        elif text.lower() == "oom" and name in ("step_s", "tokens_s_gpu", "tflops_gpu", "mem_gb"):
            row.cells["outcome"] = "oom"
        elif text:
            row.cells[name] = text_of(text)
    row.fill(**mapping.fixed, engine="table")
    if row["step_s"] or row["tokens_s_gpu"]:
        row.fill(steps=1, step_rule="value in the table")
    return row


def _end(row: Row, text: str) -> None:
    end = _ENDS.get(plain_heading(text))
    if end is not None:
        row.cells["outcome"] = end
    elif text:
        row.notes.append(f"status is not understood: {text[:40]}")


def require_headings(mapping: ColumnMap, headings: Sequence[str]) -> None:
    for name, said in mapping.columns.items():
        if said.column not in headings:
            rule = "is not a heading of the table"
            hint = nearest(said.column, headings)
            raise UserError(rule, field=f"columns.{name}", value=said.column, hint=hint)
