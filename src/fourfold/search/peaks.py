"""Peak bytes of a whole table of points. What a stage holds beside its state knows nothing of
sharding, and the state nothing of micro batches and recompute: each is computed for what it depends
on, and a point adds the two up. Engines whose tensors are counted one by one have no such halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.memory.peak import GIB, gathered_bytes, memory, stage_loads, weight_bytes
from fourfold.cost.stacks import stack_defaults
from fourfold.search.candidates import Ints, Places, row_numbers
from fourfold.search.cores import CHUNK, on_cores
from fourfold.search.query import PlanQuery
from fourfold.spec.layout import MODEL_AXES


class PeakBytes(Protocol):
    """Bytes of the fullest stage; rounded otherwise than `memory`, which says the same."""

    def may_be_below(self, limit_bytes: float) -> NDArray[np.bool_]:
        """Rows with points below a limit, and perhaps others."""
        ...

    def of(self, rows: Places) -> Floats:
        """[rows, ways], infinite where nobody asked."""
        ...


@dataclass(frozen=True, slots=True)
class WaysTable:
    """Every row in every way; `asked` which of them may run."""

    query: PlanQuery
    rows: dict[str, Ints]
    ways: dict[str, Ints]
    asked: NDArray[np.bool_]

    def columns(self, row: Places, way: Places) -> Columns:
        points = {name: column[row][:, None] for name, column in self.rows.items()}
        points |= {name: column[way][None, :] for name, column in self.ways.items()}
        return self.query.columns(points, is_open=True)


def peaks(table: WaysTable, coef: Coefficients) -> PeakBytes:
    if stack_defaults(table.query.stack).counted:
        return _Counted(table, coef)
    return _halves(table, coef)


def blocks(asked: NDArray[np.bool_], size: int = CHUNK) -> Iterator[Places]:
    """Rows in pieces of about as many asked points: rows with as many come together."""
    widths = asked.sum(axis=1)
    order = np.argsort(widths, kind="stable")
    at = 0
    while at < len(order):
        rows = order[at : at + max(1, size // max(1, int(widths[order[at]])))]
        at += len(rows)
        yield rows


@dataclass(frozen=True, slots=True)
class _Counted:
    """One by one."""

    table: WaysTable
    coef: Coefficients

    def may_be_below(self, limit_bytes: float) -> NDArray[np.bool_]:
        return np.ones(len(self.table.asked), dtype=bool)

    def of(self, rows: Places) -> Floats:
        asked = self.table.asked[rows]
        ways = np.flatnonzero(asked.any(axis=0))
        found = np.full(asked.shape, np.inf)
        found[:, ways] = memory(self.table.columns(rows, ways), self.coef).worst_bytes
        return np.where(asked, found, np.inf)


@dataclass(frozen=True, slots=True)
class _Halves:
    """Of the first, the fullest middle and the last stage: [rows, 3] bytes of the state,
    [groups, ways] of all else, and the least of that; `group` of each row."""

    group: Places
    state: Floats
    beside: tuple[Floats, Floats, Floats]
    least: Floats

    def may_be_below(self, limit_bytes: float) -> NDArray[np.bool_]:
        return (self.state + self.least[self.group]).max(axis=1) < limit_bytes

    def of(self, rows: Places) -> Floats:
        groups, found = self.group[rows], None
        for i, beside in enumerate(self.beside):
            stage = beside[groups]
            stage += self.state[rows, i, None]
            found = stage if found is None else np.maximum(found, stage, out=found)
        assert found is not None
        return found


def _halves(table: WaysTable, coef: Coefficients) -> _Halves:
    rows, ways, asked = table.rows, table.ways, table.asked
    known = rows | {"dp": rows["replicate"] * rows["shard"]}
    number = row_numbers(known, (*MODEL_AXES, "dp", "virtual_stages", "schedule"))
    _, first, group = np.unique(number, return_index=True, return_inverse=True)
    shape = (len(first), len(ways["recompute"]))
    beside = (np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf))
    params = np.zeros((len(first), 3))

    def fill(some: Places) -> None:
        row = first[some]
        way = np.flatnonzero(asked[row].any(axis=0))
        cross, may_run = np.ix_(some, way), asked[np.ix_(row, way)]
        c = table.columns(row, way)
        # One stage is first and last, two have none between.
        exists = (True, c.pp > 2, c.pp > 1)
        for i, (weights, activations, loss) in enumerate(stage_loads(c, coef)):
            held = np.where(exists[i], activations + loss, -np.inf)
            beside[i][cross] = np.where(may_run, held, np.inf)
            params[some, i] = np.broadcast_to(weights, (len(some), 1))[:, 0]

    on_cores(fill, blocks(asked[first]))
    one = {"micro_batch": ways["micro_batch"][:1], "recompute": ways["recompute"][:1]}
    c, group = table.query.columns(rows | one, is_open=True), group.reshape(-1)
    each = (weight_bytes(c) * coef["state"])[:, None] * params[group]
    other = gathered_bytes(c) + coef["base_gib"] * GIB
    least = np.stack([held.min(axis=1, initial=np.inf) for held in beside], axis=1)
    return _Halves(group, each + other[:, None], beside, least)
