"""report, lint: results as people publish them, and mistakes in published tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.cost.count.flops import convention
from fourfold.cost.memory.peak import GIB
from fourfold.errors import UserError, nearest
from fourfold.events import Event, OnEvent, ignore
from fourfold.result.files.store import Stored, require_store
from fourfold.result.report import Prediction
from fourfold.search.running_score import Judged, RunningScore, scores, stored_predictions
from fourfold.spec import check
from fourfold.tables.derive import published
from fourfold.tables.document import Document, Table, Text
from fourfold.tables.finding import Finding
from fourfold.tables.forms import read_file
from fourfold.tables.lint import RULES
from fourfold.tables.lint import lint as findings_of
from fourfold.tables.publish import STYLE_CONVENTION, plain_records, publish
from fourfold.tables.records import records
from fourfold.tables.row import PublishedRow
from fourfold.tables.styles import style_of, unread
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.machine import predictor
from fourfold.verbs.predict import predict_table
from fourfold.verbs.requests import ReportRequest
from fourfold.verbs.runs import TRIAL_TAG, chosen_runs

# Reading a whole run takes a millisecond; more than this many say nothing new about the planner.
_MOST_SCORED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Answer):
    """`document` has a table for what can be compared, `records` are all results, none merged;
    `stored` are the runs behind them, None for a row of a table."""

    style: str
    convention: str
    document: Document
    records: tuple[PublishedRow, ...]
    stored: tuple[Stored | None, ...]
    scores: tuple[RunningScore, ...]

    def plain(self) -> dict[str, Any]:
        scored = [dataclasses.asdict(score) for score in self.scores]
        head = {"style": self.style, "convention": self.convention}
        return {**head, "rows": self.rows(), "scores": scored}

    def rows(self) -> list[dict[str, Any]]:
        return plain_records(self.records, self.convention)

    def tables(self) -> list[tuple[str, Table]]:
        """The style's own tables, each with what stands above it."""
        found, about = [], ""
        for block in self.document.blocks:
            if isinstance(block, Table):
                found.append((about, block))
            else:
                about = next((line for line in reversed(block.lines) if line.strip()), about)
        return found

    def styled_rows(self) -> list[dict[str, str]]:
        """The tables as one: the style's columns, then what stands above each table."""
        return [
            dict(zip(table.headings, row.cells, strict=False)) | {"about": about}
            for about, table in self.tables()
            for row in table.data
        ]


def report(request: ReportRequest, *, on_event: OnEvent = ignore) -> Report:
    rule = convention(request.convention or STYLE_CONVENTION[request.style]).id
    found, stored = _records(request, on_event)
    hint = "'fourfold bench' and 'fourfold sweep' store runs; --runs selects another store"
    sources = " ".join(request.sources) or request.runs
    check.that(found, "", sources, "contains no results", hint)
    document = publish(found, request.style, rule)
    judged = _scores(request, [item for item in stored if item is not None])
    rows = [one for one, item in zip(found, stored, strict=True) if item is None]
    judged += scores(
        [_judged(r, r.predicted) for r in rows if r.predicted and r.outcome in ("ok", "oom")]
    )
    for score in judged:
        document = with_line(document, str(score))
    return Report(
        style=request.style,
        convention=rule,
        document=document,
        records=tuple(found),
        stored=tuple(stored),
        scores=tuple(judged),
    )


def with_line(document: Document, line: str) -> Document:
    """Below the last table; a document without any gets a text."""
    *blocks, last = document.blocks or (Text(()),)
    if isinstance(last, Text):
        return Document((*blocks, Text((*last.lines, line))))
    return Document((*blocks, last, Text(("", line))))


def _scores(request: ReportRequest, found: list[Stored]) -> list[RunningScore]:
    """The planner against the stored runs: by what was predicted before each, or, with a cluster
    or a profile, by what would be predicted today."""
    stored = [item for item in found if item.summary.outcome in ("ok", "oom")]
    if not (request.cluster or request.profile):
        return scores(stored_predictions([item.summary for item in stored]))
    known = predictor(cluster=request.cluster, profile=request.profile)
    newest = sorted(stored, key=lambda item: item.summary.started_at)[-_MOST_SCORED:]
    predictions = known.predictions([item.report().spec for item in newest]) if newest else []
    pairs = zip(predictions, newest, strict=True)
    return scores([Judged.of(item.summary, prediction) for prediction, item in pairs])


