"""What each part should take on this GPU: products by their shapes, attention and passes over
memory as the planner's list of operations has them, each with an interval."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import numpy as np

from fourfold.cost.columns import Coefficients, Columns
from fourfold.cost.count.params import RankParams, rank_params, stage_layers
from fourfold.cost.ops.ends import head
from fourfold.cost.ops.layer import decoder_layer
from fourfold.cost.ops.op import Op, of_one
from fourfold.cost.step.rates import Rates
from fourfold.spec.run import RunSpec
from fourfold.spec.words import OURS
from fourfold.traces import parts
from fourfold.traces.examined import Examined
from fourfold.traces.settings import shards_weights

# Against the rate that the planner fits to whole steps, which pays for the gaps between kernels:
# products of 1b and 8b models in traces of an H200 take 0.91 to 0.93 of it.
_ALONE = 0.93
# Of the memory's rate by its data sheet: what an update of many tensors reaches in fp32 and in 16
# bits (AdamW, norm and clipping of 1b and 5b models on an H200).
_UPDATE_RATE = {4: 0.72, 2: 0.57}
# Values of a weight: AdamW reads four and writes three, the norm reads one, clipping reads and
# writes one.
_UPDATE_VALUES = 10.0
# No kernel takes less.
_LEAST_KERNEL_S = 2e-6
# A kernel begins so long after the one before has ended, even if it was there.
_BETWEEN_S = 1.6e-6
# Passes over the rows of all experts: plain torch (sort, index, index_put, scatter_add, casts to
# fp32 and back) as torchtitan 0.2 has it, against kernels made for it.
_PLAIN_PASSES, _FUSED_PASSES = 72.0, 16.0
_PLAIN_ROUTING = ("indexing_backward", "_index_put_impl_", "index_put")
# Half widths (log) of what runs over memory: engines differ in what they fuse.
_WIDTH = {
    parts.ELEMENTWISE: 0.40,
    parts.LOSS: 0.45,
    parts.COPIES: 0.60,
    parts.OPTIMIZER: 0.30,
    parts.ROUTING: 0.30,
    parts.EMBEDDING: 0.90,
    parts.BETWEEN: 0.70,
}
# Of a step: what waits for launches and a last synchronisation is never quite zero.
_IDLE_SHARE = 0.006


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds: what is expected, and between which 80% of such runs lie."""

    low: float
    mid: float
    high: float

    @classmethod
    def around(cls, mid: float, width: float) -> Interval:
        return cls(mid * float(np.exp(-width)), mid, mid * float(np.exp(width)))


@dataclass(frozen=True, slots=True)
class Pricing:
    """How the planner prices this run: `columns` of the one run, its rates, and the half width
    (log) of its interval. `basis` says whose rates they are."""

    columns: Columns
    coefficients: Coefficients
    width: float
    basis: str
    is_measured: bool = False  # rates are of kernels on this very machine ('calibrate')


@dataclass(frozen=True, slots=True)
class Expected:
    parts: dict[str, Interval]

    @property
    def step(self) -> Interval:
        """Parts miss together as often as apart: between the sum of widths and their root."""
        mid = sum(one.mid for one in self.parts.values())
        below = [one.mid - one.low for one in self.parts.values()]
        above = [one.high - one.mid for one in self.parts.values()]
        down, up = (0.5 * (sum(w) + sum(x * x for x in w) ** 0.5) for w in (below, above))
        return Interval(mid - down, mid, mid + up)

    def mid(self, *names: str) -> float:
        return sum(self.parts[name].mid for name in names if name in self.parts)

    def high(self, *names: str) -> float:
        return sum(self.parts[name].high for name in names if name in self.parts)


def expect(run: Examined, pricing: Pricing) -> Expected:
    c = pricing.columns
    rates = Rates(c, pricing.coefficients)
    found: dict[str, Interval] = {}
    for part, seconds in _products(run, rates, pricing).items():
        found[part] = Interval.around(seconds, pricing.width)
    if run.spec is not None:
        for part, seconds in (_attention(run, rates) | _over_memory(run, rates, c)).items():
            found[part] = Interval.around(seconds, _WIDTH.get(part, pricing.width))
    between = run.kernels * _BETWEEN_S
    found[parts.BETWEEN] = Interval.around(between, _WIDTH[parts.BETWEEN])
    idle = _IDLE_SHARE * run.steps.seconds
    found[parts.LAUNCHES] = Interval(0.0, idle / 2.0, 2.5 * idle)
    return Expected({part: one for part, one in found.items() if one.mid > 0.0})


def _products(run: Examined, rates: Rates, pricing: Pricing) -> dict[str, float]:
    """Every call that was made, by its shape. In 16 bits: a GPU has no reason to be slower."""
    factor = 1.0 if pricing.is_measured else _ALONE
    if run.is_graphed:
        return {parts.OTHER: factor * _listed_products(run, rates)}
    calls: Counter[tuple[str, int, int, int, int, str]] = Counter()
    for at, one in run.placed.weighed.items():
        p = one.product
        calls[run.placed.part[at], p.m, p.n, p.k, p.groups, one.of] += 1
    seconds: dict[str, float] = defaultdict(float)
    for (part, m, n, k, groups, of), times in calls.items():
        if part not in parts.PRODUCTS:
            continue
        each = _product_s(rates, m, n, k, groups, of, part)
        seconds[part] += factor * times * each / len(run.times)
    return seconds


def _listed_products(run: Examined, rates: Rates) -> float:
    """Of kernels without shapes: what the run has to multiply."""
    c, kinds = rates.c, ("product", "grouped product")
    layer, end = (
        sum(of_one(rates.seconds(op)) for op in ops if op.kind in kinds)
        for ops in (decoder_layer(c, c.micro), head(c, c.micro))
    )
    return run.counts.micro_batches * (run.counts.layers * layer + end)


