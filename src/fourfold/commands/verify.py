"""Check that layouts compute what one process computes.

Trains tiny models both ways and compares the loss, every gradient, the global norm, and the
parameters after three clipped AdamW steps.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import fourfold
from fourfold import options
from fourfold.errors import UserError
from fourfold.output import Output, Stderr
from fourfold.show.table import Grid, Part
from fourfold.spec import codec
from fourfold.verbs.run_requests import VerifyRequest

EXAMPLES = """\
examples:
  fourfold verify --world 4                       every legal layout of 4 ranks, three families
  fourfold verify --world 8 --sample 40 --seed 1  a stratified sample
  fourfold verify --world 16 --layout "pp2 dp2 cp2 tp2" --set policy.cp_kind=ulysses
  fourfold verify --world 4 --layout "dp2 tp2" --break norm-grad   must fail: it sees mistakes
  fourfold verify --world 8 --device cuda         on your GPUs, over NCCL
  fourfold verify --world 8 --sample 20 --device cuda --share-gpu    all ranks on one GPU
"""
OPTIONS = (
    *options.of(VerifyRequest),
    options.option(
        "--set",
        "set a policy field, such as policy.cp_kind=ring",
        "FIELD=VALUE",
        repeated=True,
        rare=True,
    ),
    options.FORMAT,
)
_HEADINGS = ("family", "layout", "policy", "loss", "norm", "grad", "param", "result")


def run(args: Any) -> Output:
    policy = {}
    for path, text in options.assignments(args):
        name = path.removeprefix("policy.")
        if not text or "." in name:
            raise UserError("must be policy.FIELD=VALUE", field="--set", value=f"{path}={text}")
        policy[name] = codec.toml_value(text)
    request = options.load(VerifyRequest, args, policy=policy)
    answer = fourfold.verify(request, on_event=Stderr())
    return Output.of(answer, lambda: _page(answer.facts), status=0 if answer.passed else 1)


def _page(report: dict[str, Any]) -> list[Part]:
    rows = report["layouts"]
    # All that failed; of what passed, the worst few of each family say enough.
    shown = [row for row in rows if not row["pass"]]
    shown += sorted((r for r in rows if r["pass"]), key=lambda r: -r["grad_rel"])[:12]
    lines: list[Part] = [Grid(_HEADINGS, [_cells(row) for row in shown]), ""]
    hidden = len(rows) - len(shown)
    if hidden > 0:
        lines.append(f"{hidden} more passed (--format json has all)")
    for row in rows:
        if row.get("error"):
            lines.append(f"{row['family']} {row['layout']} {row['policy']}: {row['error']}")
    return [*lines, _summary(report)]


def _cells(row: dict[str, Any]) -> list[str]:
    gaps = [row["loss_diff"], row["norm_rel"], row["grad_rel"], row["param_rel"]]
    numbers = ["-" if gap is None else f"{gap:.1e}" for gap in gaps]
    result = "pass" if row["pass"] else "error" if row.get("error") else "FAIL"
    return [row["family"], row["layout"], row["policy"], *numbers, result]


def _summary(report: dict[str, Any]) -> str:
    families = Counter(row["family"] for row in report["layouts"])
    by_family = ", ".join(f"{family} {count}" for family, count in families.items())
    refused = ", ".join(f"{reason} {count}" for reason, count in report["refused"].items())
    fault = f", fault {report['break']} planted" if report["break"] else ""
    sizes = report["micro_batches"]
    micro = f"\nmicro batches, in sequences: {sizes}" if sizes else ""
    limits = ", ".join(f"{what} {limit:g}" for what, limit in report["limits"].items())
    device = report["device"] + (" (shared, over gloo)" if report["share_gpu"] else "")
    return (
        f"{report['passed']} of {report['total']} layouts equal one process ({by_family}); "
        f"rejected: {refused or 'none'}\n{report['world']} ranks, {device}, "
        f"{report['precision']}{fault}; limits: {limits}{micro}"
    )
