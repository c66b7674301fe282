"""plan --export: which engine, what it leaves open, and the files it gets."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.spec.model import ModelShape


def implied_stack(args: argparse.Namespace) -> str:
    """--export X asks for the numbers of X; a --stack with other rules contradicts it."""
    from fourfold.search import export
    from fourfold.search.stacks import stack_rules

    if not args.export:
        return args.stack or ""
    implied = export.stack_of(args.export)
    if not args.stack:
        return implied
    if stack_rules(args.stack).name != stack_rules(implied).name:
        raise UserError(
            f"has other rules and seconds than --export {args.export}",
            field="stack",
            value=args.stack,
            hint=f"leave --stack out, or --stack {implied}",
        )
    return args.stack


def keep_to_limits(args: argparse.Namespace, fixed: dict[str, Any]) -> dict[str, Any]:
    """What the exported release has no setting for is not searched, and refused if asked for."""
    from fourfold.search import export

    if not args.export:
        return fixed
    for name, value in export.limits(args.export).items():
        if fixed.get(name, value) != value:
            raise UserError(
                f"{args.export} has no setting for it",
                field=name,
                value=fixed[name],
                hint=f"{name} = {value}",
            )
        fixed = fixed | {name: value}
    return fixed


def require_expressible(args: argparse.Namespace, model: ModelShape) -> None:
    from fourfold.search import export

    if args.export:
        export.check(args.export, model)


def write(args: argparse.Namespace, ranking: Any) -> int:
    """The chosen layout as files in --out, or as one text on standard output."""
    from fourfold import files
    from fourfold.search import export

    setup = _setup(args, ranking)
    for note in setup.notes:
        print(note, file=sys.stderr)
    if not args.out:
        print(export.write(args.export, setup), end="")
    elif args.export == "torchrun":
        files.require_mine(args.out, mark="", force=args.force)
        files.write_text(args.out, export.write(args.export, setup))
    else:
        _write_folder(args, export.write_folder(args.export, setup))
    return 0


def _write_folder(args: argparse.Namespace, texts: dict[str, str]) -> None:
    """Every file whole or not at all; what somebody edited is not replaced unasked."""
    from fourfold import files

    out = Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.refused(error, out, field="out", verb="make") from None
    for name in texts:
        files.require_mine(out / name, mark="", force=args.force)
    for name, text in texts.items():
        files.write_text(out / name, text)
    os.chmod(out / "run.sh", 0o755)
    print(f"{', '.join(texts)} in {out}", file=sys.stderr)


def _setup(args: argparse.Namespace, ranking: Any) -> Any:
    from fourfold.search.export.setup import Setup

    if not len(ranking):
        raise UserError("nothing is ranked", field="export", hint="plan without --export says why")
    if args.pick > len(ranking):
        raise UserError(f"only {len(ranking)} are ranked", field="--pick", value=args.pick)
    ask, place = ranking.ask, args.pick - 1
    return Setup(
        model=ask.model,
        layout=ranking.layout(place),
        batch=replace(ask.batch, micro_batch=int(ranking.points["micro_batch"][place])),
        policy=ranking.policy(place),
        host_gpus=ask.cluster.host_gpus,
        stack=ask.stack,
        device=ask.cluster.device.id,
        model_name=args.model or "",
        notes=_notes(ranking, place),
    )


def _notes(ranking: Any, place: int) -> tuple[str, ...]:
    """Seconds and bytes of the choice, and whether it surely fits."""
    from fourfold.cost.memory.interval import memory_bounds
    from fourfold.cost.memory.peak import USABLE

    ask, gib = ranking.ask, 2.0**30
    predicted = ranking.predicted
    low, high = memory_bounds(predicted.columns.take(slice(place, place + 1)), ask.entry)
    limit = ask.cluster.device.memory_bytes
    needs = (
        f"{low[0] / gib:.0f} to {high[0] / gib:.0f} GiB of {limit / gib:.0f} on the fullest rank"
    )
    seconds = f"{predicted.low_s[place]:.3g} to {predicted.high_s[place]:.3g} s a step"
    fits = "surely fits" if high[0] <= limit * USABLE else "MAY NOT FIT"
    wrong = fits != "surely fits" and not ask.safe
    advice = "; --safe prefers what surely fits" if wrong else ""
    return (f"predicted as {ask.stack}: {seconds}; {fits}: {needs}{advice}",)
