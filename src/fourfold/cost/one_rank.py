"""One stage that is measured without peers: what the planner says of it, the step that its compute
and the planner's traffic, bubble and waiting make, and how far it is from its kernels' floor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Coefficients, Columns
from fourfold.cost.memory.held import layer_bytes
from fourfold.cost.memory.moments import stage_peak
from fourfold.cost.memory.stage import stages
from fourfold.cost.ops.ends import embedding, handover, head, update
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op
from fourfold.cost.step.estimate import fixed_s, last_rounds, once_ops, ops_s, waiting_s
from fourfold.cost.step.pipeline import fill_share
from fourfold.cost.step.rates import rates_of
from fourfold.result.one_rank import OneRankResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """One stage of one run: its layers, and whether it holds the ends."""

    stage: int
    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompute:
    """The planner's compute of the stage: of one layer and micro batch, and of a step by part."""

    layer_s: float
    parts: dict[str, float]
    peak_bytes: float

    @property
    def compute_s(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """A step whose compute was measured; `parts` sum to `step_s`."""

    parts: dict[str, float]

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def predicted(c: Columns, coef: Coefficients, stage: MeasuredStage) -> StageCompute:
    """What the planner thinks this stage computes, without any traffic. `c` holds one run."""
    rates, slots = rates_of(c, coef), _slots(c)
    _, updates = once_ops(c, stage.layers, stage.first + stage.last)
    *layer, launches = decoder_layer(c, c.micro)
    busy = ops_s(_within(layer), rates)
    layer_s = _one(rates.together(busy, np.zeros(1), rates.seconds(launches))[1])
    parts = {
        "layers": slots * stage.layers * layer_s,
        "head": slots * stage.last * _one(ops_s(_within(head(c, c.micro)), rates)),
        "embedding": slots * stage.first * _one(ops_s(_within(embedding(c, c.micro)), rates)),
        "optimizer": _one(ops_s(updates, rates)),
        "fixed": _one(fixed_s(c, coef)),
    }
    return StageCompute(layer_s=layer_s, parts=parts, peak_bytes=_peak_bytes(c, stage))


def _within(ops: list[Op], *axes: str) -> list[Op]:
    """Operations of these axes, of experts' groups too, or those that send nothing."""
    return [op for op in ops if op.axis.partition(" ")[0] in (axes or ("",))]


def joined(
    c: Columns,
    coef: Coefficients,
    stage: MeasuredStage,
    *,
    compute_s: float,
    layer_s: float,
    micro_s: float,
) -> JoinedStep:
    """The step from measured seconds: of the whole step, of one layer and of one micro batch. Other
    stages are taken to be as slow."""
    rates, ops, slots = rates_of(c, coef), list(decoder_layer(c, c.micro)), _slots(c)
    tp, cp, ep, move = (
        ops_s(_within(ops, *axes), rates)
        for axes in (("tp",), ("cp",), ("ep", "etp"), ("shard", "replicas"))
    )
    busy = layer_s + tp + cp + ep
    fsdp = _one(rates.together(busy, move, np.full(1, 1e-9))[0] - busy)
    ends = ops_s(_within(embedding(c, c.micro), "tp"), rates)
    window = stage.layers * busy * last_rounds(c)
    reductions, _ = once_ops(c, stage.layers, stage.first + stage.last)
    reduced = sum(_one(rates.reduced(*both, window)) for both in reductions)
    parts = {
        "compute, measured": compute_s,
        "tp": slots * (stage.layers * _one(tp) + stage.first * _one(ends)),
        "cp": slots * stage.layers * _one(cp),
        "ep": slots * stage.layers * _one(ep),
        "dp": slots * stage.layers * fsdp + reduced,
        "pp": slots * _one(ops_s(handover(c, c.micro), rates)),
    }
    # Gradients are reduced once, after the last micro batch: no stage waits for that to fill.
    slot_s = micro_s + (sum(parts.values()) - compute_s - reduced) / slots
    parts["bubble"] = (_one(c.pp) - 1.0) * slot_s * _one(fill_share(c))
    work, slot_count = np.array([sum(parts.values())]), np.array([slots])
    waiting = waiting_s(c, coef, work=work, slots=slot_count)
    return JoinedStep(parts=parts | {"jitter": sum(map(_one, waiting))})


def _one(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _slots(c: Columns) -> float:
    """Micro batches of the busiest rank; a smaller last one counts its share."""
    return _one(c.share / c.micro)


def _peak_bytes(c: Columns, stage: MeasuredStage) -> float:
    """Tensors of this stage at its peak: without context, communicators and workspaces."""
    micros = c.micros
    first, middle, last = stages(c, micros)
    usual = first if stage.first else last if stage.last else middle
    between = usual.flight + 1.0 - stage.stage  # of the stages between, each has one less
    flight = usual.flight if stage.first or stage.last else np.maximum(last.flight, between)
    own = replace(usual, layers=usual.layers * 0.0 + stage.layers, flight=flight)
    return _one(stage_peak(c, layer_bytes(c), own, micros).total)


@dataclass(frozen=True, slots=True)
class Part:
    """`limit_s`: what can't be avoided. `engine_s`: what the step took."""

    name: str
    limit_s: float
    engine_s: float

    @property
    def gap_s(self) -> float:
        return self.engine_s - self.limit_s


def parts(result: OneRankResult) -> list[Part]:
    """Of a rank whose floor was measured. Recomputing is work that could be avoided;
    the last part is what the watched kernels leave of the step."""
    floor, n = result.floor, result.micro_batches
    assert floor is not None
    seen = _seen(result)
    again = n * (floor.again_products_s + floor.again_attention_s)
    products = seen.get("matrix products", 0.0) - n * floor.again_products_s
    attention = seen.get("attention", 0.0) - n * floor.again_attention_s
    update_s = result.phase("optimizer").seconds + result.phase("reduce").seconds
    rows = [
        Part("matrix products", n * floor.products_s, products),
        Part("attention", n * floor.attention_s, attention),
        Part("computed again", 0.0, again),
        Part(
            "norms, element-wise, loss",
            n * floor.moved_bytes / floor.bytes_per_s,
            seen.get("norms and element-wise", 0.0),
        ),
        Part("copies and casts", 0.0, seen.get("copies and casts", 0.0)),
        Part("norm of gradients, update", floor.update_bytes / floor.bytes_per_s, update_s),
    ]
    rest = result.compute_s - sum(row.engine_s for row in rows)
    return [*rows, Part("waiting for the host, rest", 0.0, rest)]


def _seen(result: OneRankResult) -> dict[str, float]:
    """Seconds of a step by kind of kernel. Small operators of a CPU take longer while they are
    watched: then their shares are those of the micro batch that was not."""
    n = result.micro_batches
    seen = {part.name: n * part.seconds for part in result.parts if part.name != "fills"}
    once_s = sum(result.phase(name).seconds for name in ("data", "reduce", "optimizer", "once"))
    room_s = result.compute_s - once_s
    watched_s = sum(seen.values())
    scale = min(1.0, room_s / watched_s) if watched_s else 1.0
    return {name: scale * seconds for name, seconds in seen.items()}


def total(rows: list[Part]) -> Part:
    return Part("step", sum(row.limit_s for row in rows), sum(row.engine_s for row in rows))


def least_bytes(c: Columns) -> tuple[float, float, float, float]:
    """What can't be avoided besides products and attention, of the one run in `c`: bytes of a
    micro batch in a layer, in the first and the last end; of the update, an element of this rank's
    own weights. Of experts' rows a rank alone has as many as it sends."""
    c = replace(c, our_kernels=np.ones_like(c.our_kernels), imbalance=np.zeros_like(c.imbalance))

    def moved(ops: list[Op]) -> float:
        return _one(sum(op.bytes for op in ops if op.kind in ("norm", "elementwise", "copy")))

    layer = [op for op in decoder_layer(c, c.micro) if op.kind != "copy"]
    ends = moved(embedding(c, c.micro)), moved(head(c, c.micro))
    return moved(layer), *ends, moved(update(c, c.shards))
