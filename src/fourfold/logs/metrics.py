"""Metrics by step, as W&B and TensorBoard export them (CSV or JSON lines), as runs of a book.

CloudAI's training_report.json: one document with the resolved configuration of a run and its
steps (schema 1.0 and before it, when it had no version).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.logs.book import MOST_SHOWN, Book
from fourfold.logs.lines import Line, open_text
from fourfold.logs.mapping import plain_heading
from fourfold.logs.nested import json_object, number, whole
from fourfold.logs.row import COLUMNS, text_of
from fourfold.logs.series import StepLine
from fourfold.logs.words import columns
from fourfold.spec import catalog
from fourfold.spec.engine import spelt

_NAMES = catalog.data("columns.toml")["metrics"]
_STEP, _WALL = (_NAMES[name].split() for name in ("step", "wall"))
_MOST_CHARS = 2**26
_AXES_OF_ONE = ("context_parallel_size", "virtual_pipeline_parallel_size")


def cloudai_report(path: str | Path) -> dict[str, Any] | None:
    """The report, if the file is one."""
    if Path(path).suffix.lower() != ".json":
        return None
    with open_text(path) as stream:
        text = stream.read(_MOST_CHARS)
    if '"step_time_sec"' not in text or '"config"' not in text:
        return None
    found = json_object(text) or {}
    is_report = isinstance(found.get("steps"), list) and isinstance(found.get("config"), dict)
    return found if is_report else None


def read_cloudai(report: Mapping[str, Any], book: Book) -> None:
    config = report["config"]
    said = {name: text_of(v) for name, v in config.items() if isinstance(v, str | int | float)}
    said |= {name: "1" for name in _AXES_OF_ONE if config.get(name, "") is None}
    facts = columns("cloudai", said)
    facts["stack"] = spelt(str(config.get("test_template_name", "")))
    if said.get("position_embedding_type", "").lower() == "none":
        facts.pop("family", None)
    if config.get("fp8"):
        facts["precision"] = "fp8"
    if whole(str(config.get("num_experts"))):
        facts["unmodelled"] = f"{config['num_experts']} experts"
    book.fact(**facts)
    slow = _profiled(config)
    for at, step in enumerate(report["steps"], start=1):
        line = _step(step) if isinstance(step, dict) else None
        if line is None:
            book.skip(at, str(step))
            continue
        if line.step in slow:
            book.pause()
        book.step(line)
    book.lines = len(report["steps"])


def _profiled(config: Mapping[str, Any]) -> range:
    """Steps under a profiler, and those right after, are slower than the run."""
    names = ("profiling_start_step", "profiling_stop_step")
    first, last = (whole(str(config.get(name))) for name in names)
    if not config.get("profiling_enabled") or first is None or last is None:
        return range(0)
    return range(first, last + (whole(str(config.get("exclude_post_profiling_steps"))) or 0) + 1)


def _step(step: Mapping[str, Any]) -> StepLine | None:
    at, seconds = whole(str(step.get("iteration"))), number(str(step.get("step_time_sec")))
    if at is None or at < 0 or seconds is None or seconds <= 0:
        return None
    reserved = number(str(step.get("memory_reserved_bytes")))
    return StepLine(
        step=at,
        seconds=seconds,
        loss=str(step.get("loss", "")),
        tflops=number(str(step.get("tflops_per_gpu"))),
        mem_gib=reserved / 2**30 if reserved else None,
    )


# Line and cells of each; None where a line is not an object.
Items = Iterator[tuple[int, dict[str, Any] | None]]
# Of LlamaFactory's trainer_log.jsonl: '5:13:22', '1 day, 0:00:01'.
_CLOCK = re.compile(r"(?:([0-9]{1,4}) days?, )?([0-9]{1,3}):([0-9]{2}):([0-9]{2})")
_KINDS = {
    name: (kind, unit) for kind, units in _NAMES["units"].items() for name, unit in units.items()
}
_TIMES, _EMPTY = ("seconds", "rate"), ("", "none", "nan", "null")


def step_column(headings: list[str]) -> str | None:
    """Where a table of metrics has its steps; a table of runs has none, or layouts beside them."""
    plain = {plain_heading(name): name for name in headings}
    if {"tp", "tpsize", "nlayers", "micro", "mbs"} & plain.keys():
        return None
    step = next((plain[name] for name in _STEP if name in plain), None)
    useful = [name for name in headings if _kind(name)] or "value" in plain
    return step if step and useful else None


@functools.lru_cache(maxsize=4096)
def _kind(heading: str) -> tuple[str, float] | None:
    """What a metric is: W&B puts 'NAME - ' before it, TensorBoard a path."""
    return _KINDS.get(plain_heading(re.split(r" - ", heading)[-1]))


def objects(lines: Iterator[Line]) -> Items:
    for line in lines:
        if line.text.strip():
            yield line.number, json_object(line.text)


_TRIPLE = ("walltime", "step", "value")


def listed(line: Line) -> Items:
    """TensorBoard's JSON: [[wall time, step, value], ...]; or a list of objects."""
    try:
        found = json.loads(line.text)
    except (ValueError, RecursionError):
        found = [None]
    for number_, one in enumerate(found, start=1):
        if isinstance(one, list) and len(one) == 3:
            one = dict(zip(_TRIPLE, one, strict=True))
        yield number_, one if isinstance(one, dict) else None


