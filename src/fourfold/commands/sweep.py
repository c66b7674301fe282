"""Run many configurations, keep every outcome, and start again where a stopped sweep left off.

FILE is a run with a [sweep] table whose lists are the axes; it runs at once. The flag form (-m -s
-b -t -g) follows the MPT scripts and runs nothing without --run. --from-plan K measures the best K
of the planner. A configuration that fails is a row, not an end. Finished runs of the store are not
run again, interrupted ones are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fourfold import files
from fourfold.commands import (
    bench_auto,
    flags,
    foresight,
    progress,
    sweep_dry,
    sweep_flags,
    sweep_plan,
)
from fourfold.commands.foresight import Foresight
from fourfold.cost.count.flops import Convention, FlopsQuery, convention
from fourfold.errors import UserError
from fourfold.launch.campaign import Campaign, Done, launch_run
from fourfold.launch.permit import Permit
from fourfold.result.files.store import Store
from fourfold.result.report import OUTCOMES
from fourfold.search.legal import Target, why_not
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import Combination, Expansion, Sweep, expand, read_sweep, told
from fourfold.spec.tokens import read_info, require_fit
from fourfold.units import show_bytes, show_seconds

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="a run with a [sweep] table")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="print plan and predicted time")
    parser.add_argument("--tag", metavar="TEXT", help="a word kept with every run")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of each (1)")
    parser.add_argument(
        "--again", action="append", default=[], choices=OUTCOMES, metavar="OUTCOME",
        help="also run what ended so: oom, crashed, hung, nonfinite, ok",
    )  # fmt: skip
    parser.add_argument(
        "--where", action="append", default=[], metavar="CONDITION",
        help="keep what it holds for; mem_gib and step_s are predicted",
    )  # fmt: skip
    foresight.add_arguments(parser)
    sweep_flags.add_arguments(parser)
    sweep_plan.add_arguments(parser)
    parser.add_argument("--force", action="store_true", help="run even what surely does not fit")
    flags.add_convention(parser)
    flags.add_permit(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise UserError("must be 1 or more", field="repeat", value=args.repeat)
    ahead = Foresight(cluster=args.cluster, profile=args.profile, calibration=args.calibration)
    expansion = _asked(args, ahead)
    if args.tag:
        expansion = _tagged(expansion, args.tag)
    _must_be_allowed(expansion, flags.permit(args))
    rule = convention(args.convention)
    refusals = [_refusal(one.spec) for one in expansion.combinations]
    if not args.force:
        refusals = [
            why or _too_large(one.spec, ahead)
            for one, why in zip(expansion.combinations, refusals, strict=True)
        ]
    expansion, refusals, skipped = sweep_dry.foreseen(expansion, refusals, ahead)
    if not expansion.total:
        raise UserError(
            "leaves no combination", field="where", value=f"{expansion.dropped} dropped",
            hint="loosen the conditions",
        )  # fmt: skip
    for one in skipped:
        _note(f"skipped: {told(tuple(one['combination'].items()))}: {one['reason']}")
    if args.dry_run or (sweep_flags.given(args) and not args.start):
        return sweep_dry.show(args, expansion, refusals, skipped, ahead)
    return _run_all(args, expansion, refusals, skipped, ahead, rule)


def _asked(args: argparse.Namespace, ahead: Foresight) -> Expansion:
    ways = (bool(args.file), sweep_flags.given(args), sweep_plan.given(args))
    if sum(ways) != 1:
        raise UserError(
            "give a FILE.toml, models with -m, or --from-plan K",
            field="FILE",
            hint="see 'fourfold sweep --help'",
        )
    if sweep_plan.given(args):
        return sweep_plan.chosen(args, ahead)
    sweep_plan.refuse_flags(args)
    return expand(sweep_flags.sweep_of(args) if not args.file else _from_file(args))


def _from_file(args: argparse.Namespace) -> Sweep:
    from fourfold.spec.expression import parse

    data = codec.parse_toml(files.read_text(args.file, field="FILE"))
    flags.put_env(data, args)
    try:
        sweep = read_sweep(data)
    except UserError as error:
        raise error.within("") from None
    return dataclasses.replace(sweep, where=(*sweep.where, *map(parse, args.where)))


def _tagged(expansion: Expansion, tag: str) -> Expansion:
    tagged = tuple(
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, tag=tag))
        for one in expansion.combinations
    )
    return dataclasses.replace(expansion, combinations=tagged)


def _must_be_allowed(expansion: Expansion, permit: Permit) -> None:
    """Before the first run: one of the last must not end the whole."""
    specs = [one.spec for one in expansion.combinations]
    ranks = max((spec.gpus for spec in specs if not spec.refused), default=1)
    permit.require(specs, ranks=ranks)


def _refusal(spec: RunSpec) -> str:
    """Why a combination cannot run; '' when it can."""
    reasons: list[object] = [
        *why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
    ]
    if spec.data:
        info, vocab, seq_len = read_info(spec.data), spec.model.vocab, spec.batch.seq_len
        try:
            require_fit(info, name=spec.data, vocab=vocab, seq_len=seq_len)
        except UserError as error:
            reasons.append(error)
    return spec.refused or "; ".join(map(str, reasons))


def _too_large(spec: RunSpec, ahead: Foresight) -> str:
    why = ahead.too_large(spec)
    return f"surely does not fit: {why} (--force runs it all the same)" if why else ""


def _run_all(
    args: argparse.Namespace,
    expansion: Expansion,
    refusals: list[str],
    skipped: list[dict[str, Any]],
    ahead: Foresight,
    rule: Convention,
) -> int:
    campaign = Campaign(
        Store(args.runs),
        runner=functools.partial(launch_run, permit=flags.permit(args)),
        say=progress.progress_lines(),
        again=args.again,
        foresight=ahead,
    )
    pairs = list(zip(expansion.combinations, refusals, strict=True))
    for combination, why in pairs:
        if why:
            _note(f"illegal: {combination.label}: {why}")
    campaign.clear_up()
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for number, (one, why) in enumerate(pairs, start=1):
        done = _one(campaign, one.spec, why, args.repeat)
        counts[done[-1].outcome] += 1
        rows.append(_row(one, done[-1], why, rule))
        _note(f"[{number}/{expansion.total}] {one.label}: {_ended(done[-1])}")
    whole = {outcome: counts[outcome] for outcome in OUTCOMES}
    assert sum(whole.values()) == expansion.total
    if args.format == "json":
        data = {"total": expansion.total, **whole, "counts": whole, "dropped": expansion.dropped}
        print(json_text(data | {"same": expansion.same, "skipped": skipped, "runs": rows}))
        return 0
    _print(args, rows, whole, expansion.total, guessed=ahead.is_guess and not ahead.told)
    return 0


def _note(text: str) -> None:
    progress.end_line()
    print(text, file=sys.stderr, flush=True)


def _one(campaign: Campaign, spec: RunSpec, why: str, repeats: int) -> list[Done]:
    if why:
        return [campaign.refuse(spec, why)]
    if not spec.batch.micro_batch:
        spec, _ = bench_auto.decide(spec, campaign)
    return campaign.run(spec, repeats)


def _ended(done: Done) -> str:
    summary = done.stored.summary
    text = done.outcome
    if summary.step_s is not None:
        text += f", {show_seconds(summary.step_s)} a step"
    return f"{text} (stored before)" if done.resumed else text


def _row(one: Combination, done: Done, why: str, rule: Convention) -> dict[str, Any]:
    summary, spec = done.stored.summary, one.spec
    tflops = None
    if summary.tokens_s_gpu:
        model, seq_len = spec.model, spec.batch.seq_len
        ask = FlopsQuery.of(model=model, seq_len=seq_len, layout=spec.layout, policy=spec.policy)
        tflops = rule.count(ask).model * summary.tokens_s_gpu / 1e12
    return {
        "combination": dict(one.varied),
        "outcome": done.outcome,
        "run_id": summary.run_id,
        "folder": str(done.stored.folder),
        "resumed": done.resumed,
        "micro_batch": summary.micro_batch,
        "step_s": summary.step_s,
        "step_s_low": summary.low_s,
        "step_s_high": summary.high_s,
        "tokens_s_gpu": summary.tokens_s_gpu,
        "tflops_gpu": tflops,
        "flop_rule": rule.id,
        "peak_bytes": summary.peak_bytes,
        "predicted": {
            "step_s": summary.predicted_s,
            "step_s_low": summary.predicted_low_s,
            "step_s_high": summary.predicted_high_s,
            "peak_bytes": summary.predicted_bytes,
            "basis": summary.predicted_by,
        },
        "reason": why or summary.failure,
    }


def _print(
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    whole: Mapping[Any, int],
    total: int,
    *,
    guessed: bool,
) -> None:
    """A guess from the cores is kept with the runs, but is not worth two columns here."""
    headings = ["combination", "outcome", "sec/it", "tokens/s/GPU", "TFLOP/s/GPU", "memory"]
    headings += [] if guessed else ["predicted sec/it", "off by", "predicted memory"]
    cells = []
    for row in rows:
        auto = row["combination"].get("micro_batch") == "auto"
        chosen = f" (micro_batch={row['micro_batch']})" if auto and row["micro_batch"] else ""
        line = [
            told(tuple(row["combination"].items())) + chosen,
            row["outcome"],
            show_seconds(row["step_s"]) if row["step_s"] else "-",
            f"{row['tokens_s_gpu']:,.0f}" if row["tokens_s_gpu"] else "-",
            f"{row['tflops_gpu']:.4g}" if row["tflops_gpu"] else "-",
            show_bytes(row["peak_bytes"]) if row["peak_bytes"] else "-",
        ]
        line += [] if guessed else _predicted_cells(row)
        cells.append([*line, row["reason"][:70]])
    print(render([*headings, "why"], cells, args.format))
    if args.format != "csv":
        said = ", ".join(f"{count} {outcome}" for outcome, count in whole.items() if count)
        print(f"\n{sum(whole.values())} of {total} accounted for: {said}; store {args.runs}")


def _predicted_cells(row: dict[str, Any]) -> list[str]:
    said = row["predicted"]
    if said["step_s"] is None:
        return ["-", "-", "-"]
    off = f"{100 * (said['step_s'] / row['step_s'] - 1):+.0f}%" if row["step_s"] else "-"
    return [show_seconds(said["step_s"]), off, show_bytes(said["peak_bytes"])]
