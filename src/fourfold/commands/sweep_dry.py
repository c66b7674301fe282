"""What would a sweep run, how long would it take, and what is predicted not to be worth running?"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from fourfold.commands import bench_auto, sweep_flags
from fourfold.commands.foresight import GUESS, Foresight
from fourfold.launch.campaign import Campaign
from fourfold.result.files.store import Store
from fourfold.result.prediction import Prediction
from fourfold.search.predict import run_s
from fourfold.show.table import json_text, render
from fourfold.spec.expression import in_gib
from fourfold.spec.run import RunSpec
from fourfold.spec.sweep import Expansion, told, values_of
from fourfold.units import show_bytes, show_seconds

_GPUS_PER_NODE = 8


def foreseen(
    expansion: Expansion, refusals: list[str], ahead: Foresight
) -> tuple[Expansion, list[str], list[dict[str, Any]]]:
    """Leave out legal combinations whose predicted bytes or seconds a condition does not allow.

    (what is left, its refusals, what was left out and why). Illegal ones stay, with their reason.
    """
    if not expansion.foreseen:
        return expansion, refusals, []
    places = [at for at, why in enumerate(refusals) if not why]
    said = dict(zip(places, _predictions(expansion, places, ahead), strict=True))
    skipped: list[dict[str, Any]] = []
    left = []
    for at, one in enumerate(expansion.combinations):
        reason = _against(expansion, one.spec, said[at]) if at in said else ""
        if not reason:
            left.append(at)
            continue
        skipped.append({
            "combination": dict(one.varied), "reason": reason,
            "step_s": said[at].step_s, "peak_bytes": said[at].peak_bytes,
        })  # fmt: skip
    combinations = tuple(expansion.combinations[at] for at in left)
    rest = dataclasses.replace(
        expansion, combinations=combinations, dropped=expansion.dropped + len(skipped)
    )
    return rest, [refusals[at] for at in left], skipped


def _predictions(expansion: Expansion, places: list[int], ahead: Foresight) -> list[Prediction]:
    specs = [bench_auto.guessed(expansion.combinations[at].spec, ahead) for at in places]
    return ahead.predictions(specs) if specs else []


def _against(expansion: Expansion, spec: RunSpec, said: Prediction) -> str:
    predicted = {**in_gib(said.peak_bytes), "step_s": said.step_s}
    values = values_of(spec, _GPUS_PER_NODE) | predicted
    for condition in expansion.foreseen:
        if not condition.holds(values):
            numbers = ", ".join(f"{name} {predicted[name]:.4g}" for name in sorted(
                condition.names & predicted.keys()))  # fmt: skip
            return f"'{condition.text}' does not hold: predicted {numbers} ({said.basis})"
    return ""


def show(
    args: argparse.Namespace,
    expansion: Expansion,
    refusals: list[str],
    skipped: list[dict[str, Any]],
    ahead: Foresight,
) -> int:
    """The plan: what is illegal and why first, then what would run and how long it may take."""
    places = [at for at, why in enumerate(refusals) if not why]
    legal = [expansion.combinations[at].spec for at in places]
    campaign = Campaign(Store(args.runs), again=args.again)
    missing = [max(0, args.repeat - len(campaign.finished(spec))) for spec in legal]
    answers = _predictions(expansion, places, ahead)
    rows = list(zip(legal, answers, missing, strict=True))
    total_s = sum(run_s(spec, said.step_s) * left for spec, said, left in rows)
    illegal = [
        {"combination": dict(one.varied), "reason": why}
        for one, why in zip(expansion.combinations, refusals, strict=True)
        if why
    ]
    plan = [_planned(*row) for row in rows]
    basis = answers[0].basis if answers else ""
    if args.format == "json":
        head = {"total": expansion.total, "illegal": illegal, "planned": plan, "skipped": skipped}
        said = {"dropped": expansion.dropped, "same": expansion.same, "basis": basis}
        print(json_text(head | {"to_run": sum(missing), "predicted_s": total_s} | said))
        return 0
    _print(args, illegal, plan)
    if args.format != "csv":
        better = "; 'fourfold calibrate' knows better" if basis == GUESS else ""
        print(
            f"\n{expansion.total} combinations: {len(illegal)} illegal, {len(legal)} legal, "
            f"{len(legal) - sum(map(bool, missing))} of them stored before; {expansion.dropped} "
            f"dropped by conditions\nto run: {sum(missing)}, about {show_seconds(total_s)} "
            f"({total_s / 3600:.2f} h) by {basis}{better}"
        )
        if sweep_flags.given(args) and not args.start:
            print("nothing was run: add --run")
    return 0


def _planned(spec: RunSpec, said: Prediction, left: int) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "model": spec.model.name,
        "layout": str(spec.layout),
        "gpus": spec.gpus,
        "seq_len": spec.batch.seq_len,
        "micro_batch": spec.batch.micro_batch or "auto",
        "global_batch": spec.batch.global_batch,
        "precision": spec.policy.precision,
        "sharding": spec.policy.sharding,
        "recompute": spec.policy.recompute,
        "runs_left": left,
        "step_s": said.step_s,
        "step_s_low": said.step_s_low,
        "step_s_high": said.step_s_high,
        "peak_bytes": said.peak_bytes,
        "fits": said.fits,
        "run_s": run_s(spec, said.step_s),
    }


def _print(
    args: argparse.Namespace, illegal: list[dict[str, Any]], plan: list[dict[str, Any]]
) -> None:
    if illegal:
        rows = [[told(tuple(one["combination"].items())), one["reason"]] for one in illegal]
        print(render(["illegal", "why"], rows, args.format), end="\n\n")
    if not plan:
        return
    headings = [
        "model", "layout", "seq", "micro", "global", "precision", "sharding", "recompute", "left",
        "sec/it", "80% interval", "memory", "run",
    ]  # fmt: skip
    cells = [
        [
            row["model"], row["layout"], str(row["seq_len"]), str(row["micro_batch"]),
            str(row["global_batch"]), row["precision"], row["sharding"], row["recompute"],
            str(row["runs_left"]), show_seconds(row["step_s"]),
            f"{show_seconds(row['step_s_low'])} to {show_seconds(row['step_s_high'])}",
            show_bytes(row["peak_bytes"]) + ("" if row["fits"] is not False else ", does not fit"),
            show_seconds(row["run_s"]),
        ]
        for row in plan
    ]  # fmt: skip
    print(render(headings, cells, args.format))
