"""List what is stored: every run with its outcome, speed and memory; failed ones too.

Conditions of --where know dp tp cp pp vp micro_batch global_batch seq_len gpus nodes layers hidden
heads mem_gib step_s; a run that has no value for a word (a failed one has no step_s) does not
match.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

from fourfold.commands import flags
from fourfold.errors import UserError
from fourfold.result.files.store import Store, Stored
from fourfold.result.record import RUN_FIELDS, Record
from fourfold.result.report import OUTCOMES
from fourfold.show.table import json_text, render
from fourfold.spec.expression import Expression, parse
from fourfold.units import show_bytes, show_seconds

EXAMPLES = """\
examples:
  fourfold runs
  fourfold runs --where 'tp == 2 and micro_batch > 1' --outcome ok --sort step_s
  fourfold runs --tag first-try --format json
  fourfold runs show 3fa2
"""
_SORTS = ("started_at", "step_s", "peak_bytes", "model", "outcome")
_HEADINGS = [
    "run", "model", "layout", "seq", "micro", "global", "precision", "sharding", "outcome",
    "sec/it", "tokens/s/GPU", "memory", "tag", "why",
]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="show RUN", help="one run in full: the beginning of its id"
    )
    flags.add_convention(parser)
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="which runs; all must hold",
    )
    parser.add_argument("--outcome", choices=OUTCOMES, action="append", help="only these outcomes")
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--tag", metavar="TAG", help="only runs of this tag")
    parser.add_argument("--sort", choices=_SORTS, default="started_at", help="order of the list")
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    if args.words:
        return _show(args)
    chosen = chosen_runs(args)
    chosen.sort(key=lambda stored: _order(stored.summary, args.sort))
    counts = Counter(stored.summary.outcome for stored in chosen)
    if args.format == "json":
        rows = [_plain(stored) for stored in chosen]
        print(json_text({"runs": rows, "outcomes": dict(counts), "total": len(rows)}))
        return 0
    print(render(_HEADINGS, [_cells(stored.summary) for stored in chosen], args.format))
    if args.format != "csv":
        said = ", ".join(f"{counts[name]} {name}" for name in OUTCOMES if counts[name])
        print(f"\n{len(chosen)} runs in {args.runs}" + (f": {said}" if said else ""))
    return 0


def _show(args: argparse.Namespace) -> int:
    """'show RUN': everything its report says, as 'bench' prints it."""
    from fourfold.commands.diff import repeats_of
    from fourfold.cost.count.flops import convention
    from fourfold.show import bench

    if len(args.words) != 2 or args.words[0] != "show":
        raise UserError(
            "must be 'show RUN', or nothing", field="runs", value=" ".join(args.words),
            hint="fourfold runs show 3fa2",
        )  # fmt: skip
    rule = convention(args.convention).id
    *_, stored = repeats_of(args.words[1], Store(args.runs).runs())
    plain = bench.facts(stored.report()) | {"folder": str(stored.folder)}
    if args.format == "json":
        print(json_text(plain))
        return 0
    print(bench.text(plain, rule, args.format), end="")
    return 0


def chosen_runs(args: argparse.Namespace) -> list[Stored]:
    """The stored runs that every given filter lets through."""
    conditions = [parse(text) for text in args.where]
    found = Store(args.runs).runs(progress=lambda text: print(text, file=sys.stderr))
    return [stored for stored in found if _wanted(stored.summary, args, conditions)]


def _wanted(summary: Record, args: argparse.Namespace, conditions: list[Expression]) -> bool:
    if args.outcome and summary.outcome not in args.outcome:
        return False
    if args.model and summary.model != args.model.lower():
        return False
    if args.tag is not None and summary.tag != args.tag:
        return False
    values = summary.values()
    return all(
        all(values.get(name) is not None for name in condition.names) and condition.holds(values)
        for condition in conditions
    )


def _order(summary: Record, name: str) -> tuple[Any, ...]:
    value = getattr(summary, name)
    return (value is None, value, summary.run_id, summary.repeat)


def _plain(stored: Stored) -> dict[str, Any]:
    plain = {name: getattr(stored.summary, name) for name in RUN_FIELDS if name != "model_json"}
    plain["env"] = dict(stored.summary.env)
    plain["layout"] = stored.summary.layout
    return {"folder": str(stored.folder), **plain}


def _cells(summary: Record) -> list[str]:
    speed = summary.tokens_s_gpu
    name = summary.run_id[:8] + (f"#{summary.repeat}" if summary.repeat else "")
    return [
        name,
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
