"""Which engine a name stands for on a machine, and whose coefficients price it there: resolved once
for every question, however the engine is spelt."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fourfold.cost.fit.calibration import Calibration, FittedStack, gpu_entry
from fourfold.errors import UserError, nearest
from fourfold.spec import catalog
from fourfold.spec.catalog import generation_of
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import (
    ENGINES,
    EXPORTS,
    GENERIC,
    Engine,
    MeasuredAs,
    engine_of,
    site_of,
    spelt,
)
from fourfold.spec.words import SHARDING, SHARDINGS

ALIKE = 1.1  # rates of links within 10%
# Of an engine's measured runs: what fewer have is no habit of it (Megatron's FSDP: 2 of 381).
FEW_OF_ENGINE = 0.01
_YEAR = re.compile(r"-20[0-9][0-9][a-z]?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An engine on a machine, and the coefficients that price it there."""

    measured_as: MeasuredAs
    cluster: Cluster
    calibration: str
    entry: FittedStack
    no_rows: str  # why the coefficients are not measured here; "" where they are
    like: str  # the measured cluster that this one is priced as; "" where it has runs of its own

    @property
    def stack(self) -> str:
        """The engine's full name."""
        return self.measured_as.stack

    @property
    def engine(self) -> Engine:
        """Its rules and habits."""
        return engine_of(self.measured_as)


def resolve(
    stack: str | MeasuredAs,
    cluster: Cluster,
    calibration: Calibration,
    *,
    experts: bool = False,
) -> Resolved:
    """Return an engine with its coefficients on a cluster: one by value, or the one that a name
    stands for there; of models with `experts`, or of others. Raises UserError for a name that
    stands for no engine."""
    if not isinstance(stack, MeasuredAs):
        stack = match_engine(stack, cluster, calibration, experts=experts)
    return _priced(stack, cluster, calibration, experts=experts)


def default_engine(
    cluster: Cluster, calibration: Calibration, *, experts: bool = False
) -> MeasuredAs:
    """Return the engine with most measured runs on the cluster, else no engine in particular; for
    a model with `experts` the one with most runs of such models there, if there are any."""
    routed = [entry for entry in calibration.routed if entry.cluster == site_of(cluster.name)]
    if experts and routed:
        most = max(routed, key=lambda entry: (entry.rows_time, entry.stack))
        return match_engine(most.measured_as.engine, cluster, calibration, experts=True)
    local = [entry for entry in calibration.dense if entry.cluster == cluster.name]
    if not local:
        return MeasuredAs(GENERIC)
    return max(local, key=lambda entry: (entry.rows_time, entry.stack)).measured_as


def match_engine(
    stack: str,
    cluster: Cluster | None,
    calibration: Calibration,
    *,
    experts: bool = False,
) -> MeasuredAs:
    """'megatron' -> the measured engine that says most about it: on this cluster, else on this
    generation of GPU, the newest; for a model with `experts` one that was measured with some. A
    full name stays as it is; a name nobody knows is refused."""
    name = require_known(stack, calibration)
    asked = calibration.engines.get(name) or MeasuredAs.of(name)
    named = _measured_of(name, calibration, experts=experts)
    # Runs without a date are one release of several where others of the same engine have a year.
    releases = {entry.measured_as for entry in named if entry.measured_as.engine == asked.engine}
    if asked in calibration.by_engine and (asked.year is not None or releases <= {asked}):
        return asked
    if not named:
        return asked
    generation = generation_of(cluster.device) if cluster else ""
    releases = dict.fromkeys(entry.measured_as for entry in named)
    places = _places(cluster, named[0].measured_as) if cluster else {"": ""}
    first = next(iter(places))
    local = {
        (runs, place)
        for runs in releases
        for place in (first, _most_measured(calibration.by_engine[runs], places))
    }
    years = {runs: runs.year or 0 for runs in releases}

    def says(entry: FittedStack) -> tuple[bool, bool, int, int]:
        is_local = (entry.measured_as, entry.cluster) in local
        is_alike = entry.generation == generation
        return is_local, is_alike, 0 if is_local else years[entry.measured_as], entry.rows_time

    return replace(max(named, key=says).measured_as, experts=False)


def _measured_of(name: str, calibration: Calibration, *, experts: bool) -> list[FittedStack]:
    """Return the entries with runs of releases of a name: of models without experts, for a model
    with `experts` of engines that ran some, where there are any."""
    begun = {
        runs for full, runs in calibration.engines.items() if f"{full}-".startswith(f"{name}-")
    }
    dense = [e for e in calibration.dense if e.rows_time and e.measured_as in begun]
    if not experts:
        return dense
    routed = [entry for entry in calibration.routed if entry.rows_time]
    engines = {entry.measured_as.engine for entry in routed}
    with_both = [entry for entry in dense if entry.measured_as.engine in engines]
    known = {replace(runs, experts=True) for runs in begun}
    return with_both or dense or [entry for entry in routed if entry.measured_as in known]


