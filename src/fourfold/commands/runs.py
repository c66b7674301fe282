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
from fourfold.options import option
from fourfold.output import Output, Stderr
from fourfold.result.record import Record
from fourfold.result.report import OUTCOMES
from fourfold.show.bench import page
from fourfold.show.table import Grid
from fourfold.units import show_bytes, show_seconds
from fourfold.verbs.requests import PlanRequest, RunsRequest

EXAMPLES = """\
examples:
  fourfold runs
  fourfold runs --where 'tp == 2 and micro_batch > 1' --outcome ok --sort step_s
  fourfold runs --tag first-try --format json
  fourfold runs show 3fa2
"""
OPTIONS = (*options.of(RunsRequest), options.FORMAT)
HEADINGS = (
    "run", "model", "layout", "seq", "micro", "global", "precision", "sharding", "outcome",
    "step time", "tokens/s/GPU", "memory", "tag", "why",
)  # fmt: skip


def run(args: Any) -> Output:
    request = options.load(RunsRequest, args)
    answer = fourfold.runs(request, on_event=Stderr())
    counts = answer.outcomes
    listed = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if name in counts)
    line = f"{len(answer.runs)} runs in {request.runs}" + (f": {listed}" if listed else "")
    cells = [_cells(stored.summary) for stored in answer.runs]
    return Output.of(answer, lambda: [Grid(HEADINGS, cells), "", line])


def show(args: Any) -> Output:
    rule = convention(args.convention or DEFAULT).id
    answer = fourfold.show_run(args.run_id, store=args.runs or "runs", on_event=Stderr())
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
        show,
        line="one run in full",
    )
}


def _cells(summary: Record) -> list[str]:
    speed = summary.tokens_s_gpu
    return [
        summary.run_id[:8] + (f"#{summary.repeat}" if summary.repeat else ""),
        summary.model,
        summary.layout,
        str(summary.seq_len),
        str(summary.micro_batch),
        str(summary.global_batch),
        summary.precision,
        summary.sharding,
        summary.outcome,
        "-" if summary.step_s is None else show_seconds(summary.step_s),
        "-" if speed is None else f"{speed:,.0f}",
        "-" if summary.peak_bytes is None else show_bytes(summary.peak_bytes),
        summary.tag,
        summary.failure[:60],
    ]
