"""Let planners sit an exam: the same measured runs for everyone, tasks without answers, one scorer.

A season is a folder: tasks.csv (runs in the reference schema, without results), answers.csv, and
entrants/NAME.csv with entrants/NAME.toml, a card. A submission has row_id and step_s, and if it can
step_s_low and step_s_high (80%), mem_gb, fit_chance, as 'fourfold predict tasks.csv' writes them; a
blank step_s declines a task. Missing rows, NaN and negative numbers are errors.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.exam import exam_page, exam_parts
from fourfold.verbs.exam import ExamRequest

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
    if style not in ("html", "md"):
        raise UserError("must end in .html or .md", field="page", value=args.page)
    answer = fourfold.exam(options.load(ExamRequest, args), on_event=show)
    if args.page:
        files.write_text(args.page, exam_page(answer, style))
        show(Event(f"written to {args.page}"))
    return Output.of(answer, lambda: exam_parts(answer))
