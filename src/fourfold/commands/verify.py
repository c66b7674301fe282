"""Does every layout compute what one process computes? Trains tiny models both ways and compares
loss, every gradient, the global norm, and parameters after three clipped AdamW steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fourfold.commands import flags, verify_cases
from fourfold.commands.verify_cases import TINY, USUAL, Wish, describe
from fourfold.errors import UserError
from fourfold.launch.devices import require_gpus
from fourfold.show.micro import micro_words
from fourfold.show.table import json_text, render
from fourfold.spec import check
from fourfold.spec.catalog import model
from fourfold.spec.job import Job, Limits
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.run import RunSpec
from fourfold.spec.runnable import not_run
from fourfold.spec.words import BUNDLES

EXAMPLES = """\
examples:
  fourfold verify --world 4                       every legal layout of 4 ranks, three families
  fourfold verify --world 8 --sample 40 --seed 1  a stratified sample
  fourfold verify --world 16 --layout "pp2 dp2 cp2 tp2" --set policy.cp_kind=ulysses
  fourfold verify --world 4 --layout "dp2 tp2" --break norm-grad   must fail: it sees mistakes
  fourfold verify --world 8 --device cuda         on your GPUs, over NCCL
  fourfold verify --world 8 --sample 20 --device cuda --share-gpu    all ranks on one GPU
"""
FAULTS = (
    "loss-divisor", "tied-grad", "cp-positions", "norm-grad",
    "layer-skip", "kv-head", "stale-weight", "norm-twice",
)  # fmt: skip
_MAX_WORLD = 1024  # ranks are processes of this machine, which has its own bound
_HEADINGS = ("family", "layout", "policy", "loss", "norm", "grad", "param", "result")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, metavar="N", help="ranks (default: the layout's)")
    parser.add_argument("--sample", type=int, metavar="K", help="only K layouts, stratified")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, weights and tokens")
    parser.add_argument("--layout", metavar="L", help="only this one, as 'pp2 dp2 tp2'")
    parser.add_argument(
        "--family",
        choices=tuple(TINY),
        action="append",
        help=f"only this family (default: {', '.join(USUAL)})",
    )
    parser.add_argument(
        "--model", action="append", metavar="NAME", help="another (small) model: a preset or a file"
    )
    parser.add_argument("--axis", choices=AXES, help="only layouts with this axis above 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help="several ranks on a GPU: its kernels, gloo through host memory between ranks",
    )
    parser.add_argument("--break", dest="fault", choices=FAULTS, help="plant a fault: must fail")
    parser.add_argument(
        "--precision", default="fp32", metavar="X", help=f"{', '.join(BUNDLES)} (default fp32)"
    )
    parser.add_argument(
        "--global-batch", type=flags.size, metavar="N", help="sequences of one step"
    )
    parser.add_argument(
        "--micro-batch", type=flags.size, metavar="N", help="need not divide anything"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="such as policy.cp_kind=ring",
    )
    parser.add_argument("--limit", type=float, default=180.0, metavar="S", help="seconds a layout")
    flags.add_permit(parser)
    flags.add_format(parser)


def run(args: argparse.Namespace) -> int:
    wish = _wish(args)
    found, refused = verify_cases.cases(wish)
    if not found:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in refused.items())
        raise UserError(
            f"no legal layout; refused for: {reasons or 'nothing matched'}",
            field="layout",
            value=args.layout or f"{wish.world} ranks",
            hint="change --world, --layout or --axis",
        )
    if args.sample is not None:
        found = verify_cases.sample(found, args.sample, args.seed)
    rows = _carry_out(found, args)
    limits = [row.pop("limits") for row in rows if "limits" in row]
    report = {
        "layouts": rows,
        "passed": sum(row["pass"] for row in rows),
        "refused": dict(refused),
        "total": len(rows),
        "world": wish.world,
        "device": args.device,
        "share_gpu": args.share_gpu,
        "precision": found[0].policy.precision,
        "break": args.fault,
        "limits": limits[0] if limits else {},
        "micro_batches": _same({micro_words(run.batch, run.layout.dp) for run in found}),
    }
    print(json_text(report) if args.format == "json" else _text(report, args.format))
    return 0 if report["passed"] == report["total"] else 1


def _same(words: set[str]) -> str | None:
    """What all layouts have in common; None where they differ."""
    return words.pop() if len(words) == 1 else None


def _wish(args: argparse.Namespace) -> Wish:
    layout = Layout.parse(args.layout) if args.layout else None
    world = args.world if args.world is not None else (layout.world if layout else 0)
    if args.world is None and layout is None:
        raise UserError("is missing", field="world", hint="add --world 4")
    if layout and layout.world != world:
        raise UserError(
            f"has {layout.world} ranks, not --world {world}", field="layout", value=args.layout
        )
    check.whole(1, _MAX_WORLD, world=world)
    _checked_sizes(args, world)
    models = tuple(model(name) for name in args.model or _families(args.family))
    for shape in models:
        _must_run(shape)
    fixed: dict[str, Any] = {"precision": args.precision}
    for assignment in args.set:
        path, _, text = assignment.partition("=")
        name = path.strip().removeprefix("policy.")
        if not text or "." in name:
            raise UserError("must be policy.FIELD=VALUE", field="--set", value=assignment)
        fixed[name] = flags.toml_value(text)
    for name, value in flags.permit(args).env:
        flags.put(fixed, f"env.{name}", value)
    fixed = _checked(fixed)
    return Wish(
        world=world,
        models=models,
        layout=layout,
        axis=args.axis,
        global_batch=args.global_batch,
        micro_batch=args.micro_batch,
        fixed=tuple(fixed.items()),
        device=args.device,
        seed=args.seed,
    )


def _families(asked: list[str] | None) -> list[str]:
    return [TINY[family] for family in asked or USUAL]


def _checked(fixed: dict[str, Any]) -> dict[str, Any]:
    """Unknown fields and values are refused here, with the codec's words; aliases are resolved."""
    from fourfold.spec import codec
    from fourfold.spec.policy import Policy

    policy = codec.decode(Policy, fixed, "policy")
    return {name: getattr(policy, name) for name in fixed}


