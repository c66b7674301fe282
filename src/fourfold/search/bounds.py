"""Lower bounds of seconds. A row of the table pays for gradients and updates at least what is left
when a backward pass of any length hides them. What the pipeline takes is bounded once for all rows
that share it, and apart for those that gather weights in it (zero3), by the fastest such gather.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.ops.ends import handover
from fourfold.cost.ops.weights import weights
from fourfold.cost.step.estimate import (
    LayerSeconds,
    added_s,
    end_of_step_s,
    ends_s,
    fixed_s,
    layer_times,
    ops_s,
    pipe_s,
    stage_times,
    waiting_s,
    weighted,
)
from fourfold.cost.step.pipeline import StageTimes
from fourfold.cost.step.rates import is_cpu, overlapped_s, rates_of
from fourfold.cost.step.stage_kinds import mixed_kinds, model_shares, of_word, stage_shares
from fourfold.search.query import PlanQuery
from fourfold.search.table import (
    CHUNK,
    Bools,
    Ints,
    Places,
    PointTable,
    alike,
    blocks,
    on_cores,
)
from fourfold.spec.layers import LayerKind
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES
from fourfold.spec.words import SHARDINGS

SLACK = 1e-9  # rounding between the bound and the closed form


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the points of a table: seconds that none undercuts."""

    table: PointTable
    layouts: Places  # a number from 0 for the layout of each row
    least_s: Floats  # [pipes, ways]
    per_step_s: Floats  # of each row, at least, for gradients and updates
    pipe: Places  # of each row

    def of(self, index: Places) -> Floats:
        row, way = np.divmod(index, self.least_s.shape[1])
        return self.least_s[self.pipe[row], way] + self.per_step_s[row]

    def layout(self, index: Places) -> Places:
        return self.layouts[index // self.least_s.shape[1]]

    def variant(self, index: Places) -> Places:
        """A number that points share which differ in their copies of the sharded state only."""
        row, way = np.divmod(index, self.least_s.shape[1])
        kind = self.pipe[row] * len(SHARDINGS) + self.table.rows["zero"][row]
        return kind * self.least_s.shape[1] + way


def bounds_of(table: PointTable, asked: Bools | None = None) -> Bounds:
    """`asked`: all that is ever looked for among, else every legal point; the bound of what is not
    is of no use."""
    rows = table.rows
    once, back = alike(rows, ("replicate", "shard", *MODEL_AXES, *EXPERT_AXES, "zero"))
    few = {name: column[once] for name, column in rows.items()}
    move_s = gathering_s(table.query, few)[:, back]
    gathers = {"gathers": (move_s[0] > 0.0).astype(np.int64)}
    first, pipe = alike(rows | gathers, (*LAYOUT, "virtual_stages", "schedule", "gathers"))
    least_move_s = np.full((len(move_s), len(first)), np.inf)
    for least_s, of_rows in zip(least_move_s, move_s, strict=True):
        np.minimum.at(least_s, pipe, of_rows)
    one_each = {name: column[first] for name, column in rows.items()}
    pipes = pipes_of(table.query, one_each, table.ways, least_move_s)
    held = _some(table.legal if asked is None else asked, pipe, len(first))
    return Bounds(
        table=table,
        layouts=alike(rows, LAYOUT)[1],
        least_s=pipes.least_s(held) * (1.0 - SLACK),
        per_step_s=per_step_s(table.query, few)[back] * (1.0 - SLACK),
        pipe=pipe,
    )


def _some(mask: Bools, group: Places, count: int) -> Bools:
    """[groups, ways]: whether any row of a group has a point there."""
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(count))
    if not count:
        return mask
    # Eight ways at a time.
    some = np.bitwise_or.reduceat(np.packbits(mask, axis=1)[order], starts, axis=0)
    return np.unpackbits(some, axis=1, count=mask.shape[1]).view(bool)


LAYOUT = (*MODEL_AXES, *EXPERT_AXES, "cp_kind")  # what makes two rows the same layout; dp follows


