"""Compare planners on the same measured runs: tasks without results, one scorer, a card each.

    python -m exam.compare [FOLDER] [--answer] [--page results.html|.md]
    python -m exam.compare [FOLDER] --check mine.csv
    python -m exam.compare FOLDER --new measured.csv other.csv

FOLDER (exam/published if none is named) has tasks.csv (runs in the reference schema, without
results), answers.csv (what was measured), and entrants/NAME.csv with a card entrants/NAME.toml.
An answer has row_id and step_s, and if it can step_s_low and step_s_high (80%), mem_gb and
fit_chance, as `fourfold predict tasks.csv --out FILE` writes them; a blank step_s declines a task.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

import fourfold
from exam.baselines import constant_mfu, predictions_of, rule_of_thumb
from fourfold import files
from fourfold.cost.fit.accuracy import Score, score
from fourfold.cost.fit.calibration import Calibration, shipped
from fourfold.cost.fit.folds import Bools, keys_of
from fourfold.cost.fit.validate import others_of
from fourfold.cost.table.predict import RowPredictions, predict
from fourfold.cost.table.reference import SCHEMA, RowTable, read_table
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError, inside
from fourfold.escape import csv_text, toml_text
from fourfold.page.document import grid_html, still_document
from fourfold.search.rows.read import parse
from fourfold.spec import check, codec, texts
from fourfold.text_table import Grid, Part, named, or_dash, render, table
from fourfold.units import plain_float

PUBLISHED = Path(__file__).parent / "published"
NUMBERS = ("step_s", "step_s_low", "step_s_high", "mem_gb", "fit_chance")
RESULTS = ("step_s", "tokens_s_gpu", "tflops_gpu", "flop_rule", "mem_gb", "status")
ANSWERS = ("row_id", "step_s", "mem_gb", "status", "seen")
# All that stays of a note: whoever knows the table would find its rows by the rest.
_SETTING = re.compile(r"\b(pure|default)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Who answered, how, and which of the rows were known to them."""

    name: str
    by: str
    version: str
    how: str
    saw: str
    url: str = ""


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Runs that every entrant predicts, with what was measured."""

    name: str
    rows: Rows
    seen_mask: Bools  # rows that the shipped calibration was fitted to

    @property
    def row_ids(self) -> list[str]:
        return self.rows.table.column("row_id")

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.rows.table.column("source")))

    def source_mask(self, name: str) -> Bools:
        return np.array([source == name for source in self.rows.table.column("source")], dtype=bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A card with its scores."""

    card: Card
    declined: int
    common: Score  # on the rows that every entrant answered
    own: Score  # on all rows that this one answered
    by_source: dict[str, Score]


# --- files


def make_tasks(tables: Sequence[str], calibration: Calibration) -> dict[str, str]:
    """Return the texts of tasks.csv and answers.csv, by file name, for the rows of these tables."""
    columns = [name for name in SCHEMA if name not in RESULTS]
    tasks, answers = [columns], [list(ANSWERS)]
    fitted = {entry.key for entry in calibration.entries if entry.rows_time}
    for path in tables:
        rows = parse(read_table(path))
        seen = [key in fitted for key in keys_of(rows).tolist()]
        for row in np.flatnonzero(rows.usable).tolist():
            cells = {name: rows.table.column(name)[row] for name in SCHEMA}
            setting = _SETTING.search(cells["note"])
            cells["note"] = setting[0] if setting else ""
            tasks.append([cells[name] for name in columns])
            results = [cells[name] for name in ANSWERS if name != "seen"]
            answers.append([*results, str(int(seen[row]))])
    return {"tasks.csv": csv_text(tasks), "answers.csv": csv_text(answers)}


def read_tasks(folder: Path) -> TaskSet:
    """Return the tasks of a folder with their answers filled in."""
    if not (folder / "tasks.csv").is_file():
        hint = "name a folder with tasks.csv and answers.csv, such as exam/published"
        raise UserError("has no tasks.csv", field="folder", value=str(folder), hint=hint)
    tasks = read_table(folder / "tasks.csv")
    text = files.read_text(folder / "answers.csv", field="answers")
    answers = {row["row_id"]: row for row in csv.DictReader(text.splitlines())}
    row_ids = tasks.column("row_id")
    lacking = [row_id for row_id in row_ids if row_id not in answers]
    if lacking or len(set(row_ids)) != len(row_ids):
        rule = f"has no answer for {lacking[0]}" if lacking else "names a task twice"
        raise UserError(rule, field="folder", value=str(folder))
    results = ("step_s", "mem_gb", "status")
    filled = {name: [answers[row_id][name] for row_id in row_ids] for name in results}
    seen_mask = np.array([answers[row_id]["seen"] == "1" for row_id in row_ids], dtype=bool)
    rows = parse(RowTable(folder.name, tasks.texts | filled, tasks.length))
    return TaskSet(folder.name, rows, seen_mask)


