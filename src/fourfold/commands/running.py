"""Commands that start ranks: one run, many, a training."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.cost.count.flops import convention
from fourfold.errors import UserError
from fourfold.escape import json_text
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show import one_rank, runs
from fourfold.show.bench import runs_page
from fourfold.show.pictures import loss_picture, must_be_picture
from fourfold.spec import RunSpec, check, codec, texts
from fourfold.spec.layout import AXES
from fourfold.spec.train import TrainSettings
from fourfold.units import counted
from fourfold.verbs.requests import PlanRequest
from fourfold.verbs.run_requests import (
    MPT_GROUP,
    ONE_RANK,
    BenchRequest,
    MptSweep,
    OneRankRequest,
    PlanSweep,
    SweepRequest,
    TrainRequest,
)

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_BENCH = """\
examples:
  fourfold bench --model llama-tiny --gpus 4 --tp 2 --seq-len 128 --global-batch 16 --precision fp32
  fourfold bench --spec run.toml --repeat 3
  fourfold bench --model llama-3.2-1b-untied --gpus 1 --seq-len 4096 --micro-batch 0   (0: auto)
  fourfold bench --as-rank 0 --world 512 --layout "pp4 dp16 tp8" --layout "tp8 zero3" \\
      --model llama-3.1-70b --seq-len 4096 --global-batch 512
  fourfold bench --spec run.toml --on slurm               (--on mysite: see docs/running.md)
"""
_RUN = ("steps", "warmup", "data", "tag", "note")
_OWN = ("as_rank", "world", "layouts", "micro_batches")
_SHARED = ("cluster", "profile", "trace", "env", "oversubscribe", "force")


@command(
    *options.run_options(*_RUN),
    *options.of(BenchRequest),
    *options.of(OneRankRequest, *_OWN),
    *options.grouped(
        (
            option("--details", "also show kernels, traffic and parts of the step", switch=True),
            option("--out", "write the full result to a file", "FILE.json", rare=True),
        ),
        ONE_RANK,
    ),
    examples=_BENCH,
)
def bench(args: Arguments, show: OnEvent) -> Output:
    """Run one configuration; report speed, confidence interval and anything suspicious about the
    measurement.

    The run is stored with every step's time, versions, variables, clocks and probes. Warm-up ends
    when step time and clock no longer drift. The prediction comes from --cluster, --profile, the
    detected GPU or, roughly, the core count.

    With --as-rank this device runs as one rank of a large run: real kernels, collectives that only
    fill their buffers. Only traffic and pipeline bubble are then predicted.
    """
    if _is_one_rank(args):
        return _one_rank(args, show)
    request = options.load(BenchRequest, args)
    rule = convention(request.convention).id
    table = options.run_table(args, extra=_RUN, note=notes(show))
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_bench(table, request, on_event=show))
    answer = fourfold.bench(table, request, on_event=show)
    status = 0 if answer.ok else 1
    return Output.of(answer, lambda: runs_page(answer.runs, rule), status=status)


def _is_one_rank(args: Arguments) -> bool:
    if args.as_rank is None:
        for field in ("world", "layouts", "micro_batches", "details", "out"):
            hint = "add --as-rank 0, or use --gpus, --pp, --dp, --cp and --tp"
            check.that(not getattr(args, field), field, None, "needs --as-rank", hint)
    return args.as_rank is not None


def _one_rank(args: Arguments, show: OnEvent) -> Output:
    unused = (*options.of(BenchRequest), *options.of(RunSpec, "tag", "note"))
    rule = "cannot be combined with --as-rank, which runs one rank here and stores nothing"
    options.refuse(args, (one for one in unused if one.key not in _SHARED), rule)
    same = args.gpus is None or args.world in (None, args.gpus)
    check.that(same, "--gpus", args.gpus, f"contradicts --world {args.world}", "omit one of them")
    if args.out:
        files.require_mine(args.out, mark='"kind": "stand-in"', force=bool(args.force))
    own = {"cluster": args.cluster, "profile": args.profile, "trace": args.trace}
    request = options.load(OneRankRequest, args, **own)
    table = options.run_table(args, extra=_RUN, note=notes(show))
    answer = fourfold.one_rank(table, request, on_event=show)
    if args.out:
        files.write_text(args.out, json_text(answer.plain()) + "\n")
    status, details = 0 if answer.ok else 1, bool(args.details)
    return Output.of(answer, lambda: one_rank.page(answer.ranks, details=details), status=status)


_SWEEP = """\
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
_FROM_PLAN = (
    *(one for one in options.run_options() if one.names[0] not in (*_LISTS, "--set")),
    *options.of(PlanSweep, "gpu", "max_nodes", "explore"),
)


@command(
    option("file", "a run with a [sweep] table", "FILE.toml", nargs="?"),
    option("--dry-run", "print what would run, and the predicted time", switch=True),
    *options.of(SweepRequest),
    *options.of(MptSweep),
    options.SET,
    # Not dest "run": that is the command's own function.
    option(
        "--run",
        "start the runs (default: only print the plan)",
        switch=True,
        dest="start",
        group=MPT_GROUP,
    ),
    *options.of(PlanSweep, "count", group=_PLAN),
    *(one._replace(group=_PLAN, rare=True) for one in _FROM_PLAN),
    examples=_SWEEP,
)
def sweep(args: Arguments, show: OnEvent) -> Output:
    """Measure many runs; every outcome is stored, and a stopped sweep resumes where it left off.

    FILE is a run with a [sweep] table whose lists are the axes; it starts at once. The flag form
    (-m -s -b -t -g) follows the MPT scripts and only prints the plan without --run. --from-plan K
    measures the planner's K best layouts. A failed configuration is recorded and the sweep goes on.
    Runs already finished in the store are skipped, interrupted ones are run again.
    """
    request, source = options.load(SweepRequest, args), _source(args, show)
    unstarted = bool(args.models and not args.start)
    if args.dry_run or unstarted:
        plan = fourfold.plan_sweep(source, request, on_event=show)
        return Output.of(plan, lambda: runs.sweep_plan_page(plan, unstarted=unstarted))
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_sweep(source, request, on_event=show))
    answer = fourfold.sweep(source, request, on_event=show)
    return Output.of(answer, lambda: runs.sweep_page(answer, request.runs))


