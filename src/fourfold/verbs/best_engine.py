"""What a traced step needs in the fastest engine whose runs were measured on its GPU, which is our
own: an engine's step may be as expected of it and have much to win."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp
from typing import NamedTuple

from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import of_one
from fourfold.cost.predict import predictions
from fourfold.cost.run import columns_of
from fourfold.cost.step.rates import Rates
from fourfold.search.resolve import resolve
from fourfold.spec import Cluster
from fourfold.spec.engine import engine_of
from fourfold.spec.words import OURS
from fourfold.traces import parts
from fourfold.traces.cause import LEAST_SHARE
from fourfold.traces.examined import Examined
from fourfold.traces.expect import Interval, Pricing, fused_routing_s

# Operations of a layer with experts that a trace shows as routing.
_ROUTING_OPS = ("mlp.router, scores", "mlp.dispatch, order", "mlp.combine, order")


class BestPart(NamedTuple):
    name: str
    seconds: float
    best_s: float


@dataclass(frozen=True, slots=True)
class BestEngine:
    """`step` None: no engine's runs on this GPU are known, only bytes. `parts`: those in which much
    of the step is to be won."""

    name: str
    step: Interval | None
    parts: tuple[BestPart, ...]


def find_best_engine(
    found: Examined, pricing: Pricing | None, cluster: Cluster | None, calibration: Calibration
) -> BestEngine | None:
    """None where the trace is of our engine, or nothing is known of a better one."""
    spec = found.spec
    if pricing is None or cluster is None or spec is None or found.value("engine") == OURS:
        return None
    spec = replace(spec, policy=replace(spec.policy, compile=True))
    has_experts = spec.model.moe is not None
    engine = resolve(OURS, cluster, calibration, experts=has_experts)
    if engine.no_rows:
        best = {parts.ROUTING: fused_routing_s(found, pricing)} if has_experts else {}
        gains = _gains(found, best)
        return BestEngine("fused kernels", None, gains) if gains else None
    columns = columns_of([spec], cluster=cluster, engine=engine_of(OURS))
    many = predictions(columns, engine.entry)
    rates = Rates(columns, engine.entry.coefficients)
    step_s = float(sum(part[0] for part in many.times.parts.values()))
    each = sum(
        of_one(rates.seconds(op))
        for op in decoder_layer(columns, columns.micro)
        if op.name in _ROUTING_OPS
    )
    best = {parts.OPTIMIZER: float(many.times.parts["optimizer"][0])}
    if has_experts:
        best[parts.ROUTING] = found.counts.micro_batches * found.counts.layers * each
    width = float(many.interval.half[0])
    step = Interval(step_s * exp(-width), step_s, step_s * exp(width))
    return BestEngine(OURS, step, _gains(found, best))


def _gains(found: Examined, best: dict[str, float]) -> tuple[BestPart, ...]:
    least = LEAST_SHARE * found.steps.seconds
    rows = (BestPart(name, found.parts.get(name, 0.0), best_s) for name, best_s in best.items())
    gains = [row for row in rows if row.seconds - row.best_s > least]
    return tuple(sorted(gains, key=lambda row: row.best_s - row.seconds))
