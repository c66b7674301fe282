"""Find the fastest layout for a model on these GPUs, and whether it fits.

Every legal layout is checked for memory and timed; the first is the fastest that is 90% sure to fit
and that an engine with exported settings can run. Axes, sizes and policies given by flags are
fixed, the search chooses the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.search.export import AROUND
from fourfold.show import plan as shown
from fourfold.show.calendar import calendar_page
from fourfold.show.explain import explain_page, front_page, largest_page
from fourfold.show.machines import stacks_page
from fourfold.show.pictures import must_be_picture
from fourfold.show.schedule_picture import SUFFIXES, picture
from fourfold.verbs.calendar_request import CalendarRequest
from fourfold.verbs.requests import PlanRequest, decided

EXAMPLES = """\
examples:
  fourfold plan --model gpt-3-175b --cluster jean-zay --gpus 384 --seq-len 2048 --global-batch 2048
  fourfold plan --model llama-3.1-8b --gpu h100-80gb --gpus 64 --seq-len 8192 --global-batch 512 \\
      --stack megatron --tokens 1T --price 2.5
  fourfold plan --model bloom-176b --cluster jean-zay --max-nodes 48 --seq-len 2048 \\
      --global-batch 2048 --ramp 192,16,9765625 --where "dp % 4 == 0" --top 5
  fourfold plan ... --explain "pp12 dp4 tp8" --timeline schedule.html
  fourfold plan ... --export megatron --out settings && bash settings/run.sh --mock-data
"""
OPTIONS = (
    *options.run_options(),
    *options.of(PlanRequest),
    *options.of(CalendarRequest, "deadline", "budget", "chance", rare=True),
    option("--front", "the fastest layouts for less memory or GPUs", choices=("memory", "gpus")),
    option("--largest", "the largest of it that still fits", choices=("sequence", "model")),
    option("--explain", "explain one layout, or why it is illegal", "LAYOUT"),
    option(
        "--operations",
        "with --explain: what a rank does in a step, one by one",
        switch=True,
        rare=True,
    ),
    option("--timeline", "with --explain: draw the pipeline, .html or .png", "FILE", rare=True),
    option("--out", "folder for --export; file for torchrun (default stdout)", "PATH", rare=True),
    option(
        "--job", "with --export: a job that runs it, as one file", choices=tuple(AROUND), rare=True
    ),
    option("--pick", "which ranked layout --export writes (default 1)", "N", read=int, rare=True),
    option("--html", "write one page: the answer, charts, settings for every engine", "FILE"),
    option("--open", "with --html: show the page in a browser", switch=True, rare=True),
    option("--details", "all columns, evidence, sensitivity and search statistics", switch=True),
    options.FORCE,
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    if args.stack == "list":
        known = fourfold.stacks(**options.given(args, "cluster", "gpu", "profile", "calibration"))
        return Output.of(known, lambda: stacks_page(known.stacks))
    given = decided(options.run_table(args, note=notes(show)))
    given |= {"ramp": args.ramp} if args.ramp else {}
    request = options.load(PlanRequest, args, **given)
    if args.front:
        front = fourfold.front(request, args.front, on_event=show)
        return Output.of(front, lambda: front_page(front), 0 if front.points else 1)
    if args.largest:
        found = fourfold.largest(request, args.largest, on_event=show)
        return Output.of(found, lambda: largest_page(found))
    if args.deadline is not None or args.budget is not None:
        dated = fourfold.calendar(options.load(CalendarRequest, args, plan=request), on_event=show)
        return Output.of(dated, lambda: calendar_page(dated), status=int(dated.best is None))
    if args.explain:
        return _explain(args, request, show)
    for name in ("timeline", "operations"):
        if getattr(args, name):
            raise UserError("needs --explain", field=f"--{name}", hint="add --explain 'pp4 dp2'")
    if args.export:
        return _export(args, request, show)
    if args.html:
        from fourfold.page.plan import write_plan

        name, opened, force = args.model or "", bool(args.open), bool(args.force)
        answer = write_plan(request, args.html, name, browser=opened, force=force, on_event=show)
    else:
        answer = fourfold.plan(request, on_event=show)
    status, details = 0 if answer.ranked else 1, bool(args.details)
    return Output.of(answer, lambda: shown.page(answer, details=details), status=status)


def _explain(args: Any, request: PlanRequest, show: OnEvent) -> Output:
    if args.timeline:
        must_be_picture(args.timeline, "timeline", SUFFIXES)
    draw, listed = bool(args.timeline), bool(args.operations)
    explained = fourfold.explain(request, args.explain, draw=draw, operations=listed, on_event=show)
    if explained.timeline is not None:
        drawn = picture(explained.timeline, args.timeline)
        files.write_bytes(args.timeline, drawn, field="timeline")
        show(Event(f"timeline: {args.timeline}"))
    answer = explained.explanation
    return Output.of(answer, lambda: explain_page(answer), status=int(not answer.fits))


def _export(args: Any, request: PlanRequest, show: OnEvent) -> Output:
    """The chosen layout as files in --out, or as one text on stdout."""
    settings = fourfold.export(
        request, pick=args.pick or 1, name=args.model or "", job=args.job or "", on_event=show
    )
    written = settings.write(Path(args.out), force=bool(args.force)) if args.out else ""
    for note in filter(None, (*settings.notes, written)):
        show(Event(note))
    return Output(raw="" if args.out else settings.script)