def require_known(stack: str, calibration: Calibration) -> str:
    """The name in lower case, once it is one: it changes the rules and the seconds."""
    name = stack.strip().lower()
    short = calibration.short_engines | ENGINES.keys()
    measured = {name.lower(): name for name in calibration.engines}
    if name in measured:
        return measured[name]
    for spelling in (spelt(name), name):
        if spelling in measured or spelling in short or _YEAR.sub("", spelling) in short:
            return measured.get(spelling, spelling)
    hint = f"{nearest(name, {*short, *measured})} ('fourfold plan --stack list' lists them)"
    if (sharding := SHARDING.get(name)) is not None:
        usual = [name for name, engine in ENGINES.items() if _is_usual(engine, sharding)]
        hint = f"it is a sharding: --sharding {sharding}, with --stack {' or '.join(usual[:2])}"
    if name in EXPORTS:
        hint = f"it is a release that settings are written for: --export {name}, without --stack"
    raise UserError("unknown stack", field="stack", value=stack, hint=hint)


def _is_usual(engine: Engine, sharding: str) -> bool:
    """Return whether an engine that settings are written for shards so where nobody says."""
    is_exported = any(exported.export.predicted_as == engine.name for exported in EXPORTS.values())
    return is_exported and engine.habits.sharding == sharding


def listed(calibration: Calibration, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Every name: whose rules it has, what it stands for, and on what it was measured."""
    rows = []
    for name in sorted(calibration.engines.keys() | calibration.short_engines | ENGINES.keys()):
        stands_for = match_engine(name, cluster, calibration)
        dense, routed = (
            {place: entry.rows_time for place, entry in calibration.by_engine.get(runs, {}).items()}
            for runs in (stands_for, stands_for.with_experts())
        )
        rows.append(
            {
                "stack": name,
                "stands_for": stands_for.stack,
                "rules": engine_of(name).rules.name,
                "measured": dense,
                "with_experts": routed,
            }
        )
    return rows


def _priced(
    named: MeasuredAs, cluster: Cluster, calibration: Calibration, *, experts: bool
) -> Resolved:
    """Return an engine with its coefficients on a cluster."""
    runs = named.with_experts() if experts else named
    places = _places(cluster, runs)
    like = _most_measured(calibration.by_engine.get(runs, {}), places)
    generation = generation_of(cluster.device)
    entry, why = calibration.entry(runs, places[like or cluster.name], generation)
    if like and not why:
        entry = replace(entry, basis="near")
    own = gpu_entry(runs, cluster.device.id) if why else None
    if own is not None and cluster.gpus == 1:
        entry, why = own, ""
    elif own is not None:  # its kernels are known, its links are not
        entry = replace(
            entry, coefficients=entry.coefficients | {k: own.coefficients[k] for k in own.free_time}
        )
    if not why and not entry.rows_time:
        why = f"calibration '{calibration.name}' has kernels and links but no runs"
        entry = replace(entry, basis="physics")
    if cluster.device.id.startswith("cpu"):
        # No CUDA context, no communicator buffers: only tensors count there.
        entry = replace(entry, coefficients={**entry.coefficients, "base_gib": 0.0})
    return Resolved(
        measured_as=named,
        cluster=cluster,
        calibration=calibration.name,
        entry=entry,
        no_rows=why,
        like=like,
    )


def _places(cluster: Cluster, runs: MeasuredAs) -> dict[str, str]:
    """Return the cluster and those of the catalogue that are like it, by name, with the place where
    such runs on it are kept."""
    return {name: runs.place(name) for name in (cluster.name, *_alike(cluster))}


def _most_measured(entries: Mapping[str, FittedStack], places: Mapping[str, str]) -> str:
    """Return the place after the first with most runs among the entries of one engine, by cluster;
    '' where it has runs at the first itself, or at none of them."""
    own, *alike = places
    if places[own] in entries:
        return ""
    rows = {name: entries[places[name]].rows_time for name in alike if places[name] in entries}
    return max(filter(rows.get, rows), key=lambda name: rows[name], default="")


@functools.cache
def _alike(cluster: Cluster) -> tuple[str, ...]:
    """Clusters of the catalogue that one outside of it is priced as."""
    names = catalog.cluster_names()
    if cluster.name in names or cluster.like == "none":
        return ()
    if cluster.like:
        return (cluster.like,)
    return tuple(name for name in names if _same_machines(cluster, catalog.cluster(name)))


def _same_machines(one: Cluster, other: Cluster) -> bool:
    """The same GPU, and links of about the same rates as far as the first reaches."""
    if one.device.id != other.device.id:
        return False
    if len(one.links) > 1 and one.host_gpus != other.host_gpus:
        return False
    ends = (0,) if len(one.links) == 1 else (0, -1)
    rates = [one.links[at].bytes_per_s / other.links[at].bytes_per_s for at in ends]
    return all(1 / ALIKE <= rate <= ALIKE for rate in rates)


def evidence_for(calibration: Calibration, entry: FittedStack) -> dict[str, int]:
    """Rows by choice: of the entry, or of all entries where it is a blend of them; a kind of
    sharding must be one that the engine itself is run with."""
    total, dense = dict(entry.counts), calibration.dense
    if not (entry.counts or entry.rows_time):
        for known in dense:
            for name, count in known.counts.items():
                total[name] = total.get(name, 0) + count
    rules = engine_of(entry.measured_as).rules.name
    kin = [e for e in dense if engine_of(e.measured_as).rules.name == rules]
    runs = sum(e.rows_time for e in kin)
    for name in SHARDINGS:
        count = sum(e.counts.get(name, 0) for e in kin)
        if runs and rules != "generic" and count < FEW_OF_ENGINE * runs:
            total[name] = 0
    return total