def read_card(path: Path) -> Card:
    with inside(path):
        return codec.decode(Card, texts.parse_toml(files.read_text(path, field="card")))


def read_predictions(path: Path, row_ids: list[str]) -> RowPredictions:
    """Return an entrant's predictions in the order of the tasks; refuse what is wrong by line."""
    text = files.read_text(path, field="predictions")
    reader = csv.DictReader(text.splitlines())
    headings = reader.fieldnames or []
    for name in ("row_id", "step_s"):
        check.that(name in headings, "predictions", str(path), f"lacks the column {name}")
    index_of = {row_id: index for index, row_id in enumerate(row_ids)}
    columns = {name: np.full(len(row_ids), np.nan) for name in NUMBERS}
    answered: set[str] = set()
    for line, row in enumerate(reader, 2):
        where = f"{path}, line {line}"
        row_id = row["row_id"] or ""
        if row_id not in index_of:
            raise UserError("is no task here", field="row_id", value=row_id, source=where)
        if row_id in answered:
            raise UserError("is answered twice", field="row_id", value=row_id, source=where)
        answered.add(row_id)
        numbers = {name: _number(row.get(name) or "", name, where) for name in NUMBERS}
        _check_interval(numbers, where)
        for name, number in numbers.items():
            columns[name][index_of[row_id]] = number
    lacking = [row_id for row_id in row_ids if row_id not in answered]
    if lacking:
        names = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        rule = f"has no line for {len(lacking)} of {len(row_ids)} tasks: {names}"
        hint = "answer each task; leave step_s blank to decline one"
        raise UserError(rule, field="predictions", value=str(path), hint=hint)
    if np.isnan(columns["step_s"]).all():
        rule = "answers no task: step_s is blank in every line"
        raise UserError(rule, field="predictions", value=str(path))
    return predictions_of(**columns)


def _number(text: str, column: str, where: str) -> float:
    if not text.strip():
        return math.nan
    value = plain_float(text)
    is_chance = column == "fit_chance"
    if not (0.0 <= value <= 1.0 if is_chance else 0.0 < value < math.inf):
        rule = "must be from 0 to 1" if is_chance else "must be a finite number above 0"
        hint = "leave it blank to decline" if column == "step_s" else "leave it blank if not known"
        raise UserError(rule, field=column, value=text, hint=hint, source=where)
    return value


def _check_interval(numbers: dict[str, float], where: str) -> None:
    low, middle, high = (numbers[name] for name in ("step_s_low", "step_s", "step_s_high"))
    if math.isnan(low) != math.isnan(high):
        raise UserError("needs both ends of the interval", field="step_s_low", source=where)
    if not math.isnan(low) and not (low <= middle <= high):
        rule = f"must lie from step_s_low={low} to step_s_high={high}"
        raise UserError(rule, field="step_s", value=middle, source=where)


def predictions_csv(row_ids: list[str], predictions: RowPredictions) -> str:
    """Return the text of a file that `read_predictions` reads."""
    p = predictions
    columns = [column.tolist() for column in (p.step_s, p.low_s, p.high_s, p.mem_gb, p.fit_chance)]
    lines = [
        [row_id, *("" if math.isnan(value) else f"{value:.6g}" for value in values)]
        for row_id, *values in zip(row_ids, *columns, strict=True)
    ]
    return csv_text([["row_id", *NUMBERS], *lines])


# --- entrants that answer here


def predict_left_out(rows: Rows, calibration: Calibration) -> RowPredictions:
    """Return predictions from the calibrations of other engines and machines alone."""
    return predict(rows, replace(calibration, entries=others_of(calibration.entries, rows)))


