"""Run many configurations, keep every outcome, and start again where a stopped sweep left off.

FILE is a run with a [sweep] table whose lists are the axes; it runs at once. The flag form (-m -s
-b -t -g) follows the MPT scripts and runs nothing without --run. A configuration that fails is a
row, not an end. Finished runs of the store are not run again, interrupted ones are.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import Counter
from typing import Any

from fourfold import files
from fourfold.commands import flags, progress, sweep_flags
from fourfold.errors import UserError
from fourfold.launch.campaign import Campaign, Done
from fourfold.result.report import OUTCOMES
from fourfold.result.store import Store
from fourfold.search.legal import Target, why_not
from fourfold.show.table import json_text, render
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import Combination, Expansion, Sweep, expand, read_sweep, told
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold sweep sweep.toml --dry-run
  fourfold sweep sweep.toml
  fourfold sweep -m llama-tiny mpt-tiny -s 6 7 -b 10 10 -t fp32 -g 1 2 --micro-batch 1 2 --tag first
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
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION")
    parser.add_argument("--cluster", metavar="NAME", help="for the predicted time")
    parser.add_argument("--profile", metavar="FILE", help="this machine, from 'calibrate --out'")
    sweep_flags.add_arguments(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise UserError("must be 1 or more", field="repeat", value=args.repeat)
    expansion = expand(_sweep(args))
    if args.tag:
        expansion = _tagged(expansion, args.tag)
    if not expansion.total:
        raise UserError(
            "leaves no combination", field="where", value=f"{expansion.dropped} dropped",
            way_out="loosen the conditions",
        )  # fmt: skip
    refusals = [_refusal(combination) for combination in expansion.combinations]
    if args.dry_run or (sweep_flags.given(args) and not args.start):
        return _dry_run(args, expansion, refusals)
    return _run_all(args, expansion, refusals)


def _sweep(args: argparse.Namespace) -> Sweep:
    if bool(args.file) == sweep_flags.given(args):
        raise UserError(
            "give a FILE.toml or models with -m",
            field="FILE",
            way_out="see 'fourfold sweep --help'",
        )
    if not args.file:
        return sweep_flags.sweep_of(args)
    data = codec.parse_toml(files.read_text(args.file, field="FILE"))
    try:
        sweep = read_sweep(data)
    except UserError as error:
        raise error.within("") from None
    from fourfold.spec.expression import parse

    return dataclasses.replace(sweep, where=(*sweep.where, *map(parse, args.where)))


def _tagged(expansion: Expansion, tag: str) -> Expansion:
    tagged = tuple(
        dataclasses.replace(one, spec=dataclasses.replace(one.spec, tag=tag)) if one.spec else one
        for one in expansion.combinations
    )
    return dataclasses.replace(expansion, combinations=tagged)


def _refusal(combination: Combination) -> str:
    """Why a combination cannot run; '' when it can."""
    spec = combination.spec
    if spec is None:
        return combination.refusal
    reasons = why_not(spec.model, spec.layout, spec.batch, spec.policy, Target(gpus=spec.gpus))
    return "; ".join(map(str, reasons))


def _run_all(args: argparse.Namespace, expansion: Expansion, refusals: list[str]) -> int:
    campaign = Campaign(Store(args.runs), say=progress.progress_lines(), again=args.again)
    for combination, why in zip(expansion.combinations, refusals, strict=True):
        if why:
            _note(f"illegal: {combination.label}: {why}")
    campaign.clear_up()
    counts: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for number, (one, why) in enumerate(
        zip(expansion.combinations, refusals, strict=True), start=1
    ):
        done = _one(campaign, one, why, args.repeat)
        outcome = done[-1].outcome if done else "illegal"
        counts[outcome] += 1
        rows.append(_row(one, done, outcome, why))
        _note(f"[{number}/{expansion.total}] {one.label}: {_ended(done, outcome)}")
    _show(args, expansion, counts, rows)
    return 0


def _note(text: str) -> None:
    progress.end_line()
    print(text, file=sys.stderr, flush=True)


def _one(campaign: Campaign, one: Combination, why: str, repeats: int) -> list[Done]:
    if one.spec is None:
        return []
    if why:
        return [campaign.refuse(one.spec, why)]
    return campaign.run(one.spec, repeats)


def _ended(done: list[Done], outcome: str) -> str:
    if not done:
        return outcome
    summary = done[-1].stored.summary
    text = (
        outcome if summary.step_s is None else f"{outcome}, {show_seconds(summary.step_s)} a step"
    )
    return f"{text} (stored before)" if done[-1].resumed else text


def _row(one: Combination, done: list[Done], outcome: str, why: str) -> dict[str, Any]:
    row: dict[str, Any] = {"combination": dict(one.varied), "outcome": outcome}
    if done:
        summary = done[-1].stored.summary
        row |= {
            "run_id": summary.run_id,
            "folder": str(done[-1].stored.folder),
            "resumed": done[-1].resumed,
            "step_s": summary.step_s,
            "step_s_low": summary.low_s,
            "step_s_high": summary.high_s,
            "tokens_s_gpu": summary.tokens_s_gpu,
            "peak_bytes": summary.peak_bytes,
        }
        why = why or summary.failure
    return row | {"reason": why}


def _show(
    args: argparse.Namespace, expansion: Expansion, counts: Counter[str], rows: list[dict[str, Any]]
) -> None:
    whole = {outcome: counts[outcome] for outcome in OUTCOMES}
    assert sum(whole.values()) == expansion.total
    if args.format == "json":
        data = {"total": expansion.total, **whole, "counts": whole, "dropped": expansion.dropped}
        print(json_text(data | {"same": expansion.same, "runs": rows}))
        return
    cells = [
        [
            told(tuple(row["combination"].items())),
            row["outcome"],
            show_seconds(row["step_s"]) if row.get("step_s") else "-",
            f"{row['tokens_s_gpu']:,.0f}" if row.get("tokens_s_gpu") else "-",
            show_bytes(row["peak_bytes"]) if row.get("peak_bytes") else "-",
            row["reason"][:70],
        ]
        for row in rows
    ]
    headings = ["combination", "outcome", "sec/it", "tokens/s/GPU", "memory", "why"]
    print(render(headings, cells, args.format))
    if args.format != "csv":
        said = ", ".join(f"{count} {outcome}" for outcome, count in whole.items() if count)
        print(
            f"\n{sum(whole.values())} of {expansion.total} accounted for: {said}; store {args.runs}"
        )


def _dry_run(args: argparse.Namespace, expansion: Expansion, refusals: list[str]) -> int:
    """The plan: what is illegal and why first, then what would run and how long it may take."""
    from fourfold.search.forecast import forecast

    legal = [
        one.spec
        for one, why in zip(expansion.combinations, refusals, strict=True)
        if one.spec is not None and not why
    ]
    campaign = Campaign(Store(args.runs), again=args.again)
    missing = [max(0, args.repeat - len(campaign.finished(spec))) for spec in legal]
    cluster, profile = _machine(args)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    answers = forecast(legal, cluster=cluster, profile=profile, cores=cores) if legal else []
    total_s = sum(a.run_s(s) * n for a, s, n in zip(answers, legal, missing, strict=True))
    basis = args.cluster or args.profile or "a rough guess; 'fourfold calibrate' knows better"
    plan = [
        _planned(spec, answer, left)
        for spec, answer, left in zip(legal, answers, missing, strict=True)
    ]
    illegal = [
        {"combination": dict(one.varied), "reason": why}
        for one, why in zip(expansion.combinations, refusals, strict=True)
        if why
    ]
    if args.format == "json":
        head = {"total": expansion.total, "illegal": illegal, "planned": plan}
        said = {"dropped": expansion.dropped, "same": expansion.same, "basis": basis}
        print(json_text(head | {"to_run": sum(missing), "predicted_s": total_s} | said))
        return 0
    _print_plan(args, illegal, plan)
    if args.format != "csv":
        print(
            f"\n{expansion.total} combinations: {len(illegal)} illegal, {len(legal)} legal, "
            f"{len(legal) - sum(map(bool, missing))} of them stored before; {expansion.dropped} "
            f"dropped by conditions\nto run: {sum(missing)}, about {show_seconds(total_s)} "
            f"({total_s / 3600:.2f} h) by {basis}"
        )
        if sweep_flags.given(args) and not args.start:
            print("nothing was run: add --run")
    return 0


def _planned(spec: RunSpec, answer: Any, left: int) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "model": spec.model.name,
        "layout": str(spec.layout),
        "gpus": spec.gpus,
        "seq_len": spec.batch.seq_len,
        "micro_batch": spec.batch.micro_batch or "auto",
        "global_batch": spec.batch.global_batch,
        "precision": spec.policy.precision,
        "runs_left": left,
        "step_s": answer.step_s,
        "peak_bytes": answer.peak_bytes,
        "run_s": answer.run_s(spec),
    }


def _print_plan(
    args: argparse.Namespace, illegal: list[dict[str, Any]], plan: list[dict[str, Any]]
) -> None:
    if illegal:
        rows = [[told(tuple(one["combination"].items())), one["reason"]] for one in illegal]
        print(render(["illegal", "why"], rows, args.format), end="\n\n")
    headings = [
        "model",
        "layout",
        "seq",
        "micro",
        "global",
        "precision",
        "left",
        "sec/it",
        "memory",
    ]
    cells = [
        [
            row["model"], row["layout"], str(row["seq_len"]), str(row["micro_batch"]),
            str(row["global_batch"]), row["precision"], str(row["runs_left"]),
            show_seconds(row["step_s"]), show_bytes(row["peak_bytes"]),
        ]
        for row in plan
    ]  # fmt: skip
    print(render(headings, cells, args.format))


def _machine(args: argparse.Namespace) -> tuple[Any, Any]:
    from fourfold.result.profile import HardwareProfile
    from fourfold.spec import catalog

    cluster = catalog.cluster(args.cluster) if args.cluster else None
    text = files.read_text(args.profile, field="profile") if args.profile else None
    return cluster, codec.from_json(HardwareProfile, text) if text else None