def _product_s(rates: Rates, m: int, n: int, k: int, groups: int, of: str, part: str) -> float:
    """Experts have equal shares of the rows."""
    one = np.ones(1)
    if part != parts.EXPERTS:
        return groups * of_one(
            rates.product(Op(name="", kind="product", m=m * one, n=n * one, k=k * one))
        )
    shared = (m, k / groups) if of == "weights" else (m / groups, k)
    phase = "weights" if of == "weights" else "forward"
    op = Op(
        name="",
        kind="grouped product",
        phase=phase,
        groups=groups * one,
        m=shared[0] * one,
        n=n * one,
        k=shared[1] * one,
    )
    return of_one(rates.grouped_product(op))


def _attention(run: Examined, rates: Rates) -> dict[str, float]:
    c, micro = rates.c, run.shapes.sequences * np.ones(1)
    there = of_one(rates.attention(Op(name="", kind="attention", m=micro)))
    back = of_one(rates.attention(Op(name="", kind="attention", phase="inputs", m=micro)))
    if not np.isfinite(there + back) or not len(c):
        return {}
    return {parts.ATTENTION: run.counts.forwards * there + run.counts.backwards * back}


def _over_memory(run: Examined, rates: Rates, c: Columns) -> dict[str, float]:
    counts, spec = run.counts, run.spec
    assert spec is not None
    one, ours = np.ones_like(c.compiled), run.value("engine") == OURS and spec.policy.compile
    compiled = replace(
        c, compiled=one, eager=0.0 * one, our_kernels=ours * one, lean_loss=ours * one
    )
    rates = Rates(compiled, rates.coef)
    layer = [
        op for op in decoder_layer(compiled, compiled.micro) if op.kind in ("norm", "elementwise")
    ]
    ends = [op for op in head(compiled, compiled.micro) if op.kind in ("norm", "elementwise")]
    again = counts.again.share
    of_layer = sum(
        of_one(rates.seconds(op)) * (1.0 + (again if op.phase == "forward" else 0.0))
        for op in layer
    )
    micros, has_head = (
        counts.micro_batches,
        run.is_graphed or parts.HEAD in run.placed.part.values(),
    )
    loss = sum(of_one(rates.seconds(op)) for op in ends if op.kind != "norm")
    norm = sum(of_one(rates.seconds(op)) for op in ends if op.kind == "norm")
    passes = micros * (counts.layers * of_layer + norm) + _added_s(run, c)
    small = list(run.placed.part.values()).count(parts.ELEMENTWISE) / len(run.times)
    weights = _of_weights(run, c)
    return (
        {parts.ELEMENTWISE: passes + small * _LEAST_KERNEL_S, parts.LOSS: micros * has_head * loss}
        | weights
        | _routing(run, c)
    )


def _added_s(run: Examined, c: Columns) -> float:
    """Gradients of later micro batches are added to those of earlier ones."""
    assert run.spec is not None
    held = _params(run, run.spec).held
    return (run.counts.micro_batches - 1) * 8.0 * held / (0.75 * of_one(c.hbm))


def _params(run: Examined, spec: RunSpec) -> RankParams:
    """Of the first rank, with its share of the experts."""
    length = spec.batch.seq_len
    is_sharded = shards_weights(run.value("engine", ""))
    return rank_params(
        spec.model,
        spec.layout,
        seq_len=length,
        rank=0,
        zero=max(spec.policy.zero, is_sharded),
        stages=stage_layers(spec.model, spec.layout.pp, length),
    )


def _of_weights(run: Examined, c: Columns) -> dict[str, float]:
    """The update, casts of weights and gradients between the formats, the embedding's rows."""
    spec = run.spec
    assert spec is not None
    params = _params(run, spec)
    width = 2 if run.value("weights") == "bf16" else 4
    rate = of_one(c.hbm)
    bytes_of = _UPDATE_VALUES * width
    ours = run.value("engine") == OURS and spec.policy.compile
    if ours:  # clipping is part of the update; see cost/ops/ends.py
        bytes_of = 2.0 * (of_one(c.param_bytes) + of_one(c.moment_bytes)) + 2.0 * of_one(
            c.act_bytes
        )
        bytes_of += 2.0 if width == 4 else 0.0
    update = bytes_of * params.owned / (_UPDATE_RATE[width] * rate)
    is_mixed = width == 4 and run.value("precision") in ("bf16", "fp16", "fp8") and not ours
    casts = 12.0 * params.held / (0.75 * rate) if is_mixed else 0.0
    table = run.shapes.vocab * run.shapes.hidden
    rows = run.counts.micro_batches * run.shapes.tokens * run.shapes.hidden
    return {
        parts.OPTIMIZER: update,
        parts.COPIES: casts + 0.1e-3,
        parts.EMBEDDING: (8.0 * table + 16.0 * rows) / (0.75 * rate),
    }


def _routing(run: Examined, c: Columns) -> dict[str, float]:
    if not run.shapes.experts:
        return {}
    plain = any(word in text for text in run.linked.trace.texts for word in _PLAIN_ROUTING)
    return {parts.ROUTING: _routing_s(run, c, _PLAIN_PASSES if plain else _FUSED_PASSES)}


def fused_routing_s(run: Examined, pricing: Pricing) -> float:
    """Seconds of a step for routing by kernels that are made for it."""
    return _routing_s(run, pricing.columns, _FUSED_PASSES)


def _routing_s(run: Examined, c: Columns, passes: float) -> float:
    rows = run.shapes.expert_rows * run.shapes.hidden * 2.0
    layers = run.counts.micro_batches * run.counts.layers
    return layers * passes * rows / (0.75 * of_one(c.hbm))
