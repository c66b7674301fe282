"""Days, GPU-hours, cost and energy of a whole training, and how many GPUs it needs.

Steps come from 'plan', one plan for each phase; batch ramp-ups are summed size by size. Beside them
stand interruptions, recovery and lost steps, checkpoints (asynchronous, at the best interval),
spare and slow hosts, evaluations and repeated steps. What is assumed of these has a spread and a
source, both in 'calendar --assume list'. Intervals hold 8 of 10 trainings.

SPEC is a run description as --spec takes it, with flags of 'plan' as fields (gpu, tokens, price,
...), any number of [[phases]] (tokens, and seq_len, global_batch, ramp or gpus where they change)
and [assumptions]. Flags override it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.cost.calendar.assumptions import defaults
from fourfold.errors import UserError
from fourfold.events import Event, OnEvent, notes
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.calendar import assumptions_page, calendar_page, calendar_picture
from fourfold.show.pictures import must_be_picture
from fourfold.spec import check, codec
from fourfold.verbs.calendar_request import CalendarRequest, TrainingPhase
from fourfold.verbs.requests import PlanRequest, decided

EXAMPLES = """\
examples:
  fourfold calendar --model llama-3.1-405b --gpu h100-80gb --gpus 16384 --seq-len 8192 \\
      --global-batch 2048 --stack megatron --tokens 15.6T --price 2.5
  fourfold calendar ... --tokens 2T --deadline 30d --chance 90% --picture days.png
  fourfold calendar ... --tokens 2T --budget 5M --price 2.5 --assume failures_per_gpu_day=1e-3
  fourfold calendar training.toml
  fourfold calendar --assume list
"""
_PLAN = (
    "cluster", "gpu", "network", "profile", "calibration", "stack", "ramp", "tokens", "price",
    "where", "explore", "safe", "risk",
)  # fmt: skip
OPTIONS = (
    option("file", "training description; flags override its fields", "SPEC", nargs="?"),
    *options.run_options(),
    *options.of(PlanRequest, *_PLAN),
    *options.of(CalendarRequest),
    option("--picture", "days against GPUs, with the 80% band", "FILE.png"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
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


def _request(args: Any, show: OnEvent) -> CalendarRequest:
    table: dict[str, Any] = {}
    if args.file:
        try:
            table = codec.parse_toml(files.read_text(args.file, field="SPEC"))
            return _read(args, table, show)
        except UserError as error:
            raise error.inside(args.file) if error.field in table else error from None
    return _read(args, table, show)


def _read(args: Any, table: dict[str, Any], show: OnEvent) -> CalendarRequest:
    phases = codec.decode_value(tuple[TrainingPhase, ...], table.pop("phases", []), "phases")
    assumed = table.pop("assumptions", {})
    check.that(isinstance(assumed, dict), "assumptions", assumed, "must be a table")
    hints = codec.type_hints(PlanRequest)
    fields = {one.name for one in dataclasses.fields(PlanRequest) if "flag" in one.metadata}
    given = {
        name: codec.decode_value(hints[name], table.pop(name), name)
        for name in list(table)
        if name in fields
    }
    run_table = options.run_table(args, known=table, note=notes(show))
    plan = options.load(PlanRequest, args, **given_by_file(args, given), **decided(run_table))
    asked = {"phases": phases, "assumptions": assumed, "curve": bool(args.picture)}
    return options.load(CalendarRequest, args, plan=plan, **asked)


def given_by_file(args: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the file says and no flag overrides."""
    return {name: value for name, value in given.items() if getattr(args, name, None) is None}
