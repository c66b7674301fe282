"""What the cost model says beside a plan: trainings, tables of runs, sizes, coverage."""

from __future__ import annotations

import dataclasses
from copy import copy
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.cost.calendar.assumptions import defaults
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.calendar import assumptions_page, calendar_page, calendar_picture
from fourfold.show.pictures import must_be_picture
from fourfold.show.shapes import advice_page
from fourfold.spec import check, codec, texts
from fourfold.text_table import Part, named, table
from fourfold.units import counted
from fourfold.verbs.advise import AdviseRequest
from fourfold.verbs.calendar_request import CalendarRequest, TrainingPhase
from fourfold.verbs.export import Support, SupportRequest, SupportRow
from fourfold.verbs.predict import PredictedTable
from fourfold.verbs.requests import PlanRequest, decided

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_CALENDAR = """\
examples:
  fourfold calendar --model llama-3.1-405b --gpu h100-80gb --gpus 16384 --seq-len 8192 \\
      --global-batch 2048 --stack megatron --tokens 15.6T --price 2.5
  fourfold calendar ... --tokens 2T --deadline 30d --chance 90% --picture days.png
  fourfold calendar ... --tokens 2T --budget 5M --price 2.5 --assume failures_per_gpu_day=1e-3
  fourfold calendar training.toml
  fourfold calendar --assume list
"""
_PLAN = (
    "cluster",
    "gpu",
    "network",
    "profile",
    "calibration",
    "stack",
    "ramp",
    "tokens",
    "price",
    "where",
    "explore",
    "safe",
    "risk",
)


@command(
    option("file", "training description; flags override its fields", "SPEC", nargs="?"),
    *options.run_options(),
    *options.of(PlanRequest, *_PLAN),
    *options.of(CalendarRequest),
    option("--picture", "days against GPUs, with the 80% band", "FILE.png"),
    examples=_CALENDAR,
)
def calendar(args: Arguments, show: OnEvent) -> Output:
    """Days, GPU-hours, cost and energy of a whole training, and how many GPUs it needs.

    Steps come from 'plan', one plan for each phase; batch ramp-ups are summed size by size. Beside
    them stand interruptions, recovery and lost steps, checkpoints (asynchronous, at the best
    interval), spare and slow hosts, evaluations and repeated steps. What is assumed of these has a
    spread and a source, both in 'calendar --assume list'. Intervals hold 8 of 10 trainings.

    SPEC (or --spec) is a run description as plan's, with flags of 'plan' as fields (gpu, tokens,
    price, ...), any number of [[phases]] (tokens, and seq_len, global_batch, ramp or gpus where
    they change) and [assumptions]. Flags override it.
    """
    if args.assume == ["list"]:
        known = codec.encode(defaults())
        rows = [{"name": name, **one} for name, one in known.items() if isinstance(one, dict)]
        return Output(lambda: known, lambda: rows, lambda: assumptions_page(rows))
    if args.picture:
        must_be_picture(args.picture)
    answer = fourfold.calendar(_request(args, show), on_event=show)
    if args.picture:
        drawn = calendar_picture(answer, args.picture)
        files.write_bytes(args.picture, drawn, field="picture")
        show(Event(f"picture in {args.picture}"))
    return Output.of(answer, lambda: calendar_page(answer), status=int(answer.best is None))


def _request(args: Arguments, show: OnEvent) -> CalendarRequest:
    one_file = not (args.file and args.spec)
    check.that(one_file, "--spec", args.spec, f"is beside {args.file}", "write one file of both")
    path, args = args.file or args.spec, copy(args)
    args.spec = None
    if not path:
        return _read(args, {}, show)
    table = texts.read(path, field="SPEC")
    try:
        return _read(args, dict(table), show)
    except UserError as error:
        name = error.field.partition(".")[0].partition("[")[0]
        is_of_file = name in table and getattr(args, name, None) is None
        raise error.inside(path) if is_of_file else error from None


def _read(args: Arguments, table: dict[str, Any], show: OnEvent) -> CalendarRequest:
    phases = codec.decode_value(tuple[TrainingPhase, ...], table.pop("phases", []), "phases")
    assumed = table.pop("assumptions", {})
    check.that(isinstance(assumed, dict), "assumptions", assumed, "must be a table")
    fields = {one.name for one in dataclasses.fields(PlanRequest) if "flag" in one.metadata}
    given = {name: table.pop(name) for name in fields & {*table}}
    given = {name: value for name, value in given.items() if getattr(args, name, None) is None}
    run_table = options.run_table(args, known=table, note=notes(show))
    plan = options.load(PlanRequest, args, **given, **decided(run_table))
    asked = {"phases": phases, "assumptions": assumed, "curve": bool(args.picture)}
    return options.load(CalendarRequest, args, plan=plan, **asked)


_PREDICT = """\
examples:
  fourfold predict rows.csv
  fourfold predict rows.csv --out predicted.csv
  fourfold predict rows.csv --out predicted.csv --calibration mine.json
  fourfold predict rows.csv --out predicted.csv --cluster my64.toml
"""
# The head of every file that this command writes.
_MARK = "row_id,step_s,step_s_low,step_s_high,tokens_s_gpu,tflops_gpu,mfu_pct,mem_gb,fits,"


