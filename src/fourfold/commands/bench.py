"""Run one configuration; report speed, confidence interval and anything suspicious about the
measurement.

The run is stored with every step's time, versions, variables, clocks and probes. Warm-up ends when
step time and clock no longer drift. The prediction comes from --cluster, --profile, the detected
GPU or, roughly, the core count.

With --as-rank this device runs as one rank of a large run: real kernels, collectives that only fill
their buffers. Only traffic and pipeline bubble are then predicted.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import files, options
from fourfold.cost.count.flops import convention
from fourfold.errors import UserError
from fourfold.escape import json_text
from fourfold.events import OnEvent, notes
from fourfold.options import option
from fourfold.output import Output, submitted
from fourfold.show import bench, one_rank
from fourfold.show.pictures import floor_picture, must_be_picture
from fourfold.spec import check
from fourfold.verbs.run_requests import ONE_RANK, BenchRequest, OneRankRequest

EXAMPLES = """\
examples:
  fourfold bench --model llama-tiny --gpus 4 --tp 2 --seq-len 128 --global-batch 16 --precision fp32
  fourfold bench --spec run.toml --repeat 3
  fourfold bench --model llama-3.2-1b-untied --gpus 1 --seq-len 4096 --micro-batch 0   (0: auto)
  fourfold bench --as-rank 0 --world 512 --layout "pp4 dp16 tp8" --layout "tp8 zero3" \\
      --model llama-3.1-70b --seq-len 4096 --global-batch 512
  fourfold bench --spec run.toml --on slurm               (--on mysite: see docs/running.md)
"""
_RUN = ("steps", "warmup", "data", "tag", "note")
_OWN = ("as_rank", "world", "layouts", "micro_batches", "against")
OPTIONS = (
    *options.run_options(*_RUN),
    *options.of(BenchRequest),
    *options.of(OneRankRequest, *_OWN),
    *options.grouped(
        (
            option("--details", "also show kernels, traffic and parts of the step", switch=True),
            option("--out", "write the full result to a file", "FILE.json", rare=True),
            option("--picture", "with --against: draw bars by part", "FILE.png", rare=True),
        ),
        ONE_RANK,
    ),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    if _is_one_rank(args):
        return _one_rank(args, show)
    request = options.load(BenchRequest, args)
    rule = convention(request.convention).id
    table = options.run_table(args, extra=_RUN, note=notes(show))
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_bench(table, request, on_event=show))
    answer = fourfold.bench(table, request, on_event=show)
    status = 0 if answer.ok else 1
    return Output.of(answer, lambda: bench.runs_page(answer.runs, rule), status=status)


def _is_one_rank(args: Any) -> bool:
    if args.picture and not args.against:
        raise UserError("needs --against", field="--picture", hint="add --against floor")
    if args.as_rank is None and not args.against:
        for field in ("world", "layouts", "micro_batches", "out"):
            hint = "add --as-rank 0, or use --gpus, --pp, --dp, --cp and --tp"
            check.that(not getattr(args, field), field, None, "needs --as-rank", hint)
    return args.as_rank is not None or bool(args.against)


def _one_rank(args: Any, show: OnEvent) -> Output:
    if args.picture:
        must_be_picture(args.picture)
    if args.against and args.as_rank is None:
        args.world = args.world or 1
    if args.on is not None:
        raise UserError("cannot be combined with --as-rank, which uses this device", field="--on")
    own = {"cluster": args.cluster, "profile": args.profile, "trace": args.trace}
    request = options.load(OneRankRequest, args, **own)
    table = options.run_table(args, extra=_RUN, note=notes(show))
    answer = fourfold.one_rank(table, request, on_event=show)
    if args.out:
        files.write_text(args.out, json_text(answer.plain()) + "\n")
    if args.picture:
        steps = [(one_rank.name_of(one.spec), one.floor) for one in answer.ranks if one.found]
        files.write_bytes(args.picture, floor_picture(steps, args.picture), field="picture")
    shown = {"details": bool(args.details), "against": bool(args.against)}
    status = 0 if answer.ok else 1
    return Output.of(answer, lambda: one_rank.page(answer.ranks, **shown), status=status)
