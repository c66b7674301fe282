"""Find the rows of published tables that cannot be right, and say what they should be.

Reads Markdown, CSV or JSON with tables of the MPT, topology, scaling and reference styles, any
number of them in a file, with the text between. Exit code: 0 nothing found, 1 findings, 2 no table.
"""

from __future__ import annotations

import argparse
import dataclasses

from fourfold.commands import flags
from fourfold.errors import UserError, nearest
from fourfold.show.table import json_text, render
from fourfold.tables.document import Document
from fourfold.tables.forms import read_file
from fourfold.tables.lint import RULES, Finding, lint
from fourfold.tables.styles import style_of

EXAMPLES = """\
examples:
  fourfold lint results.md
  fourfold lint notes.md --format json
  fourfold lint results.csv --ignore memory-order --ignore heading-count
  fourfold lint --rules
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="tables in .md, .csv or .json")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="leave out a rule's findings"
    )
    parser.add_argument("--rules", action="store_true", help="list the rules and leave")
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    if args.rules:
        print(render(["rule", "what must hold"], [[*pair] for pair in RULES.items()], args.format)
              if args.format != "json" else json_text({"rules": RULES}))  # fmt: skip
        return 0
    for rule in args.ignore:
        if rule not in RULES:
            raise UserError("unknown rule", field="ignore", value=rule, hint=nearest(rule, RULES))
    if not args.files:
        raise UserError("is missing", field="FILE", hint="name a .md, .csv or .json file")
    found: list[tuple[str, Finding]] = []
    tables = rows = 0
    for path in args.files:
        document = read_file(path)
        tables, rows = tables + _known(document, path), rows + _rows(document)
        found += [(path, item) for item in lint(document) if item.rule not in args.ignore]
    _show(args, found, f"{tables} tables, {rows} rows checked")
    return 1 if found else 0


def _known(document: Document, path: str) -> int:
    """Tables whose style is known. Checking none would look like a clean bill: that is an error."""
    known = sum(style_of(table) != "other" for table in document.tables)
    if not known:
        raise UserError(
            "holds no table of a known style",
            field="FILE",
            value=path,
            hint="mpt, topology, scaling and reference tables are known ('docs/tables.md')",
        )
    return known


def _rows(document: Document) -> int:
    return sum(len(table.data) for table in document.tables if style_of(table) != "other")


def _show(args: argparse.Namespace, found: list[tuple[str, Finding]], checked: str) -> None:
    if args.format == "json":
        items = [{"file": path, **dataclasses.asdict(item)} for path, item in found]
        print(json_text({"findings": items, "checked": checked}))
        return
    several = len(args.files) > 1
    headings = ["where", "rule", "value", "expected", "repair"]
    rows = [
        [f"{path}: {item.place}" if several else item.place, *_texts(item)] for path, item in found
    ]
    if rows or args.format == "csv":
        print(render(headings, rows, args.format))
    if args.format != "csv":
        print(f"\n{len(found)} findings; {checked}" if found else f"nothing found; {checked}")


def _texts(item: Finding) -> list[str]:
    return [item.rule, item.value, item.expected, item.repair]
