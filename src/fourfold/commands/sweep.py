"""Measure many runs; every outcome is stored, and a stopped sweep resumes where it left off.

FILE is a run with a [sweep] table whose lists are the axes; it starts at once. The flag form (-m -s
-b -t -g) follows the MPT scripts and only prints the plan without --run. --from-plan K measures the
planner's K best layouts. A failed configuration is recorded and the sweep goes on. Runs already
finished in the store are skipped, interrupted ones are run again.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.errors import UserError
from fourfold.events import notes
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.show import sweep as shown
from fourfold.spec import codec
from fourfold.verbs.requests import PlanRequest
from fourfold.verbs.run_requests import MPT_GROUP, MptSweep, SweepRequest

EXAMPLES = """\
a FILE.toml (axes are short names, paths such as policy.compile, or "env.NAME"):
  model = "llama-3.1-8b"
  gpus = 8
  steps = 20
  where = ["mem_gb < 75"]
  [batch]
  seq_len = "8k"
  global_batch = 64
  [policy]
  precision = "bf16"
  [sweep]
  tp = [1, 2, 4]
  micro_batch = [1, 2, "auto"]
  sharding = ["zero1", "fsdp"]

examples:
  fourfold sweep sweep.toml --dry-run
  fourfold sweep sweep.toml --where 'mem_gib < 70' --cluster mine.toml
  fourfold sweep -m llama-tiny mpt-tiny -s 6 7 -b 10 10 -t fp32 -g 1 2 --micro-batch 1 2 --tag first
  fourfold sweep --from-plan 3 --model llama-mini --profile profile.json --gpus 4 --seq-len 128 \\
      --global-batch 16 --precision fp32
"""
_PLAN = "the planner's choices (flags as in 'plan'; runs at once)"
# Both other kinds of sweep have these, as lists.
_LISTS = ("--gpus", "--micro-batch")
_RUN = tuple(one for one in options.run_options() if one.names[0] not in (*_LISTS, "--set"))
_FROM_PLAN = (*_RUN, *options.of(PlanRequest, "gpu", "max_nodes", "explore"))
OPTIONS = (
    option("file", "a run with a [sweep] table", "FILE.toml", nargs="?"),
    option("--dry-run", "print what would run, and the predicted time", switch=True),
    *options.of(SweepRequest),
    *options.of(MptSweep),
    *(one for one in options.run_options() if one.names == ("--set",)),
    # Not dest "run": that is the command's own function.
    option("--run", "start the runs (default: only print the plan)", switch=True, dest="start",
           group=MPT_GROUP),
    option("--from-plan", "measure the planner's K best layouts", "K", read=int, group=_PLAN),
    *options.grouped(_FROM_PLAN, _PLAN),
    options.FORMAT,
)  # fmt: skip


def run(args: Any) -> Output:
    show = Stderr()
    request = options.load(SweepRequest, args)
    known = fourfold.predictor(
        cluster=request.cluster, profile=request.profile, calibration=request.calibration
    )
    source = _source(args, request, known, show)
    unstarted = bool(args.models and not args.start)
    if args.dry_run or unstarted:
        plan = fourfold.plan_sweep(source, request, known=known, on_event=show)
        guess = known.is_guess and not known.planned
        return Output.of(plan, lambda: shown.plan_page(plan, is_guess=guess, unstarted=unstarted))
    answer = fourfold.sweep(source, request, known=known, on_event=show)
    show.close()
    return Output.of(answer, lambda: shown.page(answer, request.runs))


def _source(args: Any, request: SweepRequest, known: Any, show: Stderr) -> Any:
    ways = (bool(args.file), bool(args.models), args.from_plan is not None)
    if sum(ways) != 1:
        raise UserError(
            "a sweep needs a FILE.toml, models with -m, or --from-plan K",
            hint="see 'fourfold sweep --help'",
        )
    if args.from_plan is not None:
        return _planned(args, request, known, show)
    used = [one for one in _FROM_PLAN if getattr(args, one.key) is not None]
    if used:
        flag = used[0].names[0]
        hint = f"use --set, or make {flag[2:].replace('-', '_')} an axis of [sweep]"
        raise UserError("needs --from-plan", field=flag, hint=hint)
    if args.models:
        base = options.assigned(args)
        options.put_env(base, args)
        mpt = options.load(MptSweep, args)
        return fourfold.mpt_combinations(mpt, base, request.where)
    data = codec.parse_toml(files.read_text(args.file, field="FILE"))
    options.put_env(data, args)
    return data


def _planned(args: Any, request: SweepRequest, known: Any, show: Stderr) -> Any:
    """One number of ranks, one micro batch or none; the other flags as in 'plan'."""
    lists = {"gpus": args.gpus, "batch.micro_batch": args.micro_batch}
    table = options.run_table(args, without=("gpus", "micro_batch"), note=notes(show))
    for path, values in lists.items():
        name = path.rpartition(".")[2]
        if values and len(values) > 1:
            raise UserError(
                "takes one value with --from-plan",
                field=f"--{name.replace('_', '-')}",
                value=" ".join(map(str, values)),
            )
        if values and values[0] != "auto":
            codec.put(table, path, _whole(name, values[0]))
    machines = options.given(args, "cluster", "gpu", "profile", "calibration", "max_nodes")
    machines |= {"where": request.where, "explore": bool(args.explore)}
    return fourfold.planned_combinations(table, args.from_plan, known, on_event=show, **machines)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, str) and not value.isdecimal():
        raise UserError("must be a whole number", field=name, value=value)
    return int(value)
