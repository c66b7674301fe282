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
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show import runs
from fourfold.spec import codec
from fourfold.verbs.run_requests import MPT_GROUP, MptSweep, PlanSweep, SweepRequest

EXAMPLES = """\
a FILE.toml (axes are short names, paths such as policy.compile, or "env.NAME"):
  model = "llama-3.1-8b"
  gpus = 8
  steps = 20
  where = ["mem_gib < 75"]
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
_FROM_PLAN = (*_RUN, *options.of(PlanSweep, "gpu", "max_nodes", "explore"))
OPTIONS = (
    option("file", "a run with a [sweep] table", "FILE.toml", nargs="?"),
    option("--dry-run", "print what would run, and the predicted time", switch=True),
    *options.of(SweepRequest),
    *options.of(MptSweep),
    options.SET,
    # Not dest "run": that is the command's own function.
    option("--run", "start the runs (default: only print the plan)", switch=True, dest="start",
           group=MPT_GROUP),
    *options.of(PlanSweep, "count", group=_PLAN),
    *(one._replace(group=_PLAN, rare=True) for one in _FROM_PLAN),
    options.FORMAT,
)  # fmt: skip


def run(args: Any, show: OnEvent) -> Output:
    request, source = options.load(SweepRequest, args), _source(args, show)
    unstarted = bool(args.models and not args.start)
    if args.dry_run or unstarted:
        plan = fourfold.plan_sweep(source, request, on_event=show)
        return Output.of(plan, lambda: runs.sweep_plan_page(plan, unstarted=unstarted))
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_sweep(source, request, on_event=show))
    answer = fourfold.sweep(source, request, on_event=show)
    return Output.of(answer, lambda: runs.sweep_page(answer, request.runs))


def _source(args: Any, show: OnEvent) -> Any:
    if [bool(args.file), bool(args.models), args.count is not None].count(True) != 1:
        rule = "a sweep needs a FILE.toml, models with -m, or --from-plan K"
        raise UserError(rule, hint="see 'fourfold sweep --help'")
    if args.count is not None:
        table = options.run_table(args, without=("gpus", "micro_batch"), note=notes(show))
        for name, path in (("gpus", "gpus"), ("micro_batch", "batch.micro_batch")):
            value = options.only_value(args, name, "with --from-plan")
            if value is not None:
                codec.put(table, path, value)
        return options.load(PlanSweep, args, table=table)
    used = [one for one in _FROM_PLAN if getattr(args, one.key) is not None]
    if used:
        flag = used[0].names[0]
        hint = f"use --set, or make {flag[2:].replace('-', '_')} an axis of [sweep]"
        raise UserError("needs --from-plan", field=flag, hint=hint)
    table = options.assigned(args)
    if args.file:
        table = codec.parse_toml(files.read_text(args.file, field="FILE"))
    options.put_env(table, args)
    return table if args.file else options.load(MptSweep, args, base=table)
