"""List other engines that 'verify --engine' can check; install them; make the matrix of all.

Every release lives in a folder of its own, with what it needs, and takes torch from fourfold's
environment. 'engines matrix' runs every axis and option of every release and writes a page and a
CSV file of verdicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fourfold
from fourfold import files, options
from fourfold.commands import Command
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output, table_csv
from fourfold.page.document import MARK, show_page
from fourfold.page.report import matrix_page
from fourfold.show.machines import engines_page, verdicts_page
from fourfold.verbs.conformance import EnginesRequest, joined, read_matrix

EXAMPLES = """\
examples:
  fourfold engines install megatron-core==0.19.2 torchtitan==0.3.0 deepspeed
  fourfold engines
  fourfold engines matrix --out conformance
  fourfold engines matrix torchtitan==0.2.2 fourfold --out conformance
"""
OPTIONS = (*options.of(EnginesRequest, "engines"), options.FORMAT)


def run(args: Any, show: OnEvent) -> Output:
    answer = fourfold.engines(options.load(EnginesRequest, args))
    return Output.of(answer, lambda: engines_page(answer))


def add(args: Any, show: OnEvent) -> Output:
    request = options.load(EnginesRequest, args)
    answer = fourfold.install_engines(request, on_event=show)
    return Output.of(answer, lambda: engines_page(answer))


def make_matrix(args: Any, show: OnEvent) -> Output:
    out = Path(args.out or "conformance")
    page, sheet = out / "matrix.html", out / "matrix.csv"
    files.require_mine(page, mark=MARK, force=bool(args.force))
    files.require_place(sheet)
    request = options.load(EnginesRequest, args)
    earlier = read_matrix(files.read_text(sheet, field="out") if sheet.exists() else "")
    answer = joined(earlier, fourfold.matrix(request, on_event=show))
    files.write_text(page, matrix_page(answer))
    files.write_text(sheet, table_csv(answer.rows()))
    if args.browser:
        show_page(str(page), show)
    return Output.of(answer, lambda: [*verdicts_page(answer), f"{page} and {sheet}"])


ACTIONS = {
    "install": Command(
        "install",
        "Install releases from the package index that pip uses.",
        (*options.of(EnginesRequest, "names", "engines"), options.FORMAT),
        add,
        line="install releases",
    ),
    "matrix": Command(
        "matrix",
        "Every axis and option of every release, as a page and a CSV file. Releases that are not "
        "named stay as the folder has them.",
        (
            *options.of(EnginesRequest),
            option("--out", "folder of matrix.html and matrix.csv (default conformance)", "DIR"),
            option("--browser", "show the page in a browser", switch=True),
            options.FORCE,
            options.FORMAT,
        ),
        make_matrix,
        line="make the matrix of verdicts",
    ),
}
