"""Names of engines: what a short one stands for, on which machines it was measured."""

from __future__ import annotations

import re
from typing import Any

from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.errors import UserError, nearest
from fourfold.search.query import twin
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import ENGINES, EXPORTS, MeasuredAs, engine_of, spelt
from fourfold.spec.words import SHARDING

_YEAR = re.compile(r"-20[0-9][0-9][a-z]?\Z")


def short_names(calibration: Calibration) -> set[str]:
    """Names of engines without a year; of measured ones also without what follows the year."""
    measured = {re.split(r"-20[0-9][0-9]", name)[0] for name in full_names(calibration)}
    return {*ENGINES, *measured}


def full_names(calibration: Calibration) -> set[str]:
    """Of all that is measured, with experts or without."""
    return {MeasuredAs.of(entry.stack).stack for entry in calibration.entries}


def match_stack(
    stack: str, cluster: Cluster | None, calibration: Calibration, *, experts: bool = False
) -> str:
    """'megatron' -> the measured stack that says most about it: on this cluster, else on this
    generation of GPU, the newest; for a model with `experts` one that was measured with some. A
    full name stays as it is; a name nobody knows is refused."""
    stack = require_known(stack, calibration)
    dense, routed = (
        [e for e in calibration.of(experts=with_some) if e.rows_time] for with_some in (False, True)
    )
    if any(e.stack == stack for e in calibration.entries):
        return stack
    named = [e for e in dense if e.stack.startswith(f"{stack}-")]
    if experts:
        known = {e.stack for e in routed}
        named = [e for e in named if str(MeasuredAs.of(e.stack).with_experts()) in known] or named
        named = named or [e for e in routed if e.stack.startswith(f"{stack}-")]
    if not named:
        return stack
    generation = generation_of(cluster.device) if cluster else ""

    def says(entry: FittedStack) -> tuple[bool, bool, int, int]:
        local = cluster is not None and entry.cluster in (
            cluster.name,
            twin(calibration, entry.stack, cluster),
        )
        alike = entry.generation == generation
        return local, alike, 0 if local else MeasuredAs.of(entry.stack).year or 0, entry.rows_time

    return MeasuredAs.of(max(named, key=says).stack).stack


def require_known(stack: str, calibration: Calibration) -> str:
    """The name in lower case, once it is one: it changes the rules and the seconds."""
    name = stack.strip().lower()
    short = short_names(calibration)
    measured = {name.lower(): name for name in full_names(calibration)}
    if name in measured:
        return measured[name]
    for spelling in (spelt(name), name):
        if spelling in measured or spelling in short or _YEAR.sub("", spelling) in short:
            return measured.get(spelling, spelling)
    hint = f"{nearest(name, {*short, *measured})} ('fourfold plan --stack list' lists them)"
    if (sharding := SHARDING.get(name)) is not None:
        hint = f"it is a sharding: --sharding {sharding}, with --stack torchtitan or accelerate"
    if name in EXPORTS:
        hint = f"it is a release that settings are written for: --export {name}, without --stack"
    raise UserError("unknown stack", field="stack", value=stack, hint=hint)


def listed(calibration: Calibration, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Every name: whose rules it has, what it stands for, and on what it was measured."""
    rows = []
    for name in sorted(short_names(calibration) | full_names(calibration)):
        stands_for = match_stack(name, cluster, calibration)
        dense, routed = (
            {e.cluster: e.rows_time for e in calibration.entries if e.stack == stack}
            for stack in (stands_for, str(MeasuredAs.of(stands_for).with_experts()))
        )
        rows.append(
            {
                "stack": name,
                "stands_for": stands_for,
                "rules": engine_of(name).rules.name,
                "measured": dense,
                "with_experts": routed,
            }
        )
    return rows
