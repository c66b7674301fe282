"""Predict step time, memory and fit of every row of a table in the reference schema.

Writes one line per row: row_id,step_s,step_s_low,step_s_high,tokens_s_gpu,tflops_gpu,mfu_pct,
mem_gb,fits,fit_chance,reason,provenance. The interval contains 80% of measured runs. A row that
cannot be predicted keeps its line, empty except for the reason. mem_gb is in GiB, for the rank the
stack prints (rank 0 for nanotron, the fullest elsewhere); fits is decided by the fullest stage: a
chance of at least a half. provenance: measured (this stack, this machine, within measured sizes),
near (beyond those sizes, or machines like it), blended (its engine elsewhere, or other engines on
such GPUs) or physics.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import Event, OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.units import counted
from fourfold.verbs.requests import PlanRequest

EXAMPLES = """\
example:
  fourfold predict rows.csv --out predicted.csv
  fourfold predict rows.csv --out predicted.csv --calibration mine.json
  fourfold predict rows.csv --out predicted.csv --cluster my64.toml
"""
OPTIONS = (
    option("rows", "runs to predict, in the reference schema", "ROWS.csv"),
    option("--out", "file for the predictions", "OUT.csv", required=True),
    *options.of(PlanRequest, "cluster", "calibration", rare=False),
    options.FORCE,
)
# The head of every file that this command writes.
_MARK = "row_id,step_s,step_s_low,step_s_high,tokens_s_gpu,tflops_gpu,mfu_pct,mem_gb,fits,"


def run(args: Any, show: OnEvent) -> Output:
    files.require_mine(args.out, mark=_MARK, force=bool(args.force))
    machine = {"cluster": args.cluster, "calibration": args.calibration}
    answer = fourfold.predict_table(args.rows, **machine, on_event=show)
    files.write_text(args.out, answer.csv())
    left = answer.predicted - answer.fit - answer.may_fit
    show(
        Event(
            f"{answer.predicted} of {counted(len(answer.row_ids), 'row')} predicted,"
            f" {answer.fit} fit, "
            f"{answer.may_fit} may, {left} do not; calibration {answer.calibration}; "
            f"written to {args.out}"
        )
    )
    return Output(raw="")
