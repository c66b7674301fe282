"""Engines and machines of a table's rows, resolved as those of plans are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fourfold.cost.fit.calibration import Calibration, FittedStack
from fourfold.cost.table.cells import is_whole, number
from fourfold.cost.table.reference import RowTable
from fourfold.errors import UserError
from fourfold.search.query import usual_cluster
from fourfold.search.resolve import Resolved, resolve
from fourfold.spec import catalog
from fourfold.spec.cluster import Cluster
from fourfold.spec.engine import MeasuredAs

# What decides a row's engine and its coefficients.
_COLUMNS = ("stack", "engine_release", "cluster", "hardware", "n_gpus", "experts")


@dataclass(frozen=True, slots=True)
class RowEngine:
    """The engine of a row. `engine` is None where the reader of rows refuses the release or the
    machine; `release` is what is left of it for that reader."""

    stack: str
    release: str
    note: str
    engine: Resolved | None

    @property
    def priced(self) -> tuple[FittedStack, str] | None:
        """The coefficients, and why they are not this machine's own."""
        return (self.engine.entry, self.engine.no_rows) if self.engine else None


def resolve_rows(
    table: RowTable, calibration: Calibration, place: Cluster | None = None
) -> list[RowEngine]:
    """Resolve every row's engine on its machine, or on `place`, and name it in the table: in each
    row the one that 'plan' would take for its name, its release and its machine. Engines that
    nobody knows keep their names."""
    cells = list(zip(*map(table.column, _COLUMNS), strict=True))
    by_key = {key: _row_engine(key, calibration, place) for key in set(cells)}
    rows = [by_key[key] for key in cells]
    table.texts["stack"] = [row.stack for row in rows]
    table.texts["engine_release"] = [row.release for row in rows]
    return rows


def _row_engine(key: tuple[str, ...], calibration: Calibration, place: Cluster | None) -> RowEngine:
    stack, release, cluster, hardware, gpus, experts = key
    asked, size, has_experts = stack.strip(), number(gpus), number(experts) > 0
    named = MeasuredAs.of(asked)
    try:
        dated = named.released(release) if release.strip() else named
        machine = place or row_machine(cluster, hardware, int(size) if is_whole(size) else 1)
    except UserError:
        return RowEngine(stack, release.strip(), "", None)
    has_dated = dated.stack.lower() in calibration.engines
    name = dated.stack if has_dated else asked
    try:
        engine = resolve(name, machine, calibration, experts=has_experts)
    except UserError:  # nobody knows the name
        unnamed = resolve(dated, machine, calibration, experts=has_experts)
        return RowEngine(stack, release.strip(), "", unnamed)
    notes = [f"stack {asked} read as {engine.stack}" * (engine.stack.lower() != asked.lower())]
    if release.strip() and not has_dated:
        notes.append(f"release {release.strip()} was not measured")
    return RowEngine(engine.stack, "", "; ".join(filter(None, notes)), engine)


def row_machine(cluster: str, hardware: str, gpus: int) -> Cluster:
    """Return the machine of a row; a cluster that nobody described has usual links."""
    name = cluster.strip().lower()
    if name in catalog.cluster_names():
        return catalog.cluster(name, gpus)
    return replace(usual_cluster(catalog.device(hardware), gpus), name=name or "unnamed")
