"""Lower bounds of seconds. A row of the table pays for gradients and updates at least what is left
when a backward pass of any length hides them. In the pipeline no sharding is faster than one that
gathers no weights, computed once for all of them; the gathers of a point under zero3 bound it
closer, and are asked about where the first bound does not settle it.

Points of a table in cells: those that differ only in their copies of the sharded state. Seconds
in the pipeline are bounded once for a cell, with what the cheapest of its points pays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.ops.ends import handover
from fourfold.cost.ops.weights import weights
from fourfold.cost.step.estimate import (
    end_of_step_s,
    ends_s,
    fixed_s,
    layer_times,
    ops_s,
    pipe_s,
    stage_times,
    waiting_s,
)
from fourfold.cost.step.pipeline import StageTimes
from fourfold.cost.step.rates import is_cpu, overlapped_s, rates_of
from fourfold.search.candidates import Ints, Places, repeats, row_numbers
from fourfold.search.peaks import CHUNK, blocks, on_cores
from fourfold.search.query import PlanQuery
from fourfold.search.space import Bools, Space
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.words import SHARDINGS

SLACK = 1e-9  # rounding between the bound and the closed form


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Rows of a table in groups that differ in their copies only, with [groups, ways] seconds that
    no point of a cell undercuts."""

    space: Space
    order: Places  # rows of the table, group by group
    starts: Places  # of each group in `order`
    counts: Places
    layouts: Places  # a number from 0 for the layout of each group
    least_s: Floats
    more_s: Floats  # of each row: how much more than its group it pays at least
    per_step_s: Floats  # of each row, at least, for gradients and updates
    move_s: Floats  # of each row, for the gathers of one layer
    pipe: Places  # of each row
    pipes: Pipes

    def holding(self, mask: Bools) -> Places:
        """Cells with points of the mask, by their place in `least_s` read row by row."""
        return np.flatnonzero(_some(mask, self.order, self.starts))

    def layout(self, cells: Places) -> Places:
        return self.layouts[cells // self.least_s.shape[1]]

    def points(self, cells: Places, mask: Bools) -> tuple[Places, Places]:
        """(points of the mask in these cells, for each the place of its cell among them)."""
        group, way = np.divmod(cells, mask.shape[1])
        place, within = repeats(self.counts[group])
        index = self.order[self.starts[group][place] + within] * mask.shape[1] + way[place]
        inside = mask.reshape(-1)[index]
        return index[inside], place[inside]

    def bound_s(self, index: Places, cells: Places) -> Floats:
        """Seconds that points undercut no more than rounding, given the cell of each."""
        return self.least_s.reshape(-1)[cells] + self.more_s[index // self.least_s.shape[1]]

    def gathering(self, cells: Places) -> Bools:
        """Cells whose points gather weights."""
        return self.move_s[self.order[self.starts[cells // self.least_s.shape[1]]]] > 0.0

    def gathered_s(self, index: Places) -> Floats:
        """Seconds that points do not undercut, with the weights that each gathers."""
        row, way = np.divmod(index, self.least_s.shape[1])
        least_s = self.pipes.bound_s(self.pipe[row], way, way, self.move_s[row])
        return least_s * (1.0 - SLACK) + self.per_step_s[row]


def _some(mask: Bools, order: Places, starts: Places) -> Bools:
    """[groups, ways]: whether a group has a point of the mask there."""
    if not len(starts):
        return np.zeros((0, mask.shape[1]), dtype=bool)
    # Eight ways at a time.
    some = np.bitwise_or.reduceat(np.packbits(mask, axis=1)[order], starts, axis=0)
    return np.unpackbits(some, axis=1, count=mask.shape[1]).view(bool)


def cells_of(space: Space, asked: Bools | None = None) -> Cells:
    """`asked`: all that is ever looked for among, else every legal point; the bound of what is not
    is of no use."""
    alike = row_numbers(space.rows, (*LAYOUT, "virtual_stages", "schedule"))
    _, first, pipe = np.unique(alike, return_index=True, return_inverse=True)
    pipe = pipe.reshape(-1)
    number = pipe * len(SHARDINGS) + space.rows["zero"]
    order = np.argsort(number, kind="stable")
    number, starts, counts = np.unique(number[order], return_index=True, return_counts=True)
    _, layouts = np.unique(row_numbers(space.rows, LAYOUT), return_inverse=True)
    of_group = number // len(SHARDINGS)
    pipe_starts = starts[np.unique(of_group, return_index=True)[1]]
    held = _some(space.legal if asked is None else asked, order, pipe_starts)
    columns = {name: column[first] for name, column in space.rows.items()}
    pipes = pipes_of(space.query, columns, space.ways)
    alike = row_numbers(space.rows, ("replicate", "shard", *MODEL_AXES, *EXPERT_AXES, "zero"))
    _, some, back = np.unique(alike, return_index=True, return_inverse=True)
    few = {name: column[some] for name, column in space.rows.items()}
    once = per_step_s(space.query, few)[back.reshape(-1)] * (1.0 - SLACK)
    least_once = np.minimum.reduceat(once[order], starts) if len(starts) else once
    more_s = np.empty_like(once)
    more_s[order] = once[order] - np.repeat(least_once, counts)
    return Cells(
        space=space,
        order=order,
        starts=starts,
        counts=counts,
        layouts=layouts.reshape(-1)[order[starts]],
        least_s=(pipes.least_s(held) * (1.0 - SLACK))[of_group] + least_once[:, None],
        more_s=more_s,
        per_step_s=once,
        move_s=gathering_s(space.query, few)[back.reshape(-1)],
        pipe=pipe,
        pipes=pipes,
    )


LAYOUT = (*MODEL_AXES, *EXPERT_AXES, "cp_kind")  # what makes two rows the same layout; dp follows


def per_step_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds that every way to run a row pays for gradients and updates, with the waiting that
    they add to a step."""
    coef = query.entry.coefficients
    # A single micro batch may be updated from as it is, without sums.
    micros = np.array([[1], [query.batch.global_batch]])
    one = {"micro_batch": micros, "recompute": np.zeros(1, np.int64)}
    c = query.columns(rows | one, is_open=True)
    reduced, updated = end_of_step_s(c, coef, window=np.array([np.inf]))
    work = np.min(reduced + updated, axis=0)
    return work + waiting_s(c, coef, work=work, slots=np.zeros(1))[1]


def gathering_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds of a layer's gathers and scatter under zero3, of each row; 0 of others, and on a CPU,
    where they are paid for otherwise."""
    if is_cpu(query.entry.coefficients):
        return np.zeros(len(rows["zero"]))
    one = {"micro_batch": np.ones(1, np.int64), "recompute": np.zeros(1, np.int64)}
    c = query.columns(rows | one, is_open=True)
    gathers = [op for op in weights(c) if op.axis]
    move = ops_s(gathers, rates_of(c, query.entry.coefficients))
    return np.broadcast_to(move, rows["zero"].shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipes:
    """Rows that differ in how the state is sharded are one pipe. Seconds of a micro batch,
    [layouts, sizes, kinds of recompute]: a layer knows neither pipeline stages nor, below zero3,
    the sharding."""

    query: PlanQuery
    rows: dict[str, Ints]
    ways: dict[str, Ints]
    layouts: Places  # of each pipe
    sizes: Ints  # sequences in a micro batch, sorted
    kinds: Ints  # of recompute, sorted
    layer_s: Floats
    busy_s: Floats  # of a layer, without waiting for its host
    head_s: Floats
    embed_s: Floats

    def least_s(self, held: NDArray[np.bool_]) -> Floats:
        """[pipes, ways] seconds that no sharding undercuts, what happens once a step left out; 0
        where nothing is held."""
        found = np.zeros(held.shape)
        kinds = np.arange(len(self.kinds))

        def fill(some: Places) -> None:
            # Ways come micro batch by micro batch, each with every kind.
            way = held[some].any(axis=0).reshape(-1, len(kinds)).any(axis=1)
            way = np.flatnonzero(way) * len(kinds)
            bound_s = self.bound_s(some[:, None, None], way[:, None], kinds)
            found[np.ix_(some, (way[:, None] + kinds).reshape(-1))] = bound_s.reshape(len(some), -1)

        on_cores(fill, blocks(held, 4 * CHUNK))
        return found

    def bound_s(
        self, pipe: Places, sized: Places, made: Places, move: Floats | None = None
    ) -> Floats:
        """The closed form (cost/step/estimate.py) of what happens in the pipeline, of ways with the
        micro batch of the one and the recompute of the other; `move`: seconds in which a point
        gathers the weights of a layer."""
        points = {name: column[pipe] for name, column in self.rows.items()}
        points["micro_batch"] = self.ways["micro_batch"][sized]
        points["recompute"] = self.ways["recompute"][made]
        c, coef = self.query.columns(points, is_open=True), self.query.entry.coefficients
        kind = np.searchsorted(self.kinds, points["recompute"])
        first = self.layouts[pipe] * len(self.sizes)

        def stages(size: Ints) -> StageTimes:
            place = (first + np.searchsorted(self.sizes, size)) * len(self.kinds) + kind
            layer = self.layer_s.take(place)
            if move is not None:
                overlapped = overlapped_s(c, coef, busy=self.busy_s.take(place), move=move)
                layer = np.maximum(layer, overlapped)
            ends = self.head_s.take(place), self.embed_s.take(place)
            sent = ops_s(handover(c, size.astype(np.float64)), rates_of(c, coef))
            return stage_times(c, layer, *ends, sent)

        whole, micro = stages(points["micro_batch"]), points["micro_batch"]
        slots = count = np.floor(c.share / c.micro)
        rest = -(-self.query.batch.global_batch // points["shard"]) % micro
        if rest.any():
            other = stages(np.where(rest > 0, rest, self.sizes[0]))
            slots = count + np.where(rest > 0, other.slowest(c) / whole.slowest(c), 0.0)
        took = pipe_s(c, coef, whole, slots)
        waits, jitter = waiting_s(c, coef, work=took, slots=count)
        return took + waits + jitter + fixed_s(c, coef)


def pipes_of(query: PlanQuery, rows: dict[str, Ints], ways: dict[str, Ints]) -> Pipes:
    """`rows`: one of each pipe."""
    pipes = rows | {"shard": rows["replicate"] * rows["shard"]}
    pipes |= dict.fromkeys(("replicate", "zero"), np.ones_like(pipes["shard"]))
    micros, kinds = np.unique(ways["micro_batch"]), np.unique(ways["recompute"])
    rest = -(-query.batch.global_batch // pipes["shard"])[:, None] % micros
    sizes = np.unique(np.concatenate([micros, rest[rest > 0]]))
    # Ranks that nobody shares tokens with add gradients up differently: one dp stands for all.
    few = {name: pipes[name] for name in LAYOUT}
    few["shard"] = np.minimum(pipes["shard"], 2)
    few["pp"] = np.ones_like(few["shard"])
    number = row_numbers(few, (*LAYOUT, "shard"))
    _, first, back = np.unique(number, return_index=True, return_inverse=True)
    points: dict[str, Any] = {name: column[first][:, None, None] for name, column in few.items()}
    # One micro batch in a step: then a rank adds nothing up, which no other number undercuts.
    ones = dict.fromkeys(("replicate", "virtual_stages", "zero"), np.ones(1, np.int64))
    once = {"micro_batch": 1, "global_batch": 1, "recompute": kinds}
    c = query.columns(points | ones | {"schedule": np.zeros(1, np.int64)} | once, is_open=True)
    micro = sizes[:, None].astype(np.float64)
    layer = layer_times(c, query.entry.coefficients, micro=micro)
    head, embed, _ = ends_s(c, query.entry.coefficients, micro)
    every = (layer.total, layer.total - layer.host, head, embed)
    shape = (len(first), len(sizes), len(kinds))
    total, busy, head, embed = (np.ascontiguousarray(np.broadcast_to(one, shape)) for one in every)
    return Pipes(
        query=query,
        rows=pipes,
        ways=ways,
        layouts=back.reshape(-1),
        sizes=sizes,
        kinds=kinds,
        layer_s=total,
        busy_s=busy,
        head_s=head,
        embed_s=embed,
    )
