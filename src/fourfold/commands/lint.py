"""Find rows of published tables that cannot be right, and suggest the repair.

Reads Markdown, CSV or JSON with tables of the MPT, topology, scaling and reference styles, any
number of them in a file, with the text between. Exit code: 0 nothing found, 1 findings, 2 no table.
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.table import Grid, Part
from fourfold.units import counted

EXAMPLES = """\
examples:
  fourfold lint results.md
  fourfold lint notes.md --format json
  fourfold lint results.csv --ignore memory-order --ignore heading-count
  fourfold lint --rules
"""
OPTIONS = (
    option("files", "tables in .md, .csv or .json", "FILE", nargs="*"),
    option("--ignore", "ignore a rule", "RULE", repeated=True),
    option("--rules", "list the rules and exit", switch=True),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    if args.rules:
        known = fourfold.lint_rules()
        return Output.of(known, lambda: [Grid(["rule", "what must hold"], [*known.rules.items()])])
    answer = fourfold.lint(args.files, ignored=args.ignore or ())
    status = 1 if answer.findings else 0
    return Output.of(answer, lambda: _page(answer, several=len(args.files) > 1), status=status)


def _page(answer: Any, *, several: bool) -> list[Part]:
    if not answer.findings:
        return [f"nothing found; {answer.checked}"]
    rows = [
        [f"{path}: {item.place}" if several else item.place, item.rule, item.value, item.expected,
         item.repair]
        for path, item in answer.findings
    ]  # fmt: skip
    table = Grid(["where", "rule", "value", "expected", "repair"], rows)
    return [table, "", f"{counted(len(rows), 'finding')}; {answer.checked}"]
