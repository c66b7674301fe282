"""Train a model, or resume on any layout: data, learning-rate schedule, checkpoints, loss curve.

A folder with checkpoints is resumed, on any layout and number of ranks. SIGTERM, SIGUSR1 and Ctrl-C
save after the current step and exit with status 75; a second SIGTERM or Ctrl-C exits at once.
--show prints the state of a training folder without training.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show.pictures import loss_picture, must_be_picture
from fourfold.show.runs import training_page
from fourfold.spec import check, codec
from fourfold.spec.layout import AXES
from fourfold.spec.train import TrainSettings
from fourfold.units import counted
from fourfold.verbs.requests import PlanRequest
from fourfold.verbs.run_requests import TrainRequest

EXAMPLES = """\
examples:
  fourfold train --model llama-tiny --gpus 1 --seq-len 128 --global-batch 16 --precision fp32 \\
      --steps 300 --lr 1e-3 --warmup-steps 20 --out trained
  fourfold train --out trained --gpus 4 --tp 2            (continue it on another layout)
  fourfold train --show trained --plot loss.png

exit status: 0 all steps done; 75 saved and ended early on request: run it again to continue;
1 the training failed, the last checkpoint is whole; 2 bad request; 130 ended at once.
"""
_GROUP = "training (other fields by --set train.beta2=0.95)"
OPTIONS = (
    *options.run_options("data"),
    *options.grouped(
        (
            *options.of(TrainRequest),
            *options.of(PlanRequest, "ramp"),
            *options.of(TrainSettings),
            option("--show", "show the state of a training folder, without training", "DIR"),
            option("--plot", "draw the loss curve: .png, .svg or .pdf", "FILE"),
        ),
        _GROUP,
    ),
    options.FORMAT,
)
# Statuses that are no failure: sysexits' "try again later" where it was asked to stop.
_STATUS = {"ok": 0, "done": 0, "not finished": 0, "stopped": 75}


def run(args: Any, show: OnEvent) -> Output:
    if args.plot:
        must_be_picture(args.plot, "plot")
    request = options.load(TrainRequest, args)
    if args.show:
        answer = fourfold.show_training(args.show, rule=request.convention, on_event=show)
    else:
        table = lambda known: _table(args, known, show)  # noqa: E731
        if request.detach or request.print_launch:
            return submitted(fourfold.submit_train(table, request, on_event=show))
        answer = fourfold.train(table, request, on_event=show)
    if args.plot:
        name = answer.facts["folder"].rpartition("/")[2]
        drawn = loss_picture(
            answer.points, f"{name}: {counted(len(answer.points), 'step')}", args.plot
        )
        files.write_bytes(args.plot, drawn, field="plot")
    status = _STATUS.get(answer.facts["outcome"], 1)
    return Output.of(answer, lambda: training_page(answer), status=status)


def _table(args: Any, known: dict[str, Any], show: OnEvent) -> dict[str, Any]:
    """Flags over a spec file or, without one, over what the folder was trained with."""
    known = {} if args.spec else known
    if any(getattr(args, axis) is not None for axis in ("gpus", *AXES)):
        known.pop("layout", None)  # a new layout is asked for, not a change of one axis
    table = options.run_table(args, known, extra=("data",), note=notes(show))
    if args.ramp is not None:
        codec.put(table, "batch.ramp", codec.encode(args.ramp))
    plain = table.setdefault("train", {})
    check.that(isinstance(plain, dict), "train", plain, "must be a table")
    names = (field.name for field in dataclasses.fields(TrainSettings) if field.metadata)
    plain |= options.given(args, *names)
    return table
