"""List stored runs with outcome, speed and memory; failed ones too.

--where may use dp tp cp pp vp micro_batch global_batch seq_len gpus nodes layers hidden heads
mem_gib step_s; a run without a value (a failed run has no step_s) does not match. 'runs show RUN'
prints one run in full.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.commands import Command
from fourfold.cost.count.flops import DEFAULT, convention
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.bench import page
from fourfold.show.runs import runs_page
from fourfold.verbs.requests import PlanRequest, RunsRequest

EXAMPLES = """\
examples:
  fourfold runs
  fourfold runs --where 'tp == 2 and micro_batch > 1' --outcome ok --sort step_s
  fourfold runs --tag first-try --format json
  fourfold runs show 3fa2
"""
OPTIONS = (*options.of(RunsRequest), options.FORMAT)


def run(args: Any, show: OnEvent) -> Output:
    request = options.load(RunsRequest, args)
    answer = fourfold.runs(request, on_event=show)
    return Output.of(answer, lambda: runs_page(answer, request.runs))


def show_one(args: Any, show: OnEvent) -> Output:
    rule = convention(args.convention or DEFAULT).id
    answer = fourfold.show_run(args.run_id, store=args.runs or "runs", on_event=show)
    return Output.of(answer, lambda: page(answer.facts, rule))


ACTIONS = {
    "show": Command(
        "show",
        "Print one run in full, as 'bench' does.",
        (
            option("run_id", "start of the run's id, or its folder", "RUN"),
            *options.of(RunsRequest, "runs"),
            *options.of(PlanRequest, "convention"),
            options.FORMAT,
        ),
        show_one,
        line="one run in full",
    )
}
