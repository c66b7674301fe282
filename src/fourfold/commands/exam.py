"""Let planners sit an exam: the same measured runs for everyone, tasks without answers, one scorer.

A season is a folder: tasks.csv (runs in the reference schema, without results), answers.csv, and
entrants/NAME.csv with entrants/NAME.toml, a card. A submission has row_id and step_s, and if it can
step_s_low and step_s_high (80%), mem_gb, fit_chance, as 'fourfold predict tasks.csv' writes them; a
blank step_s declines a task. Missing rows, NaN and negative numbers are errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold import files, options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.page.document import asset, grid_html, still_document
from fourfold.show.table import Grid, Part, named, or_dash, render, table
from fourfold.spec import check
from fourfold.verbs.exam import ExamRequest

if TYPE_CHECKING:
    from fourfold.verbs.exam import Entrant, Exam


EXAMPLES = """\
examples:
  fourfold exam --sit --page results.html
  fourfold exam exam/season1 --check mine.csv
  fourfold exam exam/season2 --new measured.csv other.csv
"""
OPTIONS = (
    *options.of(ExamRequest),
    option("--page", "write the results as one page, .html or .md", "FILE"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    style = (args.page or ".md").rpartition(".")[2]
    check.that(style in ("html", "md"), "page", args.page, "must end in .html or .md")
    answer = fourfold.exam(options.load(ExamRequest, args), on_event=show)
    if args.page:
        files.write_text(args.page, exam_page(answer, style))
        show(Event(f"written to {args.page}"))
    return Output.of(answer, lambda: exam_parts(answer))


_RESULTS = named(
    "entrant=card.name", "median %=common.median_pct:.1f", "p90 %=common.p90_pct:.1f",
    "bias %=common.bias_pct:.1f", "rank corr.=common.rank_correlation:.2f",
    "regret %=common.regret_pct:.1f", "fit right %=common.fit_pct:.0f",
    "in 80% interval=common.coverage_pct:.0f", "its width %=common.width_pct:.0f",
    "memory %=common.memory_pct:.1f", "declined",
)  # fmt: skip


def exam_parts(answer: Exam) -> Iterable[Part]:
    yield (
        f"{answer.season}: {answer.tasks} tasks, {answer.timed} timed; {answer.common} timed rows "
        f"that every entrant answered; {answer.seen} rows were seen by fourfold's shipped "
        "calibration (marked in answers.csv)"
    )
    yield ""
    yield table(answer.entrants, *_RESULTS)
    yield ""
    yield "All rows that an entrant answered, by source: median error, rank correlation, regret"
    yield ""
    yield _by_source(answer)
    yield ""
    for one in answer.entrants:
        card = one.card
        by = f" ({', '.join(filter(None, (card.by, card.version)))})" if card.by else ""
        link = f" {card.url}" if card.url else ""
        yield f"{card.name}{by}: {card.how or 'no card'}. Saw: {card.saw}.{link}"


def _by_source(answer: Exam) -> Grid:
    columns = named("entrant=card.name")
    for source in answer.entrants[0].by_source:

        def cell(one: Entrant, source: str = source) -> str:
            found = one.by_source[source]
            said = (
                or_dash(found.median_pct, ".1f"),
                or_dash(found.rank_correlation, ".2f"),
                or_dash(found.regret_pct, ".1f"),
            )
            return " / ".join(said) if found.rows else "-"

        columns.append((source, cell))
    return table(answer.entrants, *columns)


_INTRO = (
    "Planners predict runs that others measured and published: seconds per step, memory, whether "
    "it fits. Tasks, answers, submissions and cards are files; anyone may enter. It is the only "
    "published blind exam that we know. Season 1 was public before it was an exam: each card says "
    "what of it the entrant saw. The error is of seconds per step; rank correlation (Kendall's "
    "tau) and regret are of layouts that compete for one model on the same GPUs; regret is the "
    "time that the entrant's first choice loses against the best measured one."
)


def exam_page(answer: Exam, style: str) -> str:
    """One file: 'html' or 'md'."""
    parts = [_INTRO, "", *exam_parts(answer)]
    if style == "md":
        written = [render(*one, style) if isinstance(one, Grid) else one for one in parts]
        return "\n".join(["# Exam of planners", "", *written]) + "\n"
    body = "\n".join(
        grid_html(one) if isinstance(one, Grid) else f"<p>{escape(one)}</p>" for one in parts if one
    )
    title = "Exam of planners"
    return still_document(title=title, style=asset("exam.css"), body=f"<h1>{title}</h1>\n{body}\n")
