"""A report as one page: every run with its figures, and all of them in charts.

The library has worked out every number; the page's scripts choose, sort and draw them.

The matrix of other engines as one HTML file without scripts: verdicts by release and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import fourfold
from fourfold.conformance.verdicts import COLUMNS, WORDS, Verdict
from fourfold.events import OnEvent
from fourfold.page import document
from fourfold.page.run_details import report_command, run_details
from fourfold.result.report import OUTCOMES
from fourfold.result.stored_run import Cell
from fourfold.show.machines import said_of
from fourfold.spec import catalog
from fourfold.spec.layout import AXES, EXPERT_AXES, MODEL_AXES
from fourfold.tables.derive import derive
from fourfold.tables.row import CONFIG, KINDS, PublishedRow, differing
from fourfold.tables.styles import EQUIVALENCE, MPT, SETTINGS, TOPOLOGY, Column
from fourfold.verbs.conformance import Conformance
from fourfold.verbs.report import Report
from fourfold.verbs.requests import ReportRequest


def matrix_page(answer: Conformance) -> str:
    cells = dict(zip(_keys(answer), answer.verdicts, strict=True))
    releases = list(dict.fromkeys(_name(one) for one in answer.verdicts))
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in releases)
    rows = "".join(
        f'<tr><th scope="row">{escape(column)}</th>'
        + "".join(_cell(cells.get((name, column))) for name in releases)
        + "</tr>"
        for column in COLUMNS
        if any((name, column) in cells for name in releases)
    )
    words = "".join(f"<li><b>{word}</b>: {escape(text)}</li>" for word, text in WORDS.items())
    title = "Engines against one process"
    body = f"""<h1>{title}</h1>
