"""Run one configuration and say how fast it is, how sure that is, and what to doubt.

The run is kept in the store with every step's raw time, versions, variables, clocks and probes.
Warm-up ends when step time and clock no longer drift, and the answer says how. A prediction stands
beside the measurement: by a cluster, a profile of this machine, a known GPU, or the cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from fourfold.commands import bench_auto, bench_rank, flags, foresight, progress
from fourfold.commands.fast import with_fast_defaults
from fourfold.commands.foresight import Foresight
from fourfold.cost.count.flops import convention
from fourfold.errors import UserError
from fourfold.launch.campaign import Campaign, Say, launch_run
from fourfold.launch.devices import require_gpus
from fourfold.result.files.store import Store
from fourfold.result.report import RunReport
from fourfold.search.legal import Target, why_not
from fourfold.show import bench as shown
from fourfold.show.table import json_text
from fourfold.spec.run import RunSpec
from fourfold.spec.tokens import read_info, require_fit

EXAMPLES = """\
examples:
  fourfold bench --model llama-tiny --gpus 4 --tp 2 --seq-len 128 --global-batch 16 --precision fp32
  fourfold bench --spec run.toml --repeat 3
  fourfold bench --model llama-3.2-1b-untied --gpus 1 --seq-len 4096 --micro-batch 0   (0: auto)
  fourfold bench --as-rank 0 --world 512 --layout "pp4 dp16 tp8" --layout "tp8 zero3" \\
      --model llama-3.1-70b --seq-len 4096 --global-batch 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_run(parser)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--steps", type=flags.count, metavar="N", help="timed steps")
    parser.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="steps before them (default: until steady)",
    )
    parser.add_argument("--data", metavar="NAME", help="a token file (default: synthetic tokens)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs (1)")
    parser.add_argument("--probe-s", type=float, default=1.0, metavar="S", help="0: no probes")
    parser.add_argument("--tag", metavar="TEXT", help="a word kept with the run")
    parser.add_argument("--note", metavar="TEXT", help="words kept with the run")
    flags.add_convention(parser)
    parser.add_argument("--force", action="store_true", help="run even what surely does not fit")
    foresight.add_arguments(parser)
    flags.add_permit(parser)
    flags.add_format(parser)
    bench_rank.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if bench_rank.is_asked(args):
        return bench_rank.run(args)
    rule = convention(args.convention).id
    if args.repeat < 1:
        raise UserError("must be 1 or more", field="repeat", value=args.repeat)
    ahead = Foresight(cluster=args.cluster, profile=args.profile)
    campaign = Campaign(
        Store(args.runs),
        runner=_runner(args),
        say=progress.progress_lines(),
        foresight=ahead,
    )
    campaign.clear_up()
    asked = _spec(args)
    too_large = "" if args.force else ahead.too_large(asked)
    if too_large:
        raise UserError(
            f"surely does not fit: {too_large}",
            field="model",
            value=asked.model.name,
            hint="'fourfold plan' finds layouts that do; --force runs it all the same",
        )
    spec, trials = bench_auto.decide(asked, campaign)
    refused = why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
    if refused:
        campaign.refuse(spec, "; ".join(map(str, refused)))
        print(f"illegal: {'; '.join(map(str, refused))}", file=sys.stderr)
        return 1
    done = [campaign.run_new(spec) for _ in range(args.repeat)]
    progress.end_line()
    answers = [
        shown.facts(one.report()) | {"folder": str(one.folder), "micro_batch_trials": trials}
        for one in done
    ]
    _show(args, answers, rule)
    return 0 if all(plain["outcome"] == "ok" for plain in answers) else 1


def _spec(args: argparse.Namespace) -> RunSpec:
    spec = flags.run_spec(args)
    spec = with_fast_defaults(spec, flags.run_table(args), ranks=spec.gpus)
    changes: dict[str, Any] = {
        name: getattr(args, name)
        for name in ("steps", "warmup", "tag", "note", "data")
        if getattr(args, name) is not None
    }
    if args.warmup is not None:
        changes["settle"] = False
    spec = dataclasses.replace(spec, **changes)
    spec.batch.without_ramp()
    require_gpus(spec.device, spec.gpus, hint="--set device=cpu")
    flags.permit(args).require((spec,), ranks=spec.gpus)
    if spec.data:
        vocab, seq_len = spec.model.vocab, spec.batch.seq_len
        require_fit(read_info(spec.data), name=spec.data, vocab=vocab, seq_len=seq_len)
    return spec


def _runner(args: argparse.Namespace) -> Any:
    options = (("probe_s", f"{args.probe_s:g}"),) if args.probe_s > 0 else ()
    permit = flags.permit(args)

    def launch(spec: RunSpec, folder: Path, say: Say) -> RunReport:
        return launch_run(spec, folder, say, options=options, permit=permit)

    return launch


def _show(args: argparse.Namespace, answers: list[dict[str, Any]], rule: str) -> None:
    if args.format == "json":
        print(json_text(answers[0] if len(answers) == 1 else {"runs": answers}))
        return
    for plain in answers:
        print(shown.text(plain, rule, args.format), end="" if args.format == "csv" else "\n")
