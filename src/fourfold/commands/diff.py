"""Compare two stored runs: settings, environment, results, and whether the times differ.

A and B are run folders, or the start of a run's id in the store of --runs ('3fa2', or '3fa2#1' for
one repeat). Without '#' all repeats of a run count. The verdict needs repeats, of these runs or of
others on the same device; without any it is "can't tell".
"""

from __future__ import annotations

from typing import Any

import fourfold
from fourfold import options
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output
from fourfold.show.runs import diff_page
from fourfold.verbs.requests import RunFilter

EXAMPLES = """\
examples:
  fourfold diff 3fa2 91bc
  fourfold diff '3fa2#0' '3fa2#1' --format json
  fourfold diff runs/3fa2..._0 colleague/runs/3fa2..._0
"""
OPTIONS = (
    option("a", "a run", "A"),
    option("b", "another run", "B"),
    *options.of(RunFilter, "runs"),
    options.FORMAT,
)


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.diff(args.a, args.b, store=args.runs or "runs", on_event=show)
    return Output.of(answer, lambda: diff_page(answer))