_GUIDE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-guide.html"
_OURS = {"by": "this project", "version": fourfold.__version__, "url": "docs/cost-model.md"}
_BASELINE = {"by": "baseline", "version": fourfold.__version__}
# Name of the files -> card, predictor.
OWN_ENTRANTS: dict[str, tuple[Card, Callable[[Rows, Calibration], RowPredictions]]] = {
    "fourfold": (
        Card(
            name="fourfold, as shipped",
            how="fourfold predict, shipped calibration",
            saw="all rows: open book",
            **_OURS,
        ),
        predict,
    ),
    "fourfold-left-out": (
        Card(
            name="fourfold, rows left out",
            how="the shipped calibration without the engines and machines of these rows",
            saw="no row, but for general constants that were fitted to all",
            **_OURS,
        ),
        predict_left_out,
    ),
    "constant-mfu": (
        Card(
            name="constant MFU",
            how="6 x parameters x tokens at 40% of the peak",
            saw="nothing",
            **_BASELINE,
        ),
        lambda rows, _: constant_mfu(rows),
    ),
    "rule-of-thumb": (
        Card(
            name="rules of thumb",
            how="40% of the peak; + 1/3 for full recompute, bubble (p - 1) / (v m), 5% for each "
            "doubling of tp, twice the time across hosts, 5% less for each doubling of the micro "
            "batch; 18 bytes per parameter and 34 s b h per "
            "layer (NVIDIA's and torchtitan's guides)",
            saw="no row, but the rule of the micro batch was added after a look at its ranks",
            url=_GUIDE,
            **_BASELINE,
        ),
        lambda rows, _: rule_of_thumb(rows),
    ),
}


def answer_here(folder: Path, tasks: TaskSet) -> None:
    """Write the predictions and cards of fourfold and of the baselines."""
    (folder / "entrants").mkdir(exist_ok=True)
    calibration = shipped()
    for name, (card, predictor) in OWN_ENTRANTS.items():
        print(f"{name} answers {len(tasks.row_ids)} tasks", file=sys.stderr)
        text = predictions_csv(tasks.row_ids, predictor(tasks.rows, calibration))
        files.write_text(folder / "entrants" / f"{name}.csv", text)
        files.write_text(folder / "entrants" / f"{name}.toml", toml_text(codec.encode(card)))


# --- scores


def read_entrants(folder: Path, tasks: TaskSet) -> list[tuple[Card, RowPredictions]]:
    paths = sorted((folder / "entrants").glob("*.csv"))
    hint = "--answer makes those of fourfold and the baselines"
    check.that(paths, "folder", str(folder), "has no entrants", hint)
    return [
        (read_card(path.with_suffix(".toml")), read_predictions(path, tasks.row_ids))
        for path in paths
    ]


def scored(tasks: TaskSet, answers: list[tuple[Card, RowPredictions]]) -> list[Entrant]:
    """Return the entrants, the smallest median error on the common rows first."""
    masks = [np.isfinite(predictions.step_s) for _, predictions in answers]
    common_mask = np.logical_and.reduce(masks)
    entrants = [
        Entrant(
            card=card,
            declined=int((~mask).sum()),
            common=_score(tasks, predictions, common_mask),
            own=_score(tasks, predictions, mask),
            by_source={
                source: _score(tasks, predictions, mask & tasks.source_mask(source))
                for source in tasks.sources
            },
        )
        for (card, predictions), mask in zip(answers, masks, strict=True)
    ]
    return sorted(entrants, key=lambda entrant: entrant.common.median_pct)


_FIT = ("fit_pct", "refused_pct", "missed_pct", "unsure_pct")
_INTERVAL = ("coverage_pct", "width_pct", "interval_score")


def _score(tasks: TaskSet, predictions: RowPredictions, mask: Bools) -> Score:
    """Return the score of the rows, NaN for what an entrant did not answer at all."""
    unanswered: tuple[str, ...] = ()
    if not np.isfinite(predictions.fit_chance).any():
        unanswered += _FIT
    if not np.isfinite(predictions.low_s).any():
        unanswered += _INTERVAL
    if not np.isfinite(predictions.mem_gb).any():
        unanswered += ("memory_pct",)
    blank: dict[str, float] = dict.fromkeys(unanswered, math.nan)
    return replace(score(tasks.rows, predictions, within=mask), **blank)


# --- text and page

_INTRODUCTION = (
    "Planners predict runs that others measured and published: seconds per step, memory, whether "
    "it fits. Tasks, answers, predictions and cards are files; anyone may enter. It is the only "
    "published blind exam that we know. These rows were public before: each card says which of "
    "them the entrant saw. The error is of seconds per step; rank correlation (Kendall's tau) and "
    "regret are of layouts that compete for one model on the same GPUs; regret is the time that "
    "the entrant's first choice loses against the best measured one."
)
_COLUMNS = named(
    "entrant=card.name", "median %=common.median_pct:.1f", "p90 %=common.p90_pct:.1f",
    "bias %=common.bias_pct:.1f", "rank corr.=common.rank_correlation:.2f",
    "regret %=common.regret_pct:.1f", "fit right %=common.fit_pct:.0f",
    "in 80% interval=common.coverage_pct:.0f", "its width %=common.width_pct:.0f",
    "memory %=common.memory_pct:.1f", "declined",
)  # fmt: skip


