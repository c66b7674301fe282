"""fit, suggest_runs, score: a calibration from measured runs, what to measure next, its error."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from fourfold import door
from fourfold.cost.fit.accuracy import FoldScore, Result, Score, fold_scores, study
from fourfold.cost.fit.calibration import Calibration, FittedStack, load, to_json
from fourfold.cost.fit.coefficients import BY_NAME
from fourfold.cost.fit.folds import sample, undated
from fourfold.cost.fit.pairs import PairScore, pair_scores
from fourfold.cost.fit.validate import calibrate, suggest
from fourfold.cost.table.cells import impossible
from fourfold.cost.table.reference import NEEDED, RowTable, read_table
from fourfold.cost.table.reports import report_rows
from fourfold.cost.table.rows import Rows
from fourfold.errors import UserError
from fourfold.events import OnEvent, ignore, notes, warnings
from fourfold.search.rows.engines import resolve_rows
from fourfold.search.rows.read import parse
from fourfold.spec import check, codec
from fourfold.spec.catalog import generation_of
from fourfold.spec.layout import AXES
from fourfold.units import counted
from fourfold.verbs import Answer
from fourfold.verbs.machine import known_cluster, read_calibration
from fourfold.verbs.requests import FitRequest, ScoreRequest

_SUGGESTED = (
    "row_id",
    "stack",
    "cluster",
    "model",
    "seq_len",
    "n_gpus",
    *AXES,
    "mbs",
    "gbs",
    "sharding",
    "act_ckpt",
)
# Fewer say less than what a fit starts from.
_FEW_ROWS = 3
# More are a study of published tables; a calibration file stays one that people can read.
_MOST_OWN_RUNS = 500


@dataclass(frozen=True, slots=True)
class Suggested(Answer):
    """The runs that are most informative to measure, by columns of the reference schema."""

    TABLE = "suggested"
    suggested: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class FittedKey:
    """A fitted stack on a cluster: the measured rows behind it, the coefficients that they decide,
    and cross-validated errors by name."""

    stack: str
    cluster: str
    rows: int
    free_time: tuple[str, ...]
    free_memory: tuple[str, ...]
    errors_pct: Annotated[dict[str, float], codec.INLINE]

    @classmethod
    def of_stack(cls, fitted: FittedStack) -> FittedKey:
        errors_pct = {f"{name}_pct": error for name, error in fitted.errors_pct.items()}
        free = fitted.free_time, fitted.free_memory
        return cls(fitted.stack, fitted.cluster, fitted.rows_time, *free, errors_pct)


@dataclass(frozen=True, slots=True)
class Fitted(Answer):
    """A calibration; a row is a stack on a cluster. `out`: the file that it was written to."""

    TABLE = "entries"
    out: str | None
    entries: tuple[FittedKey, ...]
    calibration: Annotated[Calibration, codec.HIDDEN]

    @classmethod
    def of_calibration(cls, calibration: Calibration, out: str | None = None) -> Fitted:
        return cls(out, tuple(map(FittedKey.of_stack, calibration.entries)), calibration)

    def json(self) -> str:
        """Return the file that 'plan', 'predict' and 'score' take as --calibration."""
        return to_json(self.calibration)


def _measured_rows(request: FitRequest, on_event: OnEvent) -> list[Rows]:
    tables = [_read(path, on_event) for path in request.rows]
    if request.runs:
        if not request.cluster:
            raise UserError("is required with --runs", field="cluster")
        cluster = known_cluster(request.cluster)
        tables.append(report_rows(request.runs, cluster, warnings(on_event)))
    return check.given(tables, "ROWS.csv", "or pass --runs DIR")


def _read(path: str, on_event: OnEvent, known: Calibration | None = None) -> Rows:
    """A table, with a word about measured values that are none, and where no row says enough; the
    engines of its rows by the names of stacks that a calibration knows."""
    table = read_table(path)
    if known is not None:
        resolve_rows(table, known)
    if wrong := impossible(table):
        some = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        warnings(on_event)(f"{path}: not used, as not {door.POSSIBLE}: {some}")
    rows = parse(table)
    if rows.reasons and not rows.usable.any():
        ((why, _),) = Counter(rows.reasons).most_common(1)
        why = why.removeprefix("not expressible: ")
        warnings(on_event)(f"{path}: none of {counted(len(rows.reasons), 'row')} is used: {why}")
    return rows


def fit(request: FitRequest, *, on_event: OnEvent = ignore) -> Fitted:
    tables = _measured_rows(request, on_event)
    count = len(sample(tables))
    rule = "have no measured step time, memory or out-of-memory outcome"
    check.that(count, "rows", None, rule, "fill in step_s, mem_gb or status")
    if count < _FEW_ROWS:
        warnings(on_event)(
            f"{count} measured row{'s' * (count > 1)} cannot tell one coefficient from another: "
            f"expect the errors of the default calibration, and measure {_FEW_ROWS} or more "
            "('fourfold fit --suggest' names them)"
        )
    prior = load(request.prior) if request.prior else None
    name = request.name or "+".join(table.table.name for table in tables)
    known = dict(map(_fixed, request.fix))
    found = calibrate(tables, name=name, prior=prior, tell=notes(on_event), fixed=known)
    return Fitted.of_calibration(replace(found, runs=_own_runs(tables)))


def _own_runs(tables: list[Rows]) -> str:
    """Return the runs that ended, as one table; '' where they are too many to be somebody's own."""
    ran = [np.flatnonzero(rows.usable & (rows.step_s > 0)).tolist() for rows in tables]
    if not 0 < sum(map(len, ran)) <= _MOST_OWN_RUNS:
        return ""
    parts = [rows.table.take(index) for rows, index in zip(tables, ran, strict=True)]
    parts = [part for part in parts if all(part.texts.get(name) for name in NEEDED)]
    names = dict.fromkeys(name for part in parts for name in part.texts if name != "row_id")
    texts = {
        name: [cell for part in parts for cell in part.texts.get(name, [""] * part.length)]
        for name in names
    }
    length = sum(part.length for part in parts)
    row_ids = [f"{part.name}:{cell}" for part in parts for cell in part.texts["row_id"]]
    return RowTable("runs", {"row_id": row_ids} | texts, length).csv() if length else ""


