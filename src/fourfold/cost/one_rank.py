"""One rank that ran without its peers: its step, by the sum that prices any step but with measured
compute in place of the planner's; and what the planner says of that compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.memory.held import layer_bytes
from fourfold.cost.memory.moments import stage_peak
from fourfold.cost.memory.stage import stages
from fourfold.cost.ops.ends import embedding, handover, head
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import NONE, Op, of_one
from fourfold.cost.step.estimate import Once, StepOps, estimate, layer_times, once_ops, ops_s
from fourfold.cost.step.rates import Rates, rates_of
from fourfold.result.one_rank import OneRankResult, layer_s, micro_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCompute:
    """The planner's compute of a stage: of one layer and micro batch, and of a step by part."""

    layer_s: float
    compute_s: float
    compute_parts_s: dict[str, float]
    peak_bytes: float


def predicted(c: Columns, coef: Coefficients, found: OneRankResult) -> StageCompute:
    """What the planner thinks the stage of the one run in `c` computes, without any traffic."""
    alike, (is_first, is_last) = _alike(c, found), _ends(c, found)
    ops = StepOps(
        layer=(lambda c, micro: _alone(decoder_layer(c, micro)),),
        head=lambda c, micro: head(c, micro) if is_last else [],
        embedding=lambda c, micro: _alone(embedding(c, micro)) if is_first else [],
        once=lambda _: ([], once_ops(alike, is_first + is_last)[1]),
    )
    single = np.ones_like(c.pp)
    stage = replace(alike, layers=alike.layers / c.pp, pp=single)
    parts = {name: of_one(part) for name, part in estimate(stage, coef, ops).parts.items()}
    computed = {name: s for name, s in parts.items() if s and name not in ("bubble", "jitter")}
    return StageCompute(
        layer_s=of_one(layer_times(stage, coef, micro=c.micro, layer=ops.layer).total),
        compute_s=sum(computed.values()),
        compute_parts_s=computed,
        peak_bytes=_peak_bytes(c, found),
    )


def joined(c: Columns, coef: Coefficients, found: OneRankResult) -> dict[str, float]:
    """Seconds of a step by part, of which the compute was measured. Other stages are taken to be as
    slow."""
    slots = of_one(c.share / c.micro)
    rest_s = micro_s(found) - found.layers * layer_s(found)
    is_first, is_last = _ends(c, found)

    def layer(c: Columns, micro: Floats) -> list[Op]:
        ends = _sent(embedding(c, micro)) if is_first else []
        told = _taking(decoder_layer(c, micro), rates_of(c, coef), layer_s(found) * micro / c.micro)
        return [*told, *(op._replace(share=op.share / found.layers) for op in ends)]

    def between(c: Columns, micro: Floats) -> list[Op]:
        ends = _taking(head(c, micro), rates_of(c, coef), rest_s * micro / c.micro)
        return [*handover(c, micro), *ends]

    def once(c: Columns) -> Once:
        reductions, updates = once_ops(c, is_first + is_last)
        once_s = found.compute_s - slots * micro_s(found)
        return reductions, _taking(updates, rates_of(c, coef), np.array([once_s]))

    nothing: list[Op] = []
    ops = StepOps((layer,), lambda *_: nothing, lambda *_: nothing, between, once)
    times = estimate(_alike(c, found), {**coef, "fixed_s": 0.0}, ops)
    parts = {name: of_one(part) for name, part in times.parts.items()}
    return {
        "compute, measured": found.compute_s,
        "tp": parts["tp_comm"],
        "cp": parts["cp_comm"],
        "ep": parts["ep_comm"],
        "dp": parts["fsdp_comm"] + parts["dp_comm"],
        "pp": slots * of_one(ops_s(handover(c, c.micro), rates_of(c, coef))),
        "bubble": parts["bubble"] if of_one(c.pp) > 1 else 0.0,
        "jitter": parts["jitter"],
    }


def _alone(ops: Iterable[Op]) -> list[Op]:
    return [op for op in ops if not op.axis]


def _sent(ops: Iterable[Op]) -> list[Op]:
    """Messages; those that a backward pass repeats as messages too."""
    return [op._replace(share=op.share * (1.0 + op.again), again=NONE) for op in ops if op.axis]


def _taking(ops: Iterable[Op], rates: Rates, seconds: Floats) -> list[Op]:
    """With all that is computed, and launched, taking so many seconds together."""
    told = list(ops)
    computed = [op for op in _alone(told) if op.kind != "host"]
    ratio = seconds / ops_s(computed, rates)
    return [*_sent(told), *(op._replace(share=op.share * ratio) for op in computed)]


def _ends(c: Columns, found: OneRankResult) -> tuple[bool, bool]:
    """Whether the stage holds the embedding, and the head."""
    return found.stage == 0, found.stage == of_one(c.pp) - 1


def _alike(c: Columns, found: OneRankResult) -> Columns:
    """A model all of whose stages have as many layers."""
    none = np.zeros_like(c.pp)
    return replace(c, layers=found.layers * c.pp, balanced=none, even_stages=none, sequences=())


def _peak_bytes(c: Columns, found: OneRankResult) -> float:
    """Tensors of this stage at its peak: without context, communicators and workspaces."""
    micros = c.micros
    first, middle, last = stages(c, micros)
    is_first, is_last = _ends(c, found)
    usual = first if is_first else last if is_last else middle
    between = usual.flight + 1.0 - found.stage  # of the stages between, each has one less
    flight = usual.flight if is_first or is_last else np.maximum(last.flight, between)
    own = replace(usual, layers=usual.layers * 0.0 + found.layers, flight=flight)
    return of_one(stage_peak(c, layer_bytes(replace(c, routed=own.routed)), own, micros).total)