def _source(args: Arguments, show: OnEvent) -> Any:
    if [bool(args.file), bool(args.models), args.count is not None].count(True) != 1:
        rule = "a sweep needs one of a FILE.toml, models with -m, and --from-plan K"
        raise UserError(rule, hint="see 'fourfold sweep --help'")
    if args.count is not None:
        lists = (one for one in options.of(MptSweep) if one.names[-1] not in _LISTS)
        options.refuse(args, lists, "needs -m", "with --from-plan, flags are those of 'plan'")
        table = options.run_table(args, without=("gpus", "micro_batch"), note=notes(show))
        for name, path in (("gpus", "gpus"), ("micro_batch", "batch.micro_batch")):
            value = options.only_value(args, name, "with --from-plan")
            if value is not None:
                codec.put(table, path, value)
        return options.load(PlanSweep, args, table=table)
    hint = "use --set, or make it an axis of [sweep]"
    options.refuse(args, _FROM_PLAN, "needs --from-plan", hint)
    table: dict[str, Any] = {}
    if args.file:
        options.refuse(args, options.of(MptSweep), "needs -m", hint)
        table = texts.read(args.file, field="FILE")
        axes = {*table.get("sweep", ())}
        for path, _ in options.assignments(args):
            name = path.rpartition(".")[2]
            rule, way_out = "is an axis of this sweep", f"use --set 'sweep.{name}=[...]'"
            is_axis = bool({path, name} & axes) and not path.startswith("sweep.")
            check.that(not is_axis, f"--set {path}", None, rule, way_out)
    options.assign(table, args)
    return table if args.file else options.load(MptSweep, args, base=table)


_TRAIN = """\
examples:
  fourfold train --model llama-tiny --gpus 1 --seq-len 128 --global-batch 16 --precision fp32 \\
      --steps 300 --lr 1e-3 --warmup-steps 20 --out trained
  fourfold train --out trained --gpus 4 --tp 2            (continue it on another layout)
  fourfold train --show trained --plot loss.png

exit status: 0 all steps done; 75 saved and ended early on request: run it again to continue;
1 the training failed, the last checkpoint is whole; 2 bad request; 130 ended at once.
"""
_GROUP = "training (other fields by --set train.beta2=0.95)"
# Statuses that are no failure: sysexits' "try again later" where it was asked to stop.
_STATUS = {"ok": 0, "done": 0, "not finished": 0, "stopped": 75}


_TRAINING = (
    *options.of(TrainRequest),
    *options.of(PlanRequest, "ramp"),
    *options.of(TrainSettings),
)


@command(
    *options.run_options("data"),
    *options.grouped(
        (
            *_TRAINING,
            option("--show", "show the state of a training folder, without training", "DIR"),
            option("--plot", "draw the loss curve: .png, .svg or .pdf", "FILE"),
        ),
        _GROUP,
    ),
    examples=_TRAIN,
)
def train(args: Arguments, show: OnEvent) -> Output:
    """Train a model, or resume on any layout: data, learning-rate schedule, checkpoints, loss
    curve.

    A folder with checkpoints is resumed, on any layout and number of ranks. SIGTERM, SIGUSR1 and
    Ctrl-C save after the current step and exit with status 75; a second SIGTERM or Ctrl-C exits at
    once. --show prints the state of a training folder without training.
    """
    if args.plot:
        must_be_picture(args.plot, "plot")
    request = options.load(TrainRequest, args)
    if args.show:
        given = (*options.run_options("data"), *_TRAINING)
        unused = (one for one in given if one.key != "convention")
        options.refuse(args, unused, "cannot be combined with --show, which trains nothing")
        answer = fourfold.show_training(args.show, rule=request.convention, on_event=show)
    else:
        table = lambda known: _table(args, known, show)  # noqa: E731
        if request.detach or request.print_launch:
            return submitted(fourfold.submit_train(table, request, on_event=show))
        answer = fourfold.train(table, request, on_event=show)
    if args.plot:
        name = answer.folder.rpartition("/")[2]
        drawn = loss_picture(
            answer.points, f"{name}: {counted(len(answer.points), 'step')}", args.plot
        )
        files.write_bytes(args.plot, drawn, field="plot")
    status = _STATUS.get(answer.outcome, 1)
    return Output.of(answer, lambda: runs.training_page(answer), status=status)


def _table(args: Arguments, known: dict[str, Any], show: OnEvent) -> dict[str, Any]:
    """Flags over a spec file or, without one, over what the folder was trained with."""
    known = {} if args.spec else known
    if any(getattr(args, axis) is not None for axis in ("gpus", *AXES)):
        known.pop("layout", None)  # a new layout is asked for, not a change of one axis
    table = options.run_table(args, known, extra=("data",), training=True, note=notes(show))
    if args.ramp is not None:
        codec.put(table, "batch.ramp", codec.encode(args.ramp))
    plain = table.setdefault("train", {})
    check.that(isinstance(plain, dict), "train", plain, "must be a table")
    names = (field.name for field in dataclasses.fields(TrainSettings) if field.metadata)
    plain |= options.given(args, *names)
    return table
