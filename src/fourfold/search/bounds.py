"""Lower bounds of seconds. A row of the table pays for gradients and updates at least what is left
when a backward pass of any length hides them. In the pipeline no sharding is faster than one that
gathers no weights, computed once for all of them; the gathers of a point under zero3 bound it
closer, and are asked about where the first bound does not settle it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.ops.ends import handover
from fourfold.cost.ops.weights import weights
from fourfold.cost.step.cpu_rates import is_cpu, rates_of
from fourfold.cost.step.estimate import (
    end_of_step_s,
    ends_s,
    fixed_s,
    pipe_s,
    stage_times,
    waiting_s,
)
from fourfold.cost.step.layer import layer_times, ops_s
from fourfold.cost.step.pipeline import StageTimes
from fourfold.cost.step.rates import overlapped_s
from fourfold.search.candidates import Ints, Places, row_numbers
from fourfold.search.peaks import blocks, on_cores
from fourfold.search.query import PlanQuery
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES

LAYOUT = (*MODEL_AXES, *EXPERT_AXES, "cp_kind")  # what makes two rows the same layout; dp follows


def per_step_s(query: PlanQuery, rows: dict[str, Ints]) -> Floats:
    """Seconds that every way to run a row pays for gradients and updates, with the waiting that
    they add to a step."""
    coef, found = query.entry.coefficients, []
    # A single micro batch may be updated from as it is, without sums.
    for micro in (1, query.batch.global_batch):
        one = {"micro_batch": np.array([micro]), "recompute": np.zeros(1, np.int64)}
        c = query.columns(rows | one, is_open=True)
        found.append(sum(end_of_step_s(c, coef, window=np.array([np.inf])), np.zeros(())))
    work = np.minimum(*found)
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

        def fill(some: Places) -> None:
            way = np.flatnonzero(held[some].any(axis=0))
            found[np.ix_(some, way)] = self.bound_s(some[:, None], way[None, :])

        on_cores(fill, blocks(held))
        return found

    def bound_s(self, pipe: Places, way: Places, move: Floats | None = None) -> Floats:
        """The closed form (cost/step/estimate.py) of what happens in the pipeline; `move`: seconds
        in which a point gathers the weights of a layer."""
        points = {name: column[pipe] for name, column in self.rows.items()}
        points |= {name: column[way] for name, column in self.ways.items()}
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
    points: dict[str, Any] = {name: column[first][:, None] for name, column in few.items()}
    # One micro batch in a step: then a rank adds nothing up, which no other number undercuts.
    ones = dict.fromkeys(("replicate", "virtual_stages", "zero"), np.ones((1, 1), np.int64))
    once = {"micro_batch": 1, "global_batch": 1, "recompute": np.tile(kinds, len(sizes))[None, :]}
    c = query.columns(points | ones | {"schedule": np.zeros((1, 1), np.int64)} | once, is_open=True)
    micro = np.repeat(sizes, len(kinds))[None, :].astype(np.float64)
    layer = layer_times(c, query.entry.coefficients, micro=micro)
    head, embed, _ = ends_s(c, query.entry.coefficients, micro)
    every = (layer.total, layer.total - layer.host, head, embed)
    total, busy, head, embed = (np.broadcast_to(one, (len(first), micro.size)) for one in every)
    return Pipes(
        query=query,
        rows=pipes,
        ways=ways,
        layouts=back.reshape(-1),
        sizes=sizes,
        kinds=kinds,
        layer_s=total,
        busy_s=busy,
        head_s=np.ascontiguousarray(head),
        embed_s=np.ascontiguousarray(embed),
    )
