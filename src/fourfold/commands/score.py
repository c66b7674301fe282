"""Score predictions against measured tables: error, bias, ranking, regret, fit, coverage.

Without a switch the calibration is used as it is (in-sample for rows it was fitted on). --cv
refits with each fold of layouts held out, --leave-out predicts each table from the others alone,
--few-shot fits the 10 runs per stack and cluster that 'fit --suggest' names. A source is one file.
--folds leaves out each layout, source (the column of that name), GPU type, value of tp, cp, pp,
sequence, range of dp, nodes and model size, and the largest worlds: a table of all kinds of folds,
sources alike, and one of all sources (each source in each kind: --format json). Nested: in the
interval when what sets its width knows nothing of the source ('-' where there is no other source).
Interval score: width of the 80% interval and ten times what lies outside, of logarithms, in
percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.cost.fit.fold_scores import FoldScore
from fourfold.cost.fit.folds import KINDS
from fourfold.cost.fit.widths import MANY_ROWS
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.pictures import accuracy_picture
from fourfold.show.table import Column, Grid, or_dash, table
from fourfold.verbs.requests import ScoreRequest

EXAMPLES = """\
examples:
  fourfold score tests/golden/mpt.csv tests/golden/bloom.csv
  fourfold score FOLDER/*.csv --cv --leave-out --few-shot --picture accuracy.png --format md
  fourfold score FOLDER/*.csv --folds
"""
OPTIONS = (
    *options.of(ScoreRequest),
    option("--picture", "predicted against measured", "FILE.png"),
    options.FORMAT,
)
# Heading -> field of a score, digits.
_NUMBERS = {
    "median %": ("median_pct", 1),
    "p90 %": ("p90_pct", 1),
    "bias %": ("bias_pct", 1),
    "in interval %": ("coverage_pct", 0),
    "interval score": ("interval_score", 1),
    "rank corr.": ("rank_correlation", 2),
    "regret %": ("regret_pct", 2),
    "groups": ("groups", 0),
    "memory %": ("memory_pct", 1),
    "fit %": ("fit_pct", 1),
    "refused %": ("refused_pct", 1),
    "missed %": ("missed_pct", 1),
    "unsure %": ("unsure_pct", 1),
}


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.score(options.load(ScoreRequest, args), on_event=show)
    if args.picture:
        drawn = accuracy_picture(answer.results, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
        show(Event(f"picture in {args.picture}"))
    scores = table(
        [one for one in answer.results if one.how not in KINDS],
        ("how", lambda one: one.how),
        ("source", lambda one: one.score.source),
        ("rows", lambda one: str(one.score.rows)),
        *(
            (heading, lambda one, n=name, d=digits: or_dash(getattr(one.score, n), f".{d}f"))
            for heading, (name, digits) in _NUMBERS.items()
        ),
        ("free", lambda one: one.free),
    )
    folds = [part for grid in fold_tables(answer.folds) for part in ("", grid)]
    return Output.of(answer, lambda: [scores, *folds])


def fold_tables(folds: Sequence[FoldScore]) -> list[Grid]:
    """Of all kinds of folds, and of all sources; none where no folds were asked for."""
    return [_kinds_table(folds), _sources_table(folds)] if folds else []


def _kinds_table(folds: Sequence[FoldScore]) -> Grid:
    return table(
        [one for one in folds if not one.source],
        ("left out", lambda one: one.left_out),
        ("sources", lambda one: str(one.sources)),
        ("rows", lambda one: str(one.rows)),
        ("median %", lambda one: f"{one.median_pct:.1f}"),
        ("p90 %", lambda one: f"{one.p90_pct:.1f}"),
        ("inside %", lambda one: f"{one.inside_pct:.0f}"),
        ("nested %", lambda one: or_dash(one.nested_pct, ".0f")),
        (f"of {MANY_ROWS}+ rows", _range),
        ("width %", lambda one: f"{one.width_pct:.0f}"),
        ("score", lambda one: f"{one.interval_score:.0f}"),
    )


def _range(one: FoldScore) -> str:
    """Nested shares of the sources with many rows."""
    least, most = (or_dash(v, ".0f") for v in (one.nested_least_pct, one.nested_most_pct))
    return f"{least} to {most}" if least != "-" else "-"


def _sources_table(folds: Sequence[FoldScore]) -> Grid:
    """Each source held out by layout, and left out: median, 90% and share in the interval."""
    by_kind = {(one.left_out, one.source): one for one in folds}
    sources = [one for one in folds if one.left_out == "layout" and one.source]
    columns: list[Column] = [
        ("source", lambda one: one.source),
        ("rows", lambda one: str(one.rows)),
    ]
    for kind in ("layout", "source"):
        for heading, name, digits in (
            ("%", "median_pct", 1),
            ("p90", "p90_pct", 0),
            ("nested", "nested_pct", 0),
        ):

            def cell(one: FoldScore, kind: str = kind, name: str = name, d: int = digits) -> str:
                same = by_kind.get((kind, one.source))
                return or_dash(getattr(same, name, None), f".{d}f")

            columns.append((f"{kind} {heading}", cell))
    return table(sorted(sources, key=lambda one: -one.rows), *columns)
