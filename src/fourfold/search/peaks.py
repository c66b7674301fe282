"""Peak bytes of a whole table of points. What a stage holds beside its state knows nothing of
sharding, and the state nothing of micro batches and recompute: each is computed for what it depends
on, and a point adds the two up. Of engines whose tensors are counted one by one two such halves
bound a point from below and from above, and only what that leaves open is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.kinds import KINDS
from fourfold.cost.memory.held import beside_bytes, least_state, most_state, stage_layer_bytes
from fourfold.cost.memory.peak import (
    GIB,
    gathered_bytes,
    memory,
    stage_loads,
    weight_bytes,
)
from fourfold.cost.memory.stage import around_bytes, stage_weights, stages
from fourfold.search.table import Bools, Ints, Places, PointTable, alike, blocks, on_cores
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

SLACK = 1e-9  # rounding between a bound and the count


def peaks(table: PointTable, coef: Coefficients) -> _Counted | _Halves:
    """Bytes of the fullest stage; rounded otherwise than `memory`, which says the same."""
    if table.query.resolved.engine.habits.counted:
        return _counted(table, coef)
    return _halves(table, coef)


def _groups(rows: dict[str, Ints], *more: str) -> tuple[Places, Places]:
    """(a row of each group, the group of each row): of rows that differ in how the state is
    sharded."""
    known = rows | {"dp": rows["replicate"] * rows["shard"]}
    names = (*MODEL_AXES, *EXPERT_AXES, "dp", "virtual_stages", "schedule", *more)
    return alike(known, names)


def _state_columns(table: PointTable) -> Columns:
    """Of each row, in any way to run it: what its state depends on."""
    return table.columns(slice(None), slice(1))


def _places(asked: Bools) -> tuple[Places, Places]:
    """(rows, ways) that broadcast to all points asked for: a table of the ways that any row asks
    for, with points that are not among it, or one by one where those would be most of it."""
    way = np.flatnonzero(asked.any(axis=0))
    if 2 * np.count_nonzero(asked) > len(asked) * len(way):
        return np.arange(len(asked))[:, None], way[None, :]
    row, way = np.nonzero(asked)
    return row, way


@dataclass(frozen=True, slots=True)
class _Counted:
    """Tensors one by one, of points that bounds do not settle: `least` in a first backward pass and
    in a later one, and `most`, of each stage."""

    table: PointTable
    coef: Coefficients
    least: _Halves
    most: _Halves

    def may_be_below(self, limit_bytes: float) -> Bools:
        """Rows with points below a limit, and perhaps others."""
        return self.least.may_be_below(limit_bytes)

    def of(self, rows: Places, least_bytes: float, most_bytes: float) -> Floats:
        """[rows, ways]. Exact from `least_bytes` to `most_bytes`; below, any number below
        `least_bytes`; above, the number or infinity; infinity for points not asked for."""
        asked, found = self.table.legal[rows], self.most.of(rows, least_bytes, most_bytes)
        settled = asked & (found < least_bytes)
        todo = asked & ~settled & (self.least.of(rows, least_bytes, most_bytes) < most_bytes)
        place, way = np.nonzero(todo)
        found[~settled] = np.inf
        c = self.table.columns(rows[place], way)
        found[place, way] = memory(c, self.coef).worst_bytes
        return found


def _counted(table: PointTable, coef: Coefficients) -> _Counted:
    asked = table.legal
    first, group = _groups(table.rows, "cp_kind")
    shape = (len(first), asked.shape[1])
    least, most = (tuple(np.full(shape, np.inf) for _ in range(count)) for count in (6, 3))

    def fill(some: Places) -> None:
        place, way = _places(asked[first[some]])
        row, cross = first[some][place], (some[place], way)
        may_run, c = asked[row, way], table.columns(row, way)
        micros, cached = c.micros, around_bytes(c, coef)[1]
        every = stages(c, micros)
        layers = stage_layer_bytes(c, every)
        for i, (stage, one) in enumerate(zip(every, layers, strict=True)):
            tables = (*least[2 * i : 2 * i + 2], most[i])
            beside = beside_bytes(c, one, stage, micros)
            for found, held in zip(tables, beside, strict=True):
                found[cross] = np.where(may_run, held * cached, np.inf)

    on_cores(fill, blocks(asked[first]))
    c = _state_columns(table)
    base, cached = around_bytes(c, coef)
    every = [stage_weights(c, stage, c.micros) for stage in stages(c, c.micros)]
    below = [held for weights in every for held in least_state(c, weights)]
    above = [most_state(c, weights) for weights in every]
    low, high = (np.stack([one * cached + base for one in some], axis=1) for some in (below, above))
    return _Counted(
        table,
        coef,
        _Halves(group, low * (1.0 - SLACK), least, _fewest(least)),
        _Halves(group, high * (1.0 + SLACK), most, _fewest(most)),
    )


def _fewest(beside: tuple[Floats, ...]) -> Floats:
    return np.stack([held.min(axis=1, initial=np.inf) for held in beside], axis=1)


@dataclass(frozen=True, slots=True)
class _Halves:
    """Of each stage: [rows, stages] bytes of the state, [groups, ways] of all else, and the least
    of that; `group` of each row."""

    group: Places
    state: Floats
    beside: tuple[Floats, ...]
    least: Floats

    def may_be_below(self, limit_bytes: float) -> Bools:
        return (self.state + self.least[self.group]).max(axis=1) < limit_bytes

    def of(self, rows: Places, least_bytes: float, most_bytes: float) -> Floats:
        groups, found = self.group[rows], None
        for i, beside in enumerate(self.beside):
            stage = beside[groups]
            stage += self.state[rows, i, None]
            found = stage if found is None else np.maximum(found, stage, out=found)
        assert found is not None
        return found


def _halves(table: PointTable, coef: Coefficients) -> _Halves:
    asked = table.legal
    first, group = _groups(table.rows)
    shape = (len(first), asked.shape[1])
    beside = (np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, np.inf))
    params = np.zeros((len(KINDS) + 1, len(first), 3))  # and of the ends

    def fill(some: Places) -> None:
        row = first[some]
        way = np.flatnonzero(asked[row].any(axis=0))
        cross, may_run = np.ix_(some, way), asked[np.ix_(row, way)]
        c = table.columns(row[:, None], way[None, :])
        # One stage is first and last, two have none between.
        exists = (True, c.pp > 2, c.pp > 1)
        for i, (weights, activations, loss) in enumerate(stage_loads(c, coef)):
            held = np.where(exists[i], activations + loss, -np.inf)
            beside[i][cross] = np.where(may_run, held, np.inf)
            for kind, count in enumerate(weights):
                params[kind, some, i] = np.broadcast_to(count, (len(some), 1))[:, 0]

    on_cores(fill, blocks(asked[first]))
    c = _state_columns(table)
    each = np.zeros((len(group), 3))
    for count, bytes_each in zip(params, weight_bytes(c), strict=True):
        each += (bytes_each * coef["state"])[:, None] * count[group]
    other = gathered_bytes(c) + coef["base_gib"] * GIB
    return _Halves(group, each + other[:, None], beside, _fewest(beside))
