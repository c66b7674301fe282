"""The planner's command, and its pages of one layout, of a front and of the largest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.errors import UserError, sentence
from fourfold.events import Event, OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.search.export import AROUND
from fourfold.show.calendar import calendar_page
from fourfold.show.machines import stacks_page
from fourfold.show.pictures import must_be_picture
from fourfold.show.plan import GIB, approximated, evidence, interval_s, layouts_table, page, source
from fourfold.show.schedule_picture import SUFFIXES, picture
from fourfold.text_table import Grid, Part, or_dash
from fourfold.units import counted, short_s, show_count, whole_units
from fourfold.verbs.calendar_request import CalendarRequest
from fourfold.verbs.requests import PlanRequest, decided

if TYPE_CHECKING:
    from fourfold.cost.predict import OpRow
    from fourfold.flag import Arguments
    from fourfold.search.explain import Explanation
    from fourfold.search.plan_answer import PlanRow
    from fourfold.verbs.front import Front, Largest


_PLAN = """\
examples:
  fourfold plan --model gpt-3-175b --cluster jean-zay --gpus 384 --seq-len 2048 --global-batch 2048
  fourfold plan --model llama-3.1-8b --gpu h100-80gb --gpus 64 --seq-len 8192 --global-batch 512 \\
      --stack megatron --tokens 1T --price 2.5
  fourfold plan --model bloom-176b --cluster jean-zay --max-nodes 48 --seq-len 2048 \\
      --global-batch 2048 --ramp 192,16,9765625 --where "dp % 4 == 0" --top 5
  fourfold plan ... --explain "pp12 dp4 tp8" --timeline schedule.html
  fourfold plan ... --export megatron --out settings && bash settings/run.sh --mock-data
