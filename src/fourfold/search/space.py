"""All legal points of a question as one table, and which of them may fit. A row is a layout with
its virtual stages and sharding, a column a way to run it: a micro batch and a kind of recompute.
What depends on rows alone, or on ways alone, is computed once for all of its points."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.interval import choices
from fourfold.cost.memory.peak import (
    FRAGMENTS,
    OWN_FRAGMENTS,
    SURE,
    fit_chance,
    memory,
    memory_bounds,
)
from fourfold.cost.stacks import stack_defaults
from fourfold.events import Bar
from fourfold.search.candidates import Candidates, Ints
from fourfold.search.query import PlanQuery
from fourfold.spec.expression import Expression, in_gib
from fourfold.spec.layout import MODEL_AXES

Bools = NDArray[np.bool_]
Places = NDArray[np.intp]
# Columns by CHOSEN and by what was computed about them.
Pool = dict[str, NDArray[Any]]
Tell = Callable[[float], None]  # hears what share of some work is done
T = TypeVar("T")
R = TypeVar("R")
MOST_THREADS = 8  # more wait for each other more than they help
CHUNK = 16384  # points at a time: what they need stays in a core's cache
WIDEST = 1.5  # times the limit: what is predicted further above it is not ranked
LEAST_HALF = min(FRAGMENTS, OWN_FRAGMENTS)  # ... and each at least this far below it (log)


def unheard(share: float) -> None:
    """Short work tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """`legal`, `likely` and `near` are [rows, ways]: may run; and fits by our best estimate, or is
    above the limit but not surely."""

    query: PlanQuery
    rows: dict[str, Ints]
    ways: dict[str, Ints]
    legal: Bools
    likely: Bools
    near: Bools

    def points(self, index: Places) -> Pool:
        """Columns by CHOSEN of points, given by their places in the table read row by row."""
        row, way = np.divmod(index, self.legal.shape[1])
        points = {name: column[row] for name, column in self.rows.items()}
        return points | {name: column[way] for name, column in self.ways.items()}

    def priced(
        self, index: Places, compute: Callable[[Columns], Floats], tell: Tell = unheard
    ) -> Floats:
        """compute(columns) of each point."""

        def piece(at: int) -> Floats:
            points = self.points(index[at : at + CHUNK])
            return compute(self.query.columns(points, is_open=True))

        found = on_cores(piece, range(0, len(index), CHUNK), tell)
        return np.concatenate(found) if found else np.zeros(0)

    def peak_bytes(self, index: Places) -> Floats:
        coefficients = self.query.entry.coefficients
        return self.priced(index, lambda c: memory(c, coefficients).worst_bytes)


def on_cores(work: Callable[[T], R], pieces: Iterable[T], tell: Tell) -> list[R]:
    """work(piece) of each, in their order; NumPy lets threads run side by side."""
    todo = list(pieces)
    done: list[R] = []
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for one in pool.map(work, todo) if len(todo) > 1 else map(work, todo):
            done.append(one)
            tell(len(done) / len(todo))
    return done


def space_of(query: PlanQuery, grid: Candidates, bar: Bar) -> Space:
    kinds = len(grid.kinds)
    ways = {
        "micro_batch": np.repeat(grid.micros, kinds),
        "recompute": np.tile(grid.kinds, len(grid.micros)),
    }
    legal = np.repeat(grid.legal_micros, kinds, axis=1)
    first, back = _alike_in_memory(query, grid.layouts)
    few = {name: column[first] for name, column in grid.layouts.items()}
    # Which micro batches are legal does not depend on how context parallelism attends.
    likely, near = _fitting(query, few, ways, legal[first], bar)
    return Space(
        query=query,
        rows=grid.layouts,
        ways=ways,
        legal=legal,
        likely=likely[back] & legal,
        near=near[back] & legal,
    )


def row_numbers(rows: dict[str, Ints], names: tuple[str, ...]) -> Ints:
    """One number for each combination of these fields."""
    number = np.zeros(len(rows["pp"]), dtype=np.int64)
    for name in names:
        different, back = np.unique(rows[name], return_inverse=True)
        number = number * len(different) + back
    return number


