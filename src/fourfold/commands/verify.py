"""Proofs that layouts compute what one process computes, ours and other engines'."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import fourfold
from fourfold import files, options
from fourfold.commands import command
from fourfold.errors import UserError
from fourfold.events import OnEvent
from fourfold.options import option
from fourfold.output import Output, submitted, table_csv
from fourfold.show.machines import engines_page, verdicts_page
from fourfold.show.runs import verified_page
from fourfold.spec import codec, texts
from fourfold.verbs.conformance import EnginesRequest, joined, read_matrix
from fourfold.verbs.run_requests import VerifyRequest

if TYPE_CHECKING:
    from fourfold.flag import Arguments

_VERIFY = """\
examples:
  fourfold verify --world 4                       every legal layout of 4 ranks, three families
  fourfold verify --world 8 --sample 40 --seed 1  a stratified sample
  fourfold verify --world 16 --layout "pp2 dp2 cp2 tp2" --set policy.cp_kind=ulysses
  fourfold verify --world 4 --layout "dp2 tp2" --break norm-grad   must fail: mistakes are caught
  fourfold verify --world 8 --device cuda         on your GPUs, over NCCL
  fourfold verify --world 8 --sample 20 --device cuda --share-gpu    all ranks on one GPU
  fourfold verify --engine megatron-core==0.19.2 --layout "tp2 sp ep2 etp1 experts"
  fourfold verify --engine torchtitan==0.2.2 --layout dp2 --repro fault.py
"""


@command(
    *options.of(VerifyRequest),
    options.SET._replace(help="set a policy field, such as policy.cp_kind=ring"),
    examples=_VERIFY,
)
def verify(args: Arguments, show: OnEvent) -> Output:
    """Check that layouts compute what one process computes.

    Trains tiny models both ways and compares the loss, every gradient, the global norm, and the
    parameters after three clipped AdamW steps. With --engine another engine is checked, by its own
    parallel code, and a difference gets a name; 'fourfold engines' installs releases.
    """
    policy: dict[str, object] = {}
    for path, text in options.assignments(args):
        name = path.removeprefix("policy.")
        if not text or not name.replace("muon.", "", 1).isidentifier():
            raise UserError("must be policy.FIELD=VALUE", field="--set", value=f"{path}={text}")
        codec.put(policy, name, texts.toml_value(text))
    request = options.load(VerifyRequest, args, policy=policy)
    if request.engine is not None:
        verdicts = fourfold.conform(request, on_event=show)
        pages = partial(verdicts_page, verdicts)
        return Output.of(verdicts, pages, status=0 if verdicts.right else 1)
    if request.detach or request.print_launch:
        return submitted(fourfold.submit_verify(request))
    answer = fourfold.verify(request, on_event=show)
    status = 0 if answer.passed == answer.total else 1
    return Output.of(answer, lambda: verified_page(answer), status=status)


_ENGINES = """\
examples:
  fourfold engines install megatron-core==0.19.2 torchtitan==0.3.0 deepspeed
  fourfold engines
  fourfold engines matrix --out conformance
  fourfold engines matrix torchtitan==0.2.2 fourfold --out conformance
"""


@command(*options.of(EnginesRequest, "names", "engines"), line="install releases")
def add(args: Arguments, show: OnEvent) -> Output:
    """Install releases from the package index that pip uses."""
    request = options.load(EnginesRequest, args)
    answer = fourfold.install_engines(request, on_event=show)
    return Output.of(answer, lambda: engines_page(answer))


@command(
    *options.of(EnginesRequest),
    option("--out", "folder of matrix.html and matrix.csv (default conformance)", "DIR"),
    option("--browser", "show the page in a browser", switch=True),
    options.FORCE,
    line="make the matrix of verdicts",
)
def make_matrix(args: Arguments, show: OnEvent) -> Output:
    """Every axis and option of every release, as a page and a CSV file. Releases that are not named
    stay as the folder has them.
    """
    from fourfold.page.document import MARK, show_page
    from fourfold.page.report import matrix_page

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


@command(
    *options.of(EnginesRequest, "engines"),
    examples=_ENGINES,
    actions={"install": add, "matrix": make_matrix},
)
def engines(args: Arguments, show: OnEvent) -> Output:
    """List other engines that 'verify --engine' can check; install them; make the matrix of all.

    Every release lives in a folder of its own, with what it needs, and takes torch from fourfold's
    environment. 'engines matrix' runs every axis and option of every release and writes a page and
    a CSV file of verdicts.
    """
    answer = fourfold.engines(options.load(EnginesRequest, args))
    return Output.of(answer, lambda: engines_page(answer))