@command(
    option("rows", "runs to predict, in the reference schema", "ROWS.csv"),
    option("--out", "file for the predictions (default: print them)", "OUT.csv"),
    *options.of(PlanRequest, "cluster", "calibration", rare=False),
    options.FORCE,
    examples=_PREDICT,
)
def predict(args: Arguments, show: OnEvent) -> Output:
    """Predict step time, memory and fit of every row of a table in the reference schema.

    Prints a table; --out writes a CSV, which --format csv prints: row_id,step_s,step_s_low,
    step_s_high,tokens_s_gpu,tflops_gpu,mfu_pct,mem_gb,fits,fit_chance,reason,provenance. The
    interval contains 80% of measured runs. A row that cannot be predicted keeps its line, empty
    except for the reason. mem_gb is in GiB, for the rank the stack prints (rank 0 for nanotron, the
    fullest elsewhere); fits is decided by the fullest stage: a chance of at least a half.
    provenance: measured (this stack, this machine, within measured sizes), near (beyond those
    sizes, or machines like it), blended (its engine elsewhere, or other engines on such GPUs) or
    physics.
    """
    if args.out:
        files.require_mine(args.out, mark=_MARK, force=bool(args.force))
    machine = {"cluster": args.cluster, "calibration": args.calibration}
    answer = fourfold.predict_table(args.rows, **machine, on_event=show)
    if not args.out:
        return Output.of(answer, lambda: _predictions_page(answer))
    files.write_text(args.out, answer.csv())
    show(Event("\n".join([*_prediction_totals(answer), f"wrote: {args.out}"])))
    return Output(raw="")


def _predictions_page(answer: PredictedTable) -> list[Part]:
    columns = named(
        "row=row_id",
        "s/step=step_s:.4g",
        "80% from=step_s_low:.4g",
        "to=step_s_high:.4g",
        "GiB=mem_gb:.4g",
        "fits=fit_chance:.0%",
        "TFLOP/s=tflops_gpu:.4g",
        "MFU %=mfu_pct:.3g",
        "priced by=provenance",
        "remark=reason",
    )
    rows = answer.plain()
    shown = columns if any(row["reason"] for row in rows) else columns[:-1]
    return [table(rows, *shown), "", *_prediction_totals(answer)]


def _prediction_totals(answer: PredictedTable) -> list[str]:
    does_not = answer.predicted - answer.fit - answer.may_fit
    return [
        f"predicted: {answer.predicted} of {counted(len(answer.row_ids), 'row')} "
        f"({answer.fit} fit, {answer.may_fit} uncertain, {does_not} do not fit)",
        f"calibration: {answer.calibration}",
    ]


_ADVISE = """\
examples:
  fourfold advise --gpu a100-80gb --tp 8 --hidden 14400
  fourfold advise --gpu a100-80gb --tp 8 --hidden 13824 --heads 128
  fourfold advise --gpu h100-80gb --model llama-3.1-8b --tp 2 --micro-batch 3 --seq-len 8192
  fourfold advise --gpu b200 --hidden 4096 --experts 128 --expert-ffn 1408 --top-k 8 --ep 8
  fourfold advise --cluster jean-zay --max-nodes 48 --params 176e9 --tokens 350e9 --seq-len 2048 \\
      --global-batch 2048 --tp 8
"""


@command(*options.of(AdviseRequest), examples=_ADVISE)
def advise(args: Arguments, show: OnEvent) -> Output:
    """Find hidden sizes, heads, MLP widths, experts, vocabularies and micro batches that suit a
    GPU.

    Judges sizes against tiles, waves, alignment and kernel rules with the cost model's formulas,
    and names the nearest better value. With --params, --tokens and a machine it compares model
    shapes of about that many parameters, each at its best layout, by days of training.
    """
    answer = fourfold.advise(options.load(AdviseRequest, args), on_event=show)
    return Output.of(answer, lambda: advice_page(answer), status=int(answer.none_fits))


_SUPPORT = """\
examples:
  fourfold support llama-3.1-70b
  fourfold support mixtral-8x7b megatron h100-80gb
"""


@command(*options.of(SupportRequest), examples=_SUPPORT)
def support(args: Arguments, show: OnEvent) -> Output:
    """Show what is known of a model: counted, run, priced and exported, by engine and GPU.

    priced: measured (runs of this engine on these machines), near (on machines like them), blended
    (its engine elsewhere, or other engines on such GPUs) or physics (formulas and data sheets
    alone).
    """
    answer = fourfold.support(options.load(SupportRequest, args))
    return Output.of(answer, lambda: _page(answer))


def _page(answer: Support) -> list[Part]:
    lines: tuple[SupportRow, ...] = answer.lines
    engines = list({line.engine: line for line in lines}.values())
    return [
        f"{answer.model}: {answer.params:,} parameters counted; run by our own engine: "
        f"{answer.runs_here}",
        "",
        "--export writes settings for:",
        *(f"  {line.engine} ({line.release}): {_yes_or_why(line.settings)}" for line in engines),
        "",
        table(lines, *named("engine", "GPU=gpu", "priced", "rows", "by runs of=stack")),
    ]


def _yes_or_why(settings: str) -> str:
    return settings if settings == "yes" else f"no: {settings}"