def charts(items: Items, headings: list[str], book: Book, stem: str) -> None:
    """A CSV of metrics by step. W&B writes 'RUN - METRIC': every run that has a time is a row, and
    all are read in one pass."""
    by_run: dict[str, list[str]] = {}
    for name in headings:
        by_run.setdefault(name.rpartition(" - ")[0], []).append(name)
    timed = {run: [n for n in names if _is_time(n)] for run, names in by_run.items()}
    runs = [run for run, times in timed.items() if times]
    if len(runs) < 2:
        one_run(items, book, stem)
        return
    shared = by_run.get("", [])
    each = {run: _Metrics(Book()) for run in runs}
    for run, metrics in each.items():
        metrics.book.fact(row_id=run)
    for number_, item in items:
        for run, metrics in each.items():
            # Another run may have had this step, and this one not.
            if item is not None and any(item[name] for name in timed[run]):
                metrics.take(number_, {name: item[name] for name in (*shared, *by_run[run])})
    for metrics in each.values():
        book.runs += metrics.book.runs
        book.unread += metrics.book.unread
        book.shown = (book.shown + metrics.book.shown)[:MOST_SHOWN]


def _is_time(heading: str) -> bool:
    return (_kind(heading) or ("",))[0] in _TIMES


def one_run(items: Items, book: Book, stem: str) -> None:
    """`stem` of the file: TensorBoard's 'run-NAME-tag-iteration-time'."""
    metrics = _Metrics(book, _kind(stem.partition("-tag-")[2] or stem))
    for number_, item in items:
        metrics.take(number_, item)


@dataclass(slots=True)
class _Metrics:
    """Steps of one run into its book. Seconds from a metric that has them; else from the wall clock
    between steps, where it does not go back. `tag`: what the column 'value' is."""

    book: Book
    tag: tuple[str, float] | None = None
    before: tuple[int, float] | None = None

    def take(self, number_: int, item: dict[str, Any] | None) -> None:
        found = _metric(item, self.tag) if item is not None else None
        if item is None or found is None:
            if item is None or _config(item, self.book) is False:
                self.book.skip(number_, str(item)[:160] if item else "not a JSON object")
            return
        (step, wall), before = found, self.before
        untimed = step.seconds is None and step.tokens_s_gpu is None and wall is not None
        if untimed and before is not None and step.step > before[0] and wall > before[1]:
            step = replace(step, seconds=(wall - before[1]) / (step.step - before[0]))
        self.before = (step.step, wall) if wall is not None else before
        self.book.step(step)


def _metric(
    item: Mapping[str, Any], tag: tuple[str, float] | None
) -> tuple[StepLine, float | None] | None:
    wall = None
    steps: dict[str, int | None] = {}
    found: dict[str, float] = {}
    loss = ""
    for name, cell in item.items():
        plain, value = plain_heading(str(name)), number(str(cell)) if cell is not None else None
        if plain in _STEP:
            steps.setdefault(plain, whole(str(cell)))
        elif (wall is None and plain in _WALL) or name == "_timestamp":
            wall = value if value is not None else _clock(str(cell))
        kind = tag if plain == "value" and tag else _kind(str(name))
        if kind is None:
            continue
        if value is None and kind[0] in _TIMES and str(cell).lower() not in _EMPTY:
            return None
        if value is None or value <= 0:
            continue
        if kind[0] == "loss":
            loss = str(cell)
        else:
            found.setdefault(kind[0], value * kind[1])
    step = next((steps[name] for name in _STEP if name in steps), None)
    if step is None or step < 0:
        return None
    line = StepLine(
        step=step,
        seconds=found.get("seconds"),
        tokens_s_gpu=None if "seconds" in found else found.get("rate"),
        loss=loss,
        mem_gib=found.get("memory"),
    )
    return line, wall


def _clock(text: str) -> float | None:
    found = _CLOCK.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds


def _config(item: Mapping[str, Any], book: Book) -> bool:
    """A line of JSON without a step may be the configuration, in columns of the schema."""
    facts = {
        k: text_of(v) for k, v in item.items() if k in COLUMNS and not isinstance(v, dict | list)
    }
    if facts:
        book.fact(**facts)
    return bool(facts)