<p>Each cell trains a tiny model for three clipped AdamW steps by the engine's own parallel code and
compares loss, every gradient, norm, parameters and copies of weights with a plain fp64 decoder in
one process. The number is the largest relative difference of a gradient.</p>
<ul>{words}</ul>
<div class="wide"><table><thead><tr><th scope="col">axis or option</th>{head}</tr></thead>
<tbody>{rows}</tbody></table></div>
{_details(answer)}
<p>fourfold {fourfold.__version__}</p>"""
    return document.still_document(title=title, style=document.asset("matrix.css"), body=body)


def _name(one: Verdict) -> str:
    return f"{one.engine} {one.version}".strip()


def _keys(answer: Conformance) -> list[tuple[str, str]]:
    pairs = zip(answer.columns, answer.verdicts, strict=True)
    return [(_name(one), column) for column, one in pairs]


def _cell(one: Verdict | None) -> str:
    if one is None:
        return "<td></td>"
    number = "" if one.difference is None else f"<small>{one.difference:.0e}</small>"
    standins = f"<i>{escape(', '.join(one.standins))}</i>" if one.standins else ""
    label = f"<i><code>{escape(one.cell)}</code></i>"
    return f'<td class="{one.verdict}"><b>{one.verdict}</b>{number}{standins}{label}</td>'


def _details(answer: Conformance) -> str:
    """Faults first, then what was refused or blocked, with the reason."""
    parts = []
    titles = {"fault": "Faults", "blocked": "Blocked", "refused": "Refused"}
    for word, title in titles.items():
        lines = [
            f"<li><b>{escape(_name(one))}</b> <code>{escape(one.cell)}</code>: "
            f"{escape('; '.join(_bare(line) for line in said_of(one)))}</li>"
            for one in answer.verdicts
            if one.verdict == word
        ]
        parts += [f"<h2>{title}</h2><ul>{''.join(lines)}</ul>"] if lines else []
    return "\n".join(parts)


def _bare(line: str) -> str:
    return line.partition(": ")[2]


REPORT_SCRIPTS = ("timeline.js", "report_charts.js", "run.js", "report.js")
# Of a record, what the page filters by and draws.
FIELDS = (
    "run_id",
    "repeat",
    "label",
    "hardware",
    "outcome",
    "gpus",
    "nodes",
    *AXES,
    *EXPERT_AXES,
    "experts",
    "virtual_stages",
    "micro_batch",
    "global_batch",
    "seq_len",
    "precision",
    "sharding",
    "recompute",
    "schedule",
    "cp_kind",
    "attention",
    "stack",
    "tag",
    "note",
    "started_at",
    "step_s",
    "low_s",
    "high_s",
    "samples",
    "tokens_s",
    "tokens_s_gpu",
    "tflops_gpu",
    "mfu_pct",
    "hfu_pct",
    "peak_bytes",
    "mem_gb",
    "predicted_s",
    "predicted_low_s",
    "predicted_high_s",
    "predicted_bytes",
    "predicted_limit_bytes",
    "loss",
    "failure",
    "layout",
    "equivalence",
)
_ROW_FIELDS = {*KINDS, "layout", "started_at"}
# Of a row of a table, what a stored run alone says.
_OF_STORED = ("schedule", "cp_kind", "tag")
_NOT_MEASURED: dict[str, Cell] = {
    "repeat": 0,
    "low_s": None,
    "high_s": None,
    "samples": 0,
    "loss": None,
    "predicted_s": None,
    "predicted_low_s": None,
    "predicted_high_s": None,
    "predicted_bytes": None,
    "predicted_limit_bytes": None,
}
# Also shown where rows differ in it and the style has no column of it.
_TELLING = (
    ("Model", "label"),
    ("GPU", "hardware"),
    ("Engine", "stack"),
    ("Sequence", "seq_len"),
    ("Precision", "precision"),
    ("Sharding", "sharding"),
    ("Recompute", "recompute"),
    ("Attention", "attention"),
    ("Offload", "offload"),
)
# Columns of the table by style; of a scaling table, what its rows, columns and cells say.
_SCALING = ("gpus", *MODEL_AXES, "micro_batch", "tflops_gpu", "note")


def write_report(
    request: ReportRequest, path: str, *, browser: bool, force: bool, on_event: OnEvent
) -> Report:
    """The report, also written as a page."""
    document.check_page(path, force=force)
    answer = fourfold.report(request, on_event=on_event)
    text = document.document(
        title=report_title(answer),
        body=document.asset("report.html"),
        data=report_data(answer, command=report_command(request)),
        scripts=REPORT_SCRIPTS,
    )
    document.write_page(path, text, on_event=on_event, browser=browser)
    return answer


def report_title(answer: Report) -> str:
    models = list(dict.fromkeys(r.label or r.model or "custom" for r in answer.records))
    more = f" and {len(models) - 3} more" if len(models) > 3 else ""
    named = f": {', '.join(models[:3])}{more}" if models else ""
    count = len(answer.records)
    return f"{count:,} run{'s' * (count != 1)}{named}"


def report_data(answer: Report, *, command: str = "", title: str = "") -> dict[str, Any]:
    """What the page holds, as plain data."""
    full = [derive(record, answer.convention) for record in answer.records]
    columns = style_columns(answer.style, full)
    environments: list[dict[str, str]] = []
    return {
        "kind": "report",
        "title": title or report_title(answer),
        "version": fourfold.__version__,
        "command": command,
        "style": answer.style,
        "convention": answer.convention,
        "fields": list(FIELDS),
        "outcomes": list(OUTCOMES),
        "rows": [_row(record) for record in full],
        "columns": [{"heading": c.heading, "field": c.field} for c in columns],
        "cells": [[column.write(record) for column in columns] for record in full],
        "values": [[_value(record, column) for column in columns] for record in full],
        "scores": [
            {"basis": s.basis, "text": str(s), "error_pct": s.median_error_pct, "runs": s.runs}
            for s in answer.scores
        ],
        "tables": [
            {"about": about, "headings": table.headings, "rows": [row.cells for row in table.data]}
            for about, table in (answer.tables() if answer.style == "scaling" else ())
        ],
        "details": run_details(answer, environments),
        "environments": environments,
    }


def _row(record: PublishedRow) -> list[Cell]:
    """Return the cells of FIELDS; the memory of its GPU is the limit, where none was predicted."""
    stored, predicted = record.stored, record.predicted
    cells = stored.row() if stored else dict.fromkeys(_OF_STORED, "") | _NOT_MEASURED
    if predicted:
        cells["predicted_s"] = predicted.step_s
        cells["predicted_low_s"] = predicted.step_s_low
        cells["predicted_high_s"] = predicted.step_s_high
        cells["predicted_bytes"] = predicted.peak_bytes
    if not (predicted and predicted.limit_bytes) and record.hardware in catalog.device_names():
        cells["predicted_limit_bytes"] = catalog.device(record.hardware).memory_bytes
    own = {name: getattr(record, name) for name in FIELDS if name in _ROW_FIELDS}
    return [(cells | own)[name] for name in FIELDS]


def _value(record: PublishedRow, column: Column) -> Any:
    """What a column sorts by: the number behind its cell (None: it has none), or the cell."""
    if KINDS.get(column.field, "").startswith(("int", "float")):
        return getattr(record, column.field)
    return column.write(record)


def style_columns(style: str, records: Sequence[PublishedRow]) -> list[Column]:
    """The style's own, after those without which rows that differ would look alike."""
    first: dict[str, Column] = {}
    for column in (*TOPOLOGY, *MPT):  # both styles have a column of most fields
        first.setdefault(column.field, column)
    if style == "mpt":
        own = [column for column in (*MPT, SETTINGS) if column.needed(records)]
    elif style == "topology":
        own = [column for column in TOPOLOGY if column.needed(records)]
    else:
        own = [column for field, column in first.items() if field in _SCALING]
    if EQUIVALENCE not in own and any(record.equivalence for record in records):
        own.insert(len(own) - (own[-1].field == "note"), EQUIVALENCE)
    shown = {column.field for column in own if column.heading != "Size"}
    told = set(differing([records], dict(_TELLING).values())) - shown
    columns = [*(_telling(*one) for one in _TELLING if one[1] in told), *own]
    alike: dict[tuple[str, ...], list[PublishedRow]] = {}
    for one in records:
        said = tuple(c.write(one) for c in columns if c.field in (*CONFIG, "note"))
        alike.setdefault(said, []).append(one)
    more = [n for n in differing(alike.values(), CONFIG) if n not in (*shown, "shape")]
    return [*(first.get(name) or _telling(name, name) for name in more), *columns]


def _telling(heading: str, field: str) -> Column:
    return Column(heading, field, lambda record: str(getattr(record, field) or ""))
