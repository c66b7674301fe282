"""The cost model against measured runs: fitted, scored, compared with other planners."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.cost.fit.accuracy import FoldScore, Score
from fourfold.cost.fit.folds import KINDS, MANY_ROWS
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.pictures import accuracy_picture
from fourfold.spec import check
from fourfold.text_table import Grid, named, or_dash, table
from fourfold.units import counted
from fourfold.verbs.fit import Scores
from fourfold.verbs.requests import FitRequest, ScoreRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_FIT = """\
examples:
  fourfold fit measured.csv --out mine.json
  fourfold fit measured.csv --prior mine.json --out better.json
  fourfold fit candidates.csv --suggest 10
"""


@command(
    *options.of(FitRequest),
    option("--out", "file for the calibration (JSON)", "FILE"),
    options.FORCE,
    examples=_FIT,
)
def fit(args: Arguments, show: OnEvent) -> Output:
    """Fit the cost model to measured runs: a calibration for every stack and cluster.

    At most 6 coefficients for time and 3 for memory are free per stack and cluster, never more than
    it has rows: those that explain most. The others follow what is known of similar stacks (or
    --prior). The file stores coefficients, what they leave unexplained, ranges of the rows and
    cross-validated errors; 'predict', 'plan' and 'score' take it as --calibration.

    --suggest K fits nothing: it names the K runs of the table that are most informative to measure.
    It uses configurations only, never results.
    """
    request = options.load(FitRequest, args)
    if request.suggest is not None:
        picks = fourfold.suggest_runs(request, on_event=show)
        rows = [[*map(str, row.values())] for row in picks.suggested]
        names = [*picks.suggested[0]] if rows else ["row_id"]
        return Output.of(picks, lambda: [Grid(names, rows)])
    check.given(args.out, "out")
    files.require_mine(args.out, mark='"type": "Calibration"', force=bool(args.force))
    answer = replace(fourfold.fit(request, on_event=show), out=args.out)
    files.write_text(args.out, answer.json())
    show(Event(f"written to {args.out}"))
    columns = (
        *named("stack", "cluster", "rows"),
        ("free", lambda key: f"{len(key.free_time)}+{len(key.free_memory)}"),
        *named("cv median %=errors_pct.cv_median_pct:.1f", "cv p90 %=errors_pct.cv_p90_pct:.1f"),
    )
    return Output.of(answer, lambda: [table(answer.entries, *columns)])


_SCORE = """\
examples:
  fourfold score tests/golden/mpt.csv tests/golden/bloom.csv
  fourfold score FOLDER/*.csv --cv --leave-out --few-shot --picture accuracy.png --format md
  fourfold score FOLDER/*.csv --folds
  fourfold score FOLDER/moe.csv --cv --pairs
"""
_NUMBERS = named(
    "how",
    "source=score.source",
    "rows=score.rows",
    "median %=score.median_pct:.1f",
    "p90 %=score.p90_pct:.1f",
    "bias %=score.bias_pct:.1f",
    "in interval %=score.coverage_pct:.0f",
    "interval score=score.interval_score:.1f",
    "rank corr.=score.rank_correlation:.2f",
    "regret %=score.regret_pct:.2f",
    "groups=score.groups:.0f",
    "memory %=score.memory_pct:.1f",
    "fit %=score.fit_pct:.1f",
    "refused %=score.refused_pct:.1f",
    "missed %=score.missed_pct:.1f",
    "unsure %=score.unsure_pct:.1f",
    "free=free_parameters",
)


@command(
    *options.of(ScoreRequest),
    option("--picture", "predicted against measured", "FILE.png"),
    examples=_SCORE,
)
def score(args: Arguments, show: OnEvent) -> Output:
    """Score predictions against measured tables: error, bias, ranking, regret, fit, coverage.

    Without a switch the calibration is used as it is (in-sample for rows it was fitted on). --cv
    refits with each fold of layouts held out, --leave-out predicts each table from the others
    alone, --few-shot fits the 10 runs per stack and cluster that 'fit --suggest' names. A source is
    one file. --folds leaves out each layout, neighbourhoods (all runs that share all but one
    setting), each source (the column of that name), GPU type, engine and cluster at once (abroad),
    family of engines, year from 2024 on (with all that ran later; rows without one are in none of
    these), model, value of tp, cp, pp, sequence, range of dp, nodes and model size, and the largest
    worlds: a table of all kinds of folds, sources alike (pooled: all rows alike), and one of all
    sources (each source in each kind: --format json). --pairs: of runs over 2% apart of which all
    but one setting (micro batch, precision, recompute, dispatcher, overlap, routing, capacity) are
    the same, whether the faster one was predicted to be, and by how much their ratio was missed.
    Score: width of the 80% interval and ten times what lies outside, of logarithms, in percent.
    """
    answer = fourfold.score(options.load(ScoreRequest, args), on_event=show)
    if args.picture:
        drawn = accuracy_picture(answer.results, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
        show(Event(f"picture in {args.picture}"))
    scores = table((row for row in answer.scores if row.how not in KINDS), *_NUMBERS)
    more = [part for grid in (*_pairs_tables(answer), *fold_tables(answer)) for part in ("", grid)]
    if answer.undated:
        more += ["", f"{counted(answer.undated, 'row')} without a date in no fold by time"]
    return Output.of(answer, lambda: [scores, *more])


def _pairs_tables(answer: Scores) -> list[Grid]:
    numbers = named("signs right %=signs_pct:.0f", "ratio off by %=ratio_pct:.1f")
    grid = table(answer.pairs or (), *named("how", "one setting=knob", "pairs"), *numbers)
    return [grid] if answer.pairs else []


def fold_tables(answer: Scores) -> list[Grid]:
    """Of all kinds of folds, and of all sources; none where no folds were asked for."""
    return [_kinds_table(answer), _sources_table(answer)] if answer.folds else []


def _kinds_table(answer: Scores) -> Grid:
    return table(
        answer.folds or (),
        *named("left out=left_out", "sources", "rows"),
        *named("median %=median_pct:.1f", "pooled %=pooled_pct:.1f", "p90 %=p90_pct:.1f"),
        *named("inside %=coverage_pct:.0f"),
        (f"of {MANY_ROWS}+ rows", _range),
        *named("width %=width_pct:.0f", "score=interval_score:.0f"),
    )


def _range(one: FoldScore) -> str:
    """Shares in the interval of the sources with many rows."""
    least, most = (or_dash(v, ".0f") for v in (one.least_pct, one.most_pct))
    return f"{least} to {most}" if least != "-" else "-"


def _sources_table(answer: Scores) -> Grid:
    """Each source held out by layout, left out, and with its engine and cluster left out: median
    and share in the interval."""
    kinds = ("layout", "source", "abroad")
    # Two tables may have rows of one source.
    by_kind = {(row.how, row.score.source, row.score.rows): row.score for row in answer.scores}
    sources = [row.score for row in answer.scores if row.how == "layout"]
    columns = named("source", "rows")
    for kind in kinds:
        for heading, name, digits in (("%", "median_pct", 1), ("inside", "coverage_pct", 0)):

            def cell(one: Score, kind: str = kind, name: str = name, d: int = digits) -> str:
                same = by_kind.get((kind, one.source, one.rows))
                return or_dash(getattr(same, name, None), f".{d}f")

            columns.append((f"{kind} {heading}", cell))
    return table(sorted(sources, key=lambda one: -one.rows), *columns)