def per_step_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds that every way to run a row pays for gradients and updates, with the waiting that
    they add to a step."""
    coef = query.resolved.entry.coefficients
    # A single micro batch may be updated from as it is, without sums.
    micros = np.array([[1], [query.batch.global_batch]])
    one = {"micro_batch": micros, "recompute": np.zeros(1, np.int64)}
    c = query.columns(rows | one, is_open=True)
    reduced, updated = end_of_step_s(c, coef, window=np.array([np.inf]))
    work = np.min(reduced + updated, axis=0)
    return work + waiting_s(c, coef, work=work, slots=np.zeros(1))[1]


def gathering_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds of a layer's gathers and scatter under zero3, of each kind of layer that the model
    has and of each row; 0 of others, and on a CPU, where they are paid for otherwise. [kinds,
    rows]"""
    coef = query.resolved.entry.coefficients
    one = {"micro_batch": np.ones(1, np.int64), "recompute": np.zeros(1, np.int64)}
    c = query.columns(rows | one, is_open=True)
    kinds = [of_word(c, kind.feed_forward) for kind in mixed_kinds(c)] or [c]
    move = np.zeros((len(kinds), len(rows["zero"])))
    if not is_cpu(coef):
        for i, of_rows in enumerate(kinds):
            gathers = [op for op in weights(of_rows) if op.axis]
            move[i] = ops_s(gathers, rates_of(of_rows, coef))
    return move


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipes:
    """Rows that differ in how the state is sharded are one pipe, or two where some of them gather
    weights. Seconds of a micro batch, [layouts, sizes, kinds of recompute]: a layer knows neither
    pipeline stages nor, below zero3, the sharding."""

    query: PlanQuery
    rows: dict[str, Ints]
    ways: dict[str, Ints]
    layouts: Places  # of each pipe
    sizes: Ints  # sequences in a micro batch, sorted
    kinds: Ints  # of recompute, sorted
    layer_s: Floats
    busy_s: tuple[Floats, ...]  # of a layer of each kind, without waiting for its host
    # ... what one more such layer adds to the model's seconds: of any number of layers of each kind
    # so much is the least, and of those of the model it is all.
    added_s: tuple[Floats, ...]
    layer_kinds: tuple[LayerKind, ...]  # of a model whose layers differ
    head_s: Floats
    embed_s: Floats
    move_s: Floats  # [kinds, pipes] at least, to gather the weights of a layer of each kind

    def least_s(self, held: Bools) -> Floats:
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

    def bound_s(self, pipe: Places, sized: Places, made: Places) -> Floats:
        """The closed form (cost/step/estimate.py) of what happens in the pipeline, of ways with the
        micro batch of the one and the recompute of the other."""
        points = {name: column[pipe] for name, column in self.rows.items()}
        points["micro_batch"] = self.ways["micro_batch"][sized]
        points["recompute"] = self.ways["recompute"][made]
        c, coef = self.query.columns(points, is_open=True), self.query.resolved.entry.coefficients
        kind = np.searchsorted(self.kinds, points["recompute"])
        first, move = self.layouts[pipe] * len(self.sizes), self.move_s[:, pipe]

        def stages(size: Floats) -> StageTimes:
            place = (first + np.searchsorted(self.sizes, size)) * len(self.kinds) + kind
            layer = self._layer_s(c, place, move)
            ends = self.head_s.take(place), self.embed_s.take(place)
            sent = ops_s(handover(c, size), rates_of(c, coef))
            return stage_times(c, layer, *ends, sent)

        _, took = pipe_s(c, coef, stages(c.micro), stages)
        waits, jitter = waiting_s(c, coef, work=took, slots=np.floor(c.share / c.micro))
        return took + waits + jitter + fixed_s(c, coef)

    def _layer_s(self, c: Columns, place: Places, move: Floats) -> LayerSeconds:
        """Return the least seconds of a layer in the stages, of the layouts, sizes and kinds of
        recompute in these places, `move` to gather the weights of each kind."""
        coef, mean = self.query.resolved.entry.coefficients, self.layer_s.take(place)
        busy = [busy_s.take(place) for busy_s in self.busy_s] if move.any() else []
        if not self.layer_kinds:
            if busy:
                mean = np.maximum(mean, overlapped_s(c, coef, busy=busy[0], move=move[0]))
            return LayerSeconds(mean, mean, mean, mean)
        shares = stage_shares(c, self.layer_kinds)
        every = (*(shares[:, stage] for stage in range(3)), model_shares(c, self.layer_kinds))
        added = [added_s.take(place) for added_s in self.added_s]
        least = [*(weighted(added, of_stage) for of_stage in every[:3]), mean]
        for i, of_stage in enumerate(every if busy else ()):
            both = weighted(busy, of_stage), weighted(move, of_stage)
            least[i] = np.maximum(least[i], overlapped_s(c, coef, busy=both[0], move=both[1]))
        return LayerSeconds(*least)


def pipes_of(
    query: PlanQuery, rows: dict[str, Ints], ways: dict[str, Ints], move_s: Floats
) -> Pipes:
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
    first, back = alike(few, (*LAYOUT, "shard"))
    points: dict[str, Any] = {name: column[first][:, None, None] for name, column in few.items()}
    # One micro batch in a step: then a rank adds nothing up, which no other number undercuts.
    ones = dict.fromkeys(("replicate", "virtual_stages", "zero"), np.ones(1, np.int64))
    once = {"micro_batch": 1, "global_batch": 1, "recompute": kinds}
    c = query.columns(points | ones | {"schedule": np.zeros(1, np.int64)} | once, is_open=True)
    micro = sizes[:, None].astype(np.float64)
    layer = layer_times(c, query.resolved.entry.coefficients, micro=micro)
    head, embed, _ = ends_s(c, query.resolved.entry.coefficients, micro)
    shape = (len(first), len(sizes), len(kinds))

    def full(seconds: Floats) -> Floats:
        return np.ascontiguousarray(np.broadcast_to(seconds, shape))

    busy = [work.busy for work in layer.works] or [layer.total - layer.parts["host"]]
    return Pipes(
        query=query,
        rows=pipes,
        ways=ways,
        layouts=back,
        sizes=sizes,
        kinds=kinds,
        layer_s=full(layer.total),
        busy_s=tuple(map(full, busy)),
        added_s=tuple(map(full, added_s(c, query.resolved.entry.coefficients, layer))),
        layer_kinds=layer.kinds,
        head_s=full(head),
        embed_s=full(embed),
        move_s=move_s,
    )
