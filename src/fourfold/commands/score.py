"""Score predictions against measured tables: error, bias, ranking, regret, fit, coverage.

Without a switch the calibration is used as it is (in-sample for rows it was fitted on). --cv
refits with each fold of layouts held out, --leave-out predicts each table from the others alone,
--few-shot fits the 10 runs per stack and cluster that 'fit --suggest' names. A source is one file;
--folds also leaves out each source in the column of that name, each GPU type, each value of an axis
and the largest worlds. Interval score: width of the 80% interval and ten times what lies outside,
of logarithms, in percent.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.pictures import accuracy_picture
from fourfold.show.table import or_dash, table
from fourfold.verbs.requests import ScoreRequest

EXAMPLES = """\
examples:
  fourfold score tests/golden/mpt.csv tests/golden/bloom.csv
  fourfold score FOLDER/*.csv --cv --leave-out --few-shot --picture accuracy.png --format md
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
        answer.results,
        ("how", lambda one: one.how),
        ("source", lambda one: one.score.source),
        ("rows", lambda one: str(one.score.rows)),
        *(
            (heading, lambda one, n=name, d=digits: or_dash(getattr(one.score, n), f".{d}f"))
            for heading, (name, digits) in _NUMBERS.items()
        ),
        ("free", lambda one: one.free),
    )
    return Output.of(answer, lambda: [scores])