def result_parts(tasks: TaskSet, entrants: list[Entrant]) -> Iterator[Part]:
    """Yield the sentences and tables of the results."""
    rows = tasks.rows
    num_timed = int((np.isfinite(rows.step_s) & (rows.status != "oom")).sum())
    yield (
        f"{tasks.name}: {len(tasks.row_ids)} tasks, {num_timed} timed; {entrants[0].common.rows} "
        f"timed rows that every entrant answered; {int(tasks.seen_mask.sum())} rows were seen by "
        "fourfold's shipped calibration (marked in answers.csv)"
    )
    yield ""
    yield table(entrants, *_COLUMNS)
    yield ""
    yield "All rows that an entrant answered, by source: median error, rank correlation, regret"
    yield ""
    yield _table_by_source(tasks, entrants)
    yield ""
    for entrant in entrants:
        card = entrant.card
        by = f" ({', '.join(filter(None, (card.by, card.version)))})" if card.by else ""
        link = f" {card.url}" if card.url else ""
        yield f"{card.name}{by}: {card.how or 'no card'}. Saw: {card.saw}.{link}"


def _table_by_source(tasks: TaskSet, entrants: list[Entrant]) -> Grid:
    columns = named("entrant=card.name")
    for source in tasks.sources:

        def cell(entrant: Entrant, source: str = source) -> str:
            s = entrant.by_source[source]
            numbers = (
                or_dash(s.median_pct, ".1f"),
                or_dash(s.rank_correlation, ".2f"),
                or_dash(s.regret_pct, ".1f"),
            )
            return " / ".join(numbers) if s.rows else "-"

        columns.append((source, cell))
    return table(entrants, *columns)


def result_text(tasks: TaskSet, entrants: list[Entrant], style: str) -> str:
    """Return the results as 'text', 'md' or 'html' (one file)."""
    parts = list(result_parts(tasks, entrants))
    if style == "html":
        parts = [_INTRODUCTION, *parts]
        body = "\n".join(
            grid_html(part) if isinstance(part, Grid) else f"<p>{escape(part)}</p>"
            for part in parts
            if part
        )
        css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
        title = "Exam of planners"
        return still_document(title=title, style=css, body=f"<h1>{title}</h1>\n{body}\n")
    head = ["# Exam of planners", "", _INTRODUCTION, ""] if style == "md" else []
    lines = [render(*part, style) if isinstance(part, Grid) else part for part in parts]
    return "\n".join([*head, *lines]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=PUBLISHED)
    parser.add_argument("--new", nargs="+", metavar="ROWS.csv", help="make tasks of these tables")
    parser.add_argument("--answer", action="store_true", help="fourfold and baselines answer again")
    parser.add_argument("--check", type=Path, metavar="FILE.csv", help="score one file alone")
    parser.add_argument("--page", type=Path, metavar="FILE", help="results as .html or .md")
    args = parser.parse_args(argv)
    try:
        _run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    style = args.page.suffix.removeprefix(".") if args.page else "text"
    check.that(style in ("html", "md", "text"), "page", args.page, "must end in .html or .md")
    if args.new:
        hint = "name a new folder: entrants answered these tasks"
        exists = (args.folder / "tasks.csv").exists()
        check.that(not exists, "folder", str(args.folder), "has tasks already", hint)
        for name, text in make_tasks(args.new, shipped()).items():
            args.folder.mkdir(parents=True, exist_ok=True)
            files.write_text(args.folder / name, text)
    tasks = read_tasks(args.folder)
    if args.answer or args.new:
        answer_here(args.folder, tasks)
    if args.check:
        path = args.check.with_suffix(".toml")
        card = Card(name=args.check.stem, by="", version="", how="", saw="not said")
        card = read_card(path) if path.is_file() else card
        entrants = scored(tasks, [(card, read_predictions(args.check, tasks.row_ids))])
    else:
        entrants = scored(tasks, read_entrants(args.folder, tasks))
    print(result_text(tasks, entrants, "text"), end="")
    if args.page:
        files.write_text(args.page, result_text(tasks, entrants, style))
        print(f"wrote: {args.page}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
