"""Print results as people publish them, from stored runs and from tables, in any of three styles.

SOURCE is a store (a folder of runs) or a file of tables (.md, .csv, .json); without one the store
of --runs is taken. mpt: the 20 columns of the MPT benchmarks. topology: the BLOOM notes' columns.
scaling: TFLOPs by layout and GPU count. A configuration measured again is shown with its newest
figure, the older ones stand below. Last comes how well the runs were predicted before they ran.
--out NAME writes NAME.csv and NAME.md in one go.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold import files
from fourfold.commands import flags
from fourfold.commands.bench_auto import TRIAL_TAG
from fourfold.commands.foresight import Foresight
from fourfold.commands.runs import chosen_runs
from fourfold.cost.count.flops import DEFAULT, convention
from fourfold.errors import UserError
from fourfold.result.files.store import INDEX, RUN_FILE, Stored
from fourfold.result.record import Record
from fourfold.result.report import OUTCOMES
from fourfold.show.table import json_text
from fourfold.tables.document import Document, Table, Text
from fourfold.tables.forms import read_file, write
from fourfold.tables.publish import STYLE_CONVENTION, STYLES, plain_records, publish
from fourfold.tables.records import records
from fourfold.tables.stored import published
from fourfold.tables.styles import unread

if TYPE_CHECKING:
    from fourfold.search.running_score import Score

# Reading a whole run takes a millisecond; more than this many say nothing new about the planner.
_MOST_SCORED = 1000
_MARK = "Written by 'fourfold report'"
EXAMPLES = """\
examples:
  fourfold report --style topology
  fourfold report --style mpt --out results
  fourfold report runs/ colleague/runs published.md --style scaling --format md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="stores and files of tables")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="the store (default: runs)")
    parser.add_argument("--style", choices=STYLES, default="topology", help="columns to print")
    parser.add_argument(
        "--convention",
        metavar="ID",
        help=f"how FLOPs are counted (default {DEFAULT}; mpt for the mpt style, as published)",
    )
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION")
    parser.add_argument("--outcome", choices=OUTCOMES, action="append", help="only these outcomes")
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--tag", metavar="TAG", help="only runs of this tag")
    parser.add_argument("--cluster", metavar="NAME", help="score by what is predicted there today")
    parser.add_argument("--profile", metavar="FILE", help="or on this machine ('calibrate --out')")
    parser.add_argument("--out", metavar="NAME", help="write NAME.csv and NAME.md")
    flags.add_force(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    rule = convention(args.convention or STYLE_CONVENTION[args.style]).id
    stored: list[Stored] = []
    found = _records(args, stored)
    if not found:
        raise UserError(
            "holds no results",
            field="SOURCE",
            value=" ".join(args.sources) or args.runs,
            hint="'fourfold sweep' and 'fourfold bench' fill a store; --runs names another",
        )
    document = publish(found, args.style, rule)
    judged = _scores(args, stored)
    for score in judged:
        document = _with_line(document, str(score))
    if args.out:
        _write_both(document, args.out, force=args.force)
    if args.format == "json":
        plain = {"style": args.style, "convention": rule, "rows": plain_records(found, rule)}
        print(json_text(plain | {"scores": [dataclasses.asdict(score) for score in judged]}))
    elif not args.out:
        print(write(document, args.format), end="")
    return 0


def _with_line(document: Document, line: str) -> Document:
    """Below the last table; a document without any gets a text."""
    *blocks, last = document.blocks or (Text(()),)
    if isinstance(last, Text):
        return Document((*blocks, Text((*last.lines, line))))
    return Document((*blocks, last, Text(("", line))))


def _scores(args: argparse.Namespace, found: list[Stored]) -> list[Score]:
    """The planner against the stored runs: by what was said before each, or, with a cluster or a
    profile, by what would be said today."""
    from fourfold.search.running_score import Judged, kept, scores

    stored = [item for item in found if item.summary.outcome in ("ok", "oom")]
    if not (args.cluster or args.profile):
        return scores(kept([item.summary for item in stored]))
    ahead = Foresight(cluster=args.cluster, profile=args.profile)
    newest = sorted(stored, key=lambda item: item.summary.started_at)[-_MOST_SCORED:]
    said = ahead.predictions([item.report().spec for item in newest]) if newest else []
    pairs = zip(said, newest, strict=True)
    return scores([Judged(one, item.summary) for one, item in pairs])


def _measured(args: argparse.Namespace, source: str) -> list[Stored]:
    """What the filters let through; short trials that only asked whether a run fits are no
    measurements."""
    found = chosen_runs(argparse.Namespace(**{**vars(args), "runs": source}))
    return [item for item in found if args.tag or item.summary.tag != TRIAL_TAG]


def _records(args: argparse.Namespace, seen: list[Stored]) -> list[Record]:
    """Rows of every source; the stored runs among them are added to `seen`."""
    found: list[Record] = []
    for source in args.sources or [args.runs]:
        if Path(source).is_dir():
            stored = _measured(args, source)
            seen += stored
            found += [published(item.summary, at) for at, item in enumerate(stored)]
        elif args.sources:
            document = read_file(source)
            found += [r for r in records(document) if r.outcome != "absent"]
            for table in (block for block in document.blocks if isinstance(block, Table)):
                _name_unread(source, unread(table))
        else:
            raise UserError(
                "is no store yet", field="runs", value=source, hint="run something first"
            )
    return found


def _name_unread(source: str, headings: tuple[str, ...]) -> None:
    if headings:
        said = ", ".join(f"'{heading}'" for heading in headings)
        print(f"{source}: columns that are not read: {said}", file=sys.stderr)


def _write_both(document: Document, name: str, *, force: bool) -> None:
    stem = name.removesuffix(".csv").removesuffix(".md")
    if Path(stem).name in ("", INDEX, RUN_FILE):
        raise UserError("must be a file's name", field="out", value=name, hint="--out results")
    signed = _with_line(document, _MARK)
    for ending in ("csv", "md"):  # both or none: asked before the first is written
        files.require_mine(f"{stem}.{ending}", mark=_MARK, force=force)
    for ending in ("csv", "md"):
        files.write_text(f"{stem}.{ending}", write(signed, ending))
        print(f"wrote {stem}.{ending}", file=sys.stderr)