def _alike_in_memory(query: PlanQuery, rows: dict[str, Ints]) -> tuple[Places, Places]:
    """(rows that differ in memory, for every row its place among them): how context parallelism
    attends matters only where tensors are counted one by one."""
    by_kind = stack_defaults(query.stack).counted
    names = tuple(name for name in rows if by_kind or name != "cp_kind")
    _, first, back = np.unique(row_numbers(rows, names), return_index=True, return_inverse=True)
    return first, back.reshape(-1)


def _blocks(
    asked: Bools,
) -> Iterator[tuple[Places, Places]]:
    """(rows, ways) that hold all asked points: rows with as many ways come together."""
    order = np.argsort(asked.sum(axis=1), kind="stable")
    at = 0
    while at < len(order):
        width = max(1, int(asked[order[at]].sum()))
        rows = order[at : at + max(1, CHUNK // width)]
        at += len(rows)
        yield rows, np.flatnonzero(asked[rows].any(axis=0))


def _fitting(
    query: PlanQuery, rows: dict[str, Ints], ways: dict[str, Ints], asked: Bools, bar: Bar
) -> tuple[Bools, Bools]:
    """(fits by our best estimate, is above the limit but not surely) of the asked points."""
    limit = query.limit_bytes
    likely, near, over = np.zeros_like(asked), np.zeros_like(asked), np.zeros_like(asked)
    surely = limit * np.exp(LEAST_HALF * (1.0 - 1e-9))  # below this, low ends are below the limit

    def check(block: tuple[Places, Places]) -> None:
        row, way = block
        cross = np.ix_(row, way)
        points = {name: column[row][:, None] for name, column in rows.items()}
        points |= {name: column[way][None, :] for name, column in ways.items()}
        peak = memory(query.columns(points, is_open=True), query.entry.coefficients).worst_bytes
        likely[cross] = peak < limit
        near[cross] = (peak >= limit) & (peak < surely)
        over[cross] = (peak >= surely) & (peak < WIDEST * limit)

    on_cores(check, _blocks(asked), bar.part(0.1, 0.4))
    index = np.flatnonzero(over & asked)
    space = Space(query=query, rows=rows, ways=ways, legal=asked, likely=likely, near=near)
    low = space.priced(index, lambda c: memory_bounds(c, query.entry)[0], bar.part(0.4, 0.8))
    near.reshape(-1)[index[low < limit]] = True
    return likely & asked, near & asked


def sure(space: Space, mask: Bools) -> Bools:
    """Of these points, those that fit by a chance of 90% or more; all, where none does."""
    query = space.query
    index = np.flatnonzero(mask)
    chance = space.priced(index, lambda c: fit_chance(c, query.entry))
    kept = np.zeros_like(mask)
    kept.reshape(-1)[index[chance >= SURE]] = True
    return kept if kept.any() else mask


def unproven(space: Space) -> Bools:
    """Which points make a choice that no measured row of the calibration makes; broadcasts against
    the table."""
    points = {name: column[:, None] for name, column in space.rows.items()}
    points |= {name: column[None, :] for name, column in space.ways.items()}
    evidence = space.query.evidence
    new = np.zeros((1, 1), dtype=bool)
    made = choices(space.query.columns(points, is_open=True)) if evidence else {}
    # Narrow ones first: what rows and ways choose together is the last to be joined.
    for name, mask in sorted(made.items(), key=lambda item: item[1].size):
        if not evidence.get(name, 0):
            new = new | mask
    return new


def holding(
    space: Space, mask: Bools, conditions: list[Expression], step_s: Floats | None = None
) -> Bools:
    """Points of the mask for which the user's conditions hold."""
    index = np.flatnonzero(mask)
    if not conditions or not len(index):
        return mask
    query, points = space.query, space.points(index)
    values = {
        **{axis: points[axis] for axis in MODEL_AXES},
        "dp": points["replicate"] * points["shard"],
        "vp": points["virtual_stages"],
        "micro_batch": points["micro_batch"],
        "global_batch": query.batch.global_batch,
        "seq_len": query.batch.seq_len,
        "gpus": query.gpus,
        "nodes": -(-query.gpus // query.cluster.host_gpus),
        "layers": query.model.layers,
        "hidden": query.model.hidden,
        "heads": query.model.heads,
        **in_gib(space.peak_bytes(index)),
        "step_s": step_s,
    }
    held = np.ones(len(index), dtype=bool)
    for one in conditions:
        held &= one.holds(values)
    kept = np.zeros_like(mask)
    kept.reshape(-1)[index[held]] = True
    return kept