"""


@command(
    *options.run_options(),
    *options.of(PlanRequest),
    *options.of(CalendarRequest, "deadline", "budget", "chance", rare=True),
    option("--front", "the fastest layouts for less memory or GPUs", choices=("memory", "gpus")),
    option(
        "--largest",
        "the longest sequence or largest model that still fits",
        choices=("sequence", "model"),
    ),
    option("--explain", "explain one layout, or why it is illegal", "LAYOUT"),
    option(
        "--operations",
        "with --explain: list every operation of a rank's step",
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
    examples=_PLAN,
)
def plan(args: Arguments, show: OnEvent) -> Output:
    """Find the fastest layout for a model on these GPUs, and whether it fits.

    Every legal layout is checked against memory and its step time predicted. The first is the
    fastest that is 90% likely to fit and that --export writes; within 2% of that, the one with the
    fewest model-parallel ranks (pp x cp x tp), then the likeliest to fit. Axes, sizes and policies
    given by flags are fixed, the search chooses the others.
    """
    if args.stack == "list":
        known = fourfold.stacks(**options.given(args, "cluster", "gpu", "profile", "calibration"))
        return Output.of(known, lambda: stacks_page(known.stacks))
    _one_question(args)
    given = decided(options.run_table(args, note=notes(show)))
    given |= {"ramp": args.ramp} if args.ramp else {}
    return _answered(args, options.load(PlanRequest, args, **given), show)


# What has an answer of its own; options that say more of one -> which.
_QUESTIONS = ("front", "largest", "deadline", "budget", "explain", "export", "html")
_PARTS = {
    "timeline": ("explain",),
    "operations": ("explain",),
    "out": ("export",),
    "job": ("export",),
    "pick": ("export",),
    "open": ("html",),
    "chance": ("deadline", "budget"),
}


def _one_question(args: Arguments) -> None:
    """Refuse options that the answer would leave out."""
    asked = [name for name in _QUESTIONS if getattr(args, name) is not None]
    if len(asked) > 1 and asked != ["deadline", "budget"]:
        rule, hint = f"does not go with --{asked[0]}", "ask one after the other"
        raise UserError(rule, field=f"--{asked[-1]}", hint=hint)
    for name, needs in _PARTS.items():
        if getattr(args, name) is not None and not {*needs} & {*asked}:
            raise UserError(f"needs {' or '.join(f'--{one}' for one in needs)}", field=f"--{name}")


def _answered(args: Arguments, request: PlanRequest, show: OnEvent) -> Output:
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
    if args.export:
        return _export(args, request, show)
    if args.html:
        from fourfold.page.plan import write_plan

        called, opened, force = _called(request), bool(args.open), bool(args.force)
        answer = write_plan(request, args.html, called, browser=opened, force=force, on_event=show)
    else:
        answer = fourfold.plan(request, on_event=show, second_process=True)
    status, details = 0 if answer.ranked else 1, bool(args.details)
    return Output.of(answer, lambda: page(answer, details=details), status=status)


def _explain(args: Arguments, request: PlanRequest, show: OnEvent) -> Output:
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


def _called(request: PlanRequest) -> str:
    """The model, by the user; a changed preset has a name of its own."""
    return request.model if isinstance(request.model, str) else ""


def _export(args: Arguments, request: PlanRequest, show: OnEvent) -> Output:
    """The chosen layout as files in --out, or as one text on stdout."""
    settings = fourfold.export(
        request, pick=args.pick or 1, name=_called(request), job=args.job or "", on_event=show
    )
    written = settings.write(Path(args.out), force=bool(args.force)) if args.out else ""
    for note in filter(None, (*settings.notes, written)):
        show(Event(note))
    return Output(raw="" if args.out else settings.script)


def explain_page(answer: Explanation) -> list[Part]:
    if not answer.legal:
        near = "; ".join(answer.nearest) or "none with these GPUs and this batch"
        return [
            f"{answer.layout} is illegal:",
            *(
                f"  [{why['reason']}] "
                f"{sentence(why['rule'], field=why['field'], value=why['value'])}; {why['hint']}"
                for why in answer.refusals
            ),
            f"nearest legal: {near}",
        ]
    small = answer.smallest
    if small is not None:
        kinds = ", ".join(f"{n} {b / GIB:.1f}" for n, b in small.memory_bytes.items())
        return [
            f"{answer.layout} is legal but does not fit: at micro batch {small.micro_batch}, "
            f"{small.sharding}, recompute {small.recompute} its fullest rank needs "
            f"{small.peak_bytes / GIB:.1f} GiB of "
            f"{min(small.limit_bytes, answer.memory_bytes) / GIB:.1f}",
            f"GiB by kind: {kinds}",
            *approximated(answer.remarks),
            f"nearest that fit: {'; '.join(answer.nearest) or 'none'}",
        ]
    assert answer.row is not None
    return _explained(answer, answer.row, answer.best or answer.row)


def operations_table(rows: Sequence[OpRow]) -> Grid:
    """Milliseconds in whole microseconds, which add up to the last row."""
    units = whole_units([row.step_s for row in rows], 1e-6)
    lines = [
        [
            row.name,
            row.axis or row.kind,
            row.phase,
            f"{row.times:.10g}",
            _size(row),
            or_dash(row.keeps / 1e6 or None, ".1f"),
            f"{unit / 1e3:.3f}",
        ]
        for row, unit in zip(rows, units, strict=True)
    ]
    total = ["step", *[""] * 5, f"{sum(units) / 1e3:.3f}"]
    heads = ["operation", "kind or axis", "pass", "times", "m x n x k, MB", "keeps MB", "ms"]
    return Grid(heads, [*lines, total])


def _size(row: OpRow) -> str:
    shape = " x ".join(f"{size:.0f}" for size in row.shape)  # rows of an expert are a mean
    return shape or or_dash(row.bytes / 1e6 or None, ".1f")


def _component(name: str) -> str:
    """Return how a component of seconds or memory is called: 'GEMM', 'tp communication'."""
    return {"gemm": "GEMM"}.get(name, name.replace("comm", "communication").replace("_", " "))


def _explained(answer: Explanation, row: PlanRow, best: PlanRow) -> list[Part]:
    parts = [
        [
            _component(name),
            short_s(row.parts_s[name]),
            short_s(best.parts_s[name]),
            f"{row.parts_s[name] - best.parts_s[name]:+.2f}",
        ]
        for name in row.parts_s
        if max(row.parts_s[name], best.parts_s[name]) > 0.0005 * row.step_s
    ]
    memory = [[_component(name), f"{size / GIB:.2f}"] for name, size in row.memory_bytes.items()]
    unproven = " (including unmeasured features)" if answer.with_unproven else ""
    slower = 100 * (row.step_s / best.step_s - 1)
    why = f" ({answer.held_back})" if answer.held_back else ""
    against = f"{slower:+.1f}%{why} against the first choice, {best} micro batch {best.micro_batch}"
    place = f"place {answer.rank:,} of {counted(answer.of or 0, 'layout')} by seconds"
    sure = f"; differences below {answer.tie_width_pct:.1f}% are within the error"
    is_first = (row.layout, row.policy, row.micro_batch) == (
        best.layout,
        best.policy,
        best.micro_batch,
    )
    return [
        f"{row}, micro batch {row.micro_batch}, {row.policy.sharding}, recompute "
        f"{row.policy.recompute}: the best of {counted(answer.ways or 0, 'variant')}",
        f"{interval_s(row)}, {place}{unproven}; "
        f"{row.tflops_gpu:.0f} TFLOP/s/GPU; {'the first choice' if is_first else against + sure}",
        *([f"optimizer {row.policy.optimizer_name}"] if row.policy.optimizer == "muon" else []),
        *approximated(answer.remarks),
        "",
        Grid(["part", "s", "best s", "difference"], parts),
        "",
        f"fullest rank {row.peak_bytes / GIB:.1f} GiB (80%: {row.peak_bytes_low / GIB:.0f} "
        f"to {row.peak_bytes_high / GIB:.0f} of {answer.memory_bytes / GIB:.0f}):",
        Grid(["kind", "GiB"], memory),
        "",
        "its best variants:",
        layouts_table(answer.variants or ()),
        "",
        f"evidence: {evidence(row)}",
        *(["", operations_table(answer.operations)] if answer.operations else []),
    ]


def front_page(front: Front) -> list[Part]:
    if not front.points:
        return [f"{front.asked.reason[:1].upper()}{front.asked.reason[1:]}"]
    first, last = front.points[0], front.points[-1]
    what = {
        "memory": "the fastest layouts for less and less memory",
        "gpus": "the first choice on fewer and fewer GPUs",
    }[front.against]
    slower = f"{last.row.step_s / first.row.step_s:.3g} times as long"
    return [
        f"{front.asked.model}: {what}; the last takes {slower}.",
        "",
        layouts_table([one.row for one in front.points], is_front=True),
        "",
        source(front.asked),
    ]


def largest_page(found: Largest) -> list[Part]:
    shape = f"{counted(found.model.layers, 'layer')} of {found.model.hidden}"
    best = found.plan.best
    # Sizes are tried until none more likely fits than not, or none surely does.
    sure = f"fits with a chance of {100 * best.fit_chance:.0f}%" if best is not None else "fits"
    sequences = f"{found.plan.global_batch} sequence{'s' * (found.plan.global_batch > 1)}"
    what = (
        f"The longest sequence is {found.seq_len:,} tokens ({sequences} per step); it {sure}"
        if found.of == "sequence"
        else f"The largest model has {show_count(found.params)} parameters ({shape}); it {sure}"
    )
    return [f"{what}.", "", *page(found.plan)]