def _judged(row: PublishedRow, prediction: Prediction) -> Judged:
    compared = (row.shape, row.gpus, row.seq_len, row.global_batch, row.precision)
    return Judged(prediction, row.outcome, row.step_s, row.peak_bytes, compared)


def _records(
    request: ReportRequest, on_event: OnEvent
) -> tuple[list[PublishedRow], list[Stored | None]]:
    """(rows of every source, the stored run of each). Short trials that only asked whether a run
    fits are no measurements."""
    found: list[PublishedRow] = []
    seen: list[Stored | None] = []
    if not request.sources:
        require_store(request.runs)
    for source in request.sources or (request.runs,):
        if Path(source).is_dir():
            chosen = chosen_runs(dataclasses.replace(request, runs=source), on_event)
            stored = [item for item in chosen if request.tag or item.summary.spec.tag != TRIAL_TAG]
            seen += stored
            found += [published(item.summary, at) for at, item in enumerate(stored)]
        else:
            document = read_file(source)
            rows = [_with_bytes(r) for r in records(document) if r.outcome != "absent"]
            found += _predicted(source, rows)
            seen += [None] * (len(found) - len(seen))
            for table in (block for block in document.blocks if isinstance(block, Table)):
                headings = ", ".join(f"'{heading}'" for heading in unread(table))
                if headings:
                    on_event(Event(f"{source}: ignored columns: {headings}"))
    return found, seen


def _with_bytes(row: PublishedRow) -> PublishedRow:
    """A GB of published memory has 2^30 bytes, as allocators count."""
    if row.mem_gb is None or row.peak_bytes is not None:
        return row
    return dataclasses.replace(row, peak_bytes=round(row.mem_gb * GIB))


def _predicted(source: str, rows: list[PublishedRow]) -> list[PublishedRow]:
    """Rows of the reference schema with what the shipped calibration says of each, where it says
    something."""
    if not rows or any(row.style != "reference" for row in rows):
        return rows
    table = predict_table(source)
    answers, places = table.answers, {name: at for at, name in enumerate(table.row_ids)}
    found = []
    for row in rows:
        at = places.get(row.run_id, -1)
        if at < 0 or not math.isfinite(answers.step_s[at]):
            found.append(row)
            continue
        predicted = Prediction(
            step_s=float(answers.step_s[at]),
            step_s_low=float(answers.low_s[at]),
            step_s_high=float(answers.high_s[at]),
            peak_bytes=float(answers.mem_gb[at]) * GIB,
            basis=f"predicted today, by the calibration {table.calibration}",
        )
        found.append(dataclasses.replace(row, predicted=predicted))
    return found


@dataclass(frozen=True, slots=True)
class Rules(Answer):
    rules: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        return [{"rule": name, "what": what} for name, what in self.rules.items()]


@dataclass(frozen=True, slots=True)
class Findings(Answer):
    findings: tuple[tuple[str, Finding], ...]
    checked: str

    def plain(self) -> dict[str, Any]:
        return {"findings": self.rows(), "checked": self.checked}

    def rows(self) -> list[dict[str, Any]]:
        return [{"file": path, **dataclasses.asdict(item)} for path, item in self.findings]


def lint_rules() -> Rules:
    return Rules(RULES)


def lint(paths: Sequence[str], *, ignored: Sequence[str] = ()) -> Findings:
    """Mistakes in tables of Markdown or CSV files, but for the ignored rules."""
    for rule in ignored:
        if rule not in RULES:
            raise UserError("unknown rule", field="ignore", value=rule, hint=nearest(rule, RULES))
    check.given(paths, "FILE", "pass a .md or .csv file")
    found: list[tuple[str, Finding]] = []
    tables = rows = 0
    for path in paths:
        document = read_file(path)
        known = [table for table in document.tables if style_of(table) != "other"]
        # Checking none would look like a clean bill.
        hint = "known styles: mpt, topology, scaling, reference (docs/tables.md)"
        check.that(known, "FILE", path, "contains no table of a known style", hint)
        tables, rows = tables + len(known), rows + sum(len(table.data) for table in known)
        found += [(path, item) for item in findings_of(document) if item.rule not in ignored]
    return Findings(tuple(found), f"{counted(tables, 'table')}, {counted(rows, 'row')} checked")