def _fixed(text: str) -> tuple[str, float]:
    """'attention=0.9' as a coefficient within the bounds that a fit has too."""
    name, _, number = text.partition("=")
    known = BY_NAME.get(name)
    if known is None:
        hint = f"known: {', '.join(BY_NAME)}"
        raise UserError("does not name a coefficient", field="fix", value=text, hint=hint)
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    rule = f"must be a number from {known.low:g} to {known.high:g}"
    check.that(known.low <= value <= known.high, "fix", text, rule, f"{name}: {known.about}")
    return name, value


def suggest_runs(request: FitRequest, *, on_event: OnEvent = ignore) -> Suggested:
    """By configuration alone, never by results."""
    count = 10 if request.suggest is None else request.suggest
    check.that(count >= 1, "suggest", count, "must be at least 1")
    known = read_calibration(request.prior)
    picks = []
    for rows in _measured_rows(request, on_event):
        pairs = set(zip(rows.measured_as.tolist(), rows.cluster.tolist(), strict=True))
        for runs, place in sorted(pairs, key=lambda pair: (pair[0].text, pair[1])):
            index = np.flatnonzero(
                rows.usable & (rows.measured_as == runs) & (rows.cluster == place)
            )
            if not index.size:
                continue
            entry, _ = known.entry(runs, place, generation_of(str(rows.hardware[index][0])))
            for i in suggest(rows.columns.take(index), entry, count):
                picks.append({n: rows.table.column(n)[index[i]] for n in _SUGGESTED})
    return Suggested(picks)


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One table, or one source of a kind of fold, scored in one way; null where the table has
    nothing to compare with."""

    how: str
    score: Annotated[Score, codec.INLINE]
    free_parameters: str


@dataclass(frozen=True, slots=True)
class Scores(Answer):
    """Scores of tables and of sources; `folds`: each kind of fold, `pairs`: of runs that differ in
    one setting, `undated`: rows that folds by time leave out; None where they were not asked for.
    `results`: with the predictions behind them."""

    TABLE = "scores"
    scores: tuple[ScoreRow, ...]
    folds: tuple[FoldScore, ...] | None
    pairs: tuple[PairScore, ...] | None
    undated: int | None
    results: Annotated[tuple[Result, ...], codec.HIDDEN]

    @classmethod
    def of_results(
        cls, results: tuple[Result, ...], *, pairs: bool, no_date: int | None = None
    ) -> Scores:
        scores = tuple(ScoreRow(one.how, one.score, one.free) for one in results)
        compared = pair_scores(results) if pairs else ()
        return cls(scores, fold_scores(results) or None, compared or None, no_date, results)


def score(request: ScoreRequest, *, on_event: OnEvent = ignore) -> Scores:
    asked = {
        "cv": request.cv,
        "leave-out": request.leave_out,
        "few-shot": request.few_shot,
        "folds": request.folds,
    }
    how = [name for name, is_asked in asked.items() if is_asked]
    known = read_calibration(request.calibration)
    # As 'predict' reads them, where nothing is fitted again by the names in the table.
    tables = [_read(path, on_event, None if how else known) for path in request.rows]
    results = study(tables, known, asked=how, tell=notes(on_event))
    no_date = undated(tables) if request.folds else None
    return Scores.of_results(results, pairs=request.pairs, no_date=no_date)