def _must_run(shape: ModelShape) -> None:
    """Refused before layouts are tried: no layout would help."""
    lacking = not_run(shape, verify_cases.SEQ_LEN)
    if lacking:
        rule = f"the engine does not run {', '.join(lacking)}"
        raise UserError(rule, field="model", value=shape.name, hint="plan and models take it")


def _checked_sizes(args: argparse.Namespace, world: int) -> None:
    """0 is a mistake, not the absence of a wish; and GPUs are counted before ranks start."""
    asked = {"global_batch": args.global_batch, "micro_batch": args.micro_batch}
    check.whole(**{name: size for name, size in asked.items() if size is not None})
    if args.share_gpu and args.device != "cuda":
        raise UserError("belongs to --device cuda", field="--share-gpu", hint="add --device cuda")
    hint = "--device cpu" if args.share_gpu else "--share-gpu, or --device cpu"
    require_gpus(args.device, world, hint=hint, shared=args.share_gpu)
    flags.permit(args).require_room(world)


def _carry_out(found: list[RunSpec], args: argparse.Namespace) -> list[dict[str, Any]]:
    from fourfold.launch.local import run_job
    from fourfold.launch.scratch import scratch

    options = (("break", args.fault),) if args.fault else ()
    if args.share_gpu:
        options += (("share_gpu", "true"),)
    limits = Limits(start_s=max(600.0, args.limit), step_s=args.limit)
    job = Job(job="verify", specs=tuple(found), ranks=found[0].gpus, options=options, limits=limits)
    with scratch() as folder:
        report = run_job(job, folder, progress=_say, permit=flags.permit(args))
        ends = dict(enumerate(report.runs))
        return [_row(i, spec, folder, ends.get(i)) for i, spec in enumerate(found)]


def _say(line: str) -> None:
    print(f"verify: {line}", file=sys.stderr)


def _row(index: int, spec: RunSpec, folder: Path, end: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "family": spec.model.family,
        "model": spec.model.name,
        "layout": str(spec.layout),
        "policy": describe(spec),
        "micro_batch": spec.batch.micro_batch,
        "global_batch": spec.batch.global_batch,
        "micro_sizes": [list(sizes) for sizes in spec.batch.micro_plan(spec.layout.dp)],
    }
    path = folder / f"answer-{index}.json"
    if path.exists():
        return row | json.loads(path.read_text(encoding="utf-8"))
    words = "no answer"
    if end is not None and end.failure is not None:
        failure = end.failure
        words = f"{end.outcome}: {failure.who}: {failure.message}"
    empty = dict.fromkeys(("loss_diff", "norm_rel", "grad_rel", "param_rel"))
    return row | empty | {"pass": False, "error": words}


def _text(report: dict[str, Any], style: str) -> str:
    rows = report["layouts"]
    # All that failed; of what passed, the worst few of each family say enough.
    shown = [row for row in rows if not row["pass"]]
    shown += sorted((r for r in rows if r["pass"]), key=lambda r: -r["grad_rel"])[:12]
    table = render(_HEADINGS, [_cells(row) for row in shown], style) if rows else ""
    lines = [table, ""]
    hidden = len(rows) - len(shown)
    if hidden > 0:
        lines.append(f"{hidden} more passed (--format json has all)")
    for row in rows:
        if row.get("error"):
            lines.append(f"{row['family']} {row['layout']} {row['policy']}: {row['error']}")
    lines.append(_summary(report))
    return "\n".join(lines)


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
        f"refused: {refused or 'none'}\n{report['world']} ranks, {device}, "
        f"{report['precision']}{fault}; limits: {limits}{micro}"
    )
