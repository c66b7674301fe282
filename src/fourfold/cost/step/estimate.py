"""Seconds of a step, part by part: the closed form. Coefficients may be arrays that broadcast
against the columns: a (k, 1) array asks k questions at once.

Seconds of one layer and one micro batch on one rank: a fold over its operations (cost/ops).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost import dispatch
from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.kinds import DENSE, kinds_of
from fourfold.cost.ops.ends import embedding, handover, head, reduction, update
from fourfold.cost.ops.layer import LAYER
from fourfold.cost.ops.muon import adams_weights, iterations
from fourfold.cost.ops.op import Op
from fourfold.cost.step.pipeline import StageTimes, pipeline_s, stage_layers
from fourfold.cost.step.rates import Rates, rates_of
from fourfold.cost.step.stage_kinds import mixed_kinds, model_shares, of_word, stage_shares
from fourfold.spec.layers import FeedForward, LayerKind, Mixer
from fourfold.spec.layout import EXPERT_AXES

# Parts of a layer's time by kind of operation, of messages by axis.
PART_OF = {
    "product": "gemm",
    "grouped product": "gemm",
    "iteration product": "gemm",
    "attention": "attention",
    "norm": "elementwise",
    "elementwise": "elementwise",
    "cast": "elementwise",
    "copy": "elementwise",
    "tp": "tp_comm",
    "cp": "cp_comm",
    "shard": "fsdp_comm",
    "replicas": "fsdp_comm",
    **dict.fromkeys(EXPERT_AXES, "ep_comm"),
    "host": "host",
}
_ZERO: Floats = np.zeros(())


PerKind = Sequence[Floats] | Floats  # one array for each kind of layer


class LayerWork(NamedTuple):
    """Seconds of a layer, or of the mean of several, by what runs beside each other: kernels and
    messages that wait for each other, what ZeRO-3 gathers and scatters, the host's launches."""

    busy: Floats
    move: Floats
    launch: Floats


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer and one micro batch, mean over the layers of a model; `total` is what
    the parts become together. Of a model whose layers differ also the work of each kind."""

    parts: dict[str, Floats]
    total: Floats
    kinds: tuple[LayerKind, ...] = ()
    works: tuple[LayerWork, ...] = ()

    def total_of(self, shares: PerKind, rates: Rates) -> Floats:
        """Seconds of the mean of layers with these shares of each kind."""
        return rates.together(*mean_work(self.works, shares))[1]

    def take(self, index: NDArray[np.intp]) -> LayerTimes:
        def taken(seconds: Floats) -> Floats:
            return seconds[index] if np.ndim(seconds) else seconds

        parts = {name: taken(part) for name, part in self.parts.items()}
        works = tuple(LayerWork(*map(taken, work)) for work in self.works)
        return LayerTimes(parts, taken(self.total), self.kinds, works)


def mean_work(works: Sequence[LayerWork], shares: PerKind) -> LayerWork:
    """The work of a layer that is the mean of kinds in these shares."""
    seconds = zip(*works, strict=True)
    return LayerWork(*(weighted(of_kinds, shares) for of_kinds in seconds))


def weighted(values: PerKind, shares: PerKind) -> Floats:
    return sum((share * value for share, value in zip(shares, values, strict=True)), _ZERO)


def part_of(op: Op) -> str:
    return PART_OF[op.axis.partition(" ")[0] if op.kind == "collective" else op.kind]


def sums(ops: Iterable[Op], rates: Rates) -> dict[str, Floats]:
    """Seconds by part, and of what is computed again, if nothing ran beside anything else but
    shared experts beside the exchange, where they do."""
    found = dict.fromkeys((*PART_OF.values(), "recompute"), _ZERO)
    shared = _ZERO
    for op in ops:
        seconds = rates.seconds(op)
        found[part_of(op)] = found[part_of(op)] + seconds
        if op.name.startswith("mlp.shared"):
            shared = shared + seconds
        if op.phase == "forward":
            found["recompute"] = found["recompute"] + op.again * seconds
    beside = rates.c.hides_exchange * dispatch.fact(rates.c.overlap, "shared", dispatch.OVERLAPS)
    found["ep_comm"] = np.maximum(0.0, found["ep_comm"] - beside * shared)
    return found


def ops_s(ops: Iterable[Op], rates: Rates) -> Floats:
    """Seconds of operations that wait for each other, with what is computed again."""
    return sum(((1.0 + op.again) * rates.seconds(op) for op in ops), _ZERO)


Told = Callable[[Columns, Floats], Iterable[Op]]  # of one micro batch
Once = tuple[list[tuple[Op, Op]], list[Op]]


def once_ops(c: Columns, ends: float = 1.0) -> Once:
    """(reductions of gradients with gathers of weights, updates) of a step, by kinds of weights. Of
    the first stage (the last one's head is as large as the embedding), or of a stage that holds so
    many of the model's two `ends`: both of a single stage, where tied ends have one matrix."""
    held = c.layers / c.pp
    matrices = np.where(c.pp > 1, ends, np.where(c.tied > 0, 1.0, 2.0))
    reduced: list[tuple[Op, Op]] = []
    updated: list[Op] = []
    for kind in kinds_of(c):
        of_layers = held * kind.on_rank(c)
        of_ends = matrices * c.vocab * c.hidden / c.tp if kind is DENSE else np.zeros(())
        reduced.append(reduction(c, of_layers + of_ends, kind))
        of_adam = held * adams_weights(c) if kind is DENSE else np.zeros(())
        updated += update(c, of_layers + of_ends, kind, of_ends + of_adam)
        if np.any(c.muon_steps > 0):
            updated += iterations(c, of_layers - of_adam, kind)
    return reduced, updated


class StepOps(NamedTuple):
    """The operations that a step's seconds are a sum over."""

    layer: tuple[Told, ...] = LAYER  # by the parts of a LayerKind
    head: Told = head
    embedding: Told = embedding
    handover: Told = handover
    once: Callable[[Columns], Once] = once_ops


STEP = StepOps()


def layer_times(
    c: Columns, coef: Coefficients, *, micro: Floats, layer: tuple[Told, ...] = LAYER
) -> LayerTimes:
    """Everything one layer does for one micro batch. What ZeRO-3 gathers travels beside it, and a
    GPU runs while its host launches; on a CPU each waits for the other."""
    rates, kinds = rates_of(c, coef), mixed_kinds(c)
    if not kinds:
        of_parts = [sums(part(c, micro), rates) for part in layer]
        works: tuple[LayerWork, ...] = ()
        mean = _total_work(of_parts)
    else:
        of_words = [
            _by_word(c, coef, micro, part, [kind[place] for kind in kinds])
            for place, part in enumerate(layer)
        ]
        shares = model_shares(c, kinds)
        of_parts = [_mean(seconds, shares) for seconds in of_words]
        works = tuple(map(_total_work, zip(*of_words, strict=True)))
        mean = mean_work(works, shares)
    alone = {name: sum((part[name] for part in of_parts), _ZERO) for name in of_parts[0]}
    gathered, total = rates.together(*mean)
    parts = alone | {"fsdp_comm": gathered - mean.busy, "host": total - gathered}
    return LayerTimes(parts, total, kinds, works)


def _by_word(
    c: Columns, coef: Coefficients, micro: Floats, part: Told, words: Sequence[Mixer | FeedForward]
) -> list[dict[str, Floats]]:
    """Seconds of a part of a layer as each of these words of a LayerKind has it."""
    seconds: dict[Mixer | FeedForward, dict[str, Floats]] = {}
    for word in words:
        if word not in seconds:
            runs = of_word(c, word)
            seconds[word] = sums(part(runs, micro), rates_of(runs, coef))
    return [seconds[word] for word in words]


def _mean(seconds: Sequence[dict[str, Floats]], shares: PerKind) -> dict[str, Floats]:
    first = seconds[0]
    if all(other is first for other in seconds):
        return first
    return {name: weighted([of_kind[name] for of_kind in seconds], shares) for name in first}


def _total_work(of_parts: Iterable[dict[str, Floats]]) -> LayerWork:
    works = [_work(seconds) for seconds in of_parts]
    return LayerWork(*(sum(seconds, _ZERO) for seconds in zip(*works, strict=True)))


def _work(alone: dict[str, Floats]) -> LayerWork:
    busy = sum((part for name, part in alone.items() if name not in ("fsdp_comm", "host")), _ZERO)
    return LayerWork(busy, alone["fsdp_comm"], alone["host"])


def added_s(c: Columns, coef: Coefficients, layer: LayerTimes) -> list[Floats]:
    """Return the seconds that one more layer of each kind adds to those of a model that gathers no
    weights. What several kinds take together is convex: no number of layers of each takes less than
    the sum of these."""
    if not layer.kinds:
        return []
    busy, _, launch = mean_work(layer.works, model_shares(c, layer.kinds))
    of_busy, of_launch = rates_of(c, coef).slopes(busy, launch)
    return [of_busy * work.busy + of_launch * work.launch for work in layer.works]


LAYER_PARTS = (
    "gemm",
    "attention",
    "elementwise",
    "recompute",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "fsdp_comm",
    "host",
)
PARTS = (*LAYER_PARTS, "head", "pp_comm", "bubble", "dp_comm", "optimizer", "fixed", "jitter")
_SHORT_FIXED = 0.1  # of what others do once per step: logging, clipping, waiting for a number


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step and where they go."""

    step_s: Floats
    parts: dict[str, Floats]
    layer: LayerTimes

    def take(self, index: NDArray[np.intp]) -> Times:
        parts = {name: part[index] for name, part in self.parts.items()}
        return Times(self.step_s[index], parts, self.layer.take(index))


def estimate(c: Columns, coef: Coefficients, ops: StepOps = STEP) -> Times:
    """Closed-form step time of every run, or of other operations in place of those of its ranks."""
    layer = layer_times(c, coef, micro=c.micro, layer=ops.layer)
    head, embed, handover = ends_s(c, coef, c.micro, ops)

    def rest(micro: Floats) -> StageTimes:
        of_rest = layer_times(c, coef, micro=micro, layer=ops.layer)
        return stage_times(c, by_stage(c, coef, of_rest), *ends_s(c, coef, micro, ops))

    stages = stage_times(c, by_stage(c, coef, layer), head, embed, handover)
    slots, pipe = pipe_s(c, coef, stages, rest)
    parts = {name: slots * (c.layers / c.pp) * layer.parts[name] for name in LAYER_PARTS}
    parts |= {"head": slots * (head + embed) / c.pp, "pp_comm": slots * handover}
    return _whole_step(c, coef, layer, pipe=pipe, slots=slots, parts=parts, once=ops.once(c))


def pipe_s(
    c: Columns, coef: Coefficients, stages: StageTimes, of_rest: Callable[[Floats], StageTimes]
) -> tuple[Floats, Floats]:
    """(micro batches, seconds of all of them through all stages). A smaller last one (48 =
    11+11+11+11+4) is priced by its own shapes, `of_rest`, and counts as a share of the others."""
    slots = np.floor(c.share / c.micro)
    rest = c.share - slots * c.micro
    if np.any(rest > 1e-9):
        share = of_rest(np.maximum(rest, 1e-6)).slowest(c) / stages.slowest(c)
        slots = slots + np.where(rest > 1e-9, share, 0.0)
    work = slots * stages.total / c.pp
    return slots, rates_of(c, coef).pipeline(pipeline_s(c, stages, slots), work)


def ends_s(
    c: Columns, coef: Coefficients, micro: Floats, ops: StepOps = STEP
) -> tuple[Floats, Floats, Floats]:
    """Seconds of one micro batch in the head, in the embedding, and of handing it over."""
    rates = rates_of(c, coef)
    seconds = [ops_s(told(c, micro), rates) for told in (ops.head, ops.embedding, ops.handover)]
    return seconds[0], seconds[1], seconds[2]


class LayerSeconds(NamedTuple):
    """Seconds of one layer and one micro batch, mean over the layers of the first, of the fullest
    middle and of the last stage, and over all layers."""

    first: Floats
    middle: Floats
    last: Floats
    mean: Floats


def by_stage(c: Columns, coef: Coefficients, layer: LayerTimes) -> LayerSeconds:
    """Return the seconds of a layer in the stages, by the kinds of layers that each holds."""
    if not layer.kinds:
        return LayerSeconds(layer.total, layer.total, layer.total, layer.total)
    rates, shares = rates_of(c, coef), stage_shares(c, layer.kinds)
    first, middle = (layer.total_of(shares[:, stage], rates) for stage in range(2))
    # Models that begin with other layers have the same ones in all later stages.
    is_same = np.array_equal(shares[:, 1], shares[:, 2])
    last = middle if is_same else layer.total_of(shares[:, 2], rates)
    return LayerSeconds(first, middle, last, layer.total)


def stage_times(
    c: Columns, layer: LayerSeconds, head: Floats, embed: Floats, handover: Floats
) -> StageTimes:
    """Seconds of one micro batch in the stages."""
    split = stage_layers(c)
    return StageTimes(
        first=split.first * layer.first + embed + handover,
        middle=split.middle * layer.middle + handover,
        last=split.last * layer.last + head + handover,
        total=c.layers * layer.mean + head + embed + c.pp * handover,
    )


def fixed_s(c: Columns, coef: Coefficients) -> Floats:
    """Compiled torch engines have almost no overhead of the host once per step, nor has a step that
    is one graph."""
    is_short = ((c.fsdp2 > 0) & (c.compiled > 0)) | (c.fused_host > 1)
    return coef["fixed_s"] * np.where(is_short, _SHORT_FIXED, 1.0)


def waiting_s(
    c: Columns, coef: Coefficients, *, work: Floats, slots: Floats
) -> tuple[Floats, Floats]:
    """(waits, jitter): stages on different nodes meet at every micro batch and wait for the later
    one; everything grows with the nodes."""
    nodes = np.maximum(1.0, c.gpus / c.node)
    waits = np.where((nodes > 1) & (c.pp > 1), slots * coef["noise_s"] * np.log2(nodes), 0.0)
    return waits, (work + waits) * coef["jitter"] * np.log2(nodes)


def last_rounds(c: Columns) -> Floats:
    """Passes of a stage from the end of its first chunk's gradients to that of its last one's: a
    round of micro batches goes through every chunk between."""
    return np.where(c.vpp > 1, 1.0 + (c.pp - 1.0) * (c.vpp - 1.0) / c.vpp, 1.0)


def end_of_step_s(
    c: Columns, coef: Coefficients, *, window: Floats, once: Once | None = None
) -> tuple[Floats, Floats]:
    """(gradients' traffic, update); `window`: seconds of a backward pass that hide traffic."""
    reductions, updates = once or once_ops(c)
    rates = rates_of(c, coef)
    reduced = sum((rates.reduced(*both, window) for both in reductions), np.zeros(()))
    return reduced, ops_s(updates, rates)


def _whole_step(
    c: Columns,
    coef: Coefficients,
    layer: LayerTimes,
    *,
    pipe: Floats,
    slots: Floats,
    parts: dict[str, Floats],
    once: Once,
) -> Times:
    """Adds what happens once per step to the pipeline's seconds and their parts."""
    window = c.layers / c.pp * layer.total * last_rounds(c)
    dp, optimizer = end_of_step_s(c, coef, window=window, once=once)
    waits, jitter = waiting_s(c, coef, work=pipe + dp + optimizer, slots=slots)
    fixed = fixed_s(c, coef)
    step = pipe + dp + optimizer + waits + jitter + fixed
    added = {"dp_comm": dp, "optimizer": optimizer, "fixed": fixed, "jitter": jitter + waits}
    parts |= {name: seconds + np.zeros_like(step) for name, seconds in added.items()}
    parts["bubble"] = step - sum(parts.values())
    parts = {name: parts[name] for name in PARTS}
    return Times(step, parts, layer)
