"""One rank that ran without its peers: its step, by the sum that prices any step but with measured
compute in place of the planner's; what the planner says of that compute; and how far the rank is
from its kernels' floor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.kinds import DENSE
from fourfold.cost.memory.held import layer_bytes
from fourfold.cost.memory.moments import stage_peak
from fourfold.cost.memory.stage import stages
from fourfold.cost.ops.ends import embedding, handover, head, update
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
        layer=lambda c, micro: _alone(decoder_layer(c, micro)),
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
    ops = StepOps(layer, lambda *_: nothing, lambda *_: nothing, between, once)
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
    return replace(c, layers=found.layers * c.pp, balanced=none, even_stages=none)


def _peak_bytes(c: Columns, found: OneRankResult) -> float:
    """Tensors of this stage at its peak: without context, communicators and workspaces."""
    micros = c.micros
    first, middle, last = stages(c, micros)
    is_first, is_last = _ends(c, found)
    usual = first if is_first else last if is_last else middle
    between = usual.flight + 1.0 - found.stage  # of the stages between, each has one less
    flight = usual.flight if is_first or is_last else np.maximum(last.flight, between)
    own = replace(usual, layers=usual.layers * 0.0 + found.layers, flight=flight)
    return of_one(stage_peak(c, layer_bytes(c), own, micros).total)


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
    seen = {part.name: part.seconds for part in result.parts if part.name != "fills"}
    scale = min(1.0, micro_s(result) / (sum(seen.values()) or 1.0))
    return {name: result.micro_batches * scale * seconds for name, seconds in seen.items()}


def least_bytes(c: Columns) -> tuple[float, float, float, float]:
    """What can't be avoided besides products and attention, of the one run in `c`: bytes of a
    micro batch in a layer, in the first and the last end; of the update, an element of this rank's
    own weights. Of experts' rows a rank alone has as many as it sends."""
    c = replace(c, our_kernels=np.ones_like(c.our_kernels), imbalance=np.zeros_like(c.imbalance))

    def moved(ops: list[Op]) -> float:
        return of_one(sum(op.bytes for op in ops if op.kind in ("norm", "elementwise", "copy")))

    layer = [op for op in decoder_layer(c, c.micro) if op.kind != "copy"]
    ends = moved(embedding(c, c.micro)), moved(head(c, c.micro))
    return moved(layer), *ends, moved(update(c, c.shards, DENSE))
