"""Peak bytes of each stage by kind, how sure they are (an 80% interval from what rows left open of
the coefficients), and the chance that the fullest rank stays below its limit.

Activations after Korthikanti et al. (arXiv 2205.05198), ZeRO state after Rajbhandari et al. (arXiv
1910.02054); coefficients carry what an engine keeps beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.dispatch import OVERLAPS, fact
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.coefficients import COEFFICIENTS, LEAN, Coefficient
from fourfold.cost.fit.interval import TWO_SIDED_80
from fourfold.cost.kinds import KINDS
from fourfold.cost.memory.held import kept_bytes, stage_layer_bytes
from fourfold.cost.memory.moments import stage_peak
from fourfold.cost.memory.stage import around_bytes, at_stages, of_stages, stages
from fourfold.cost.ops.experts import ExpertSizes
from fourfold.cost.ops.layer import decoder_layer, scores
from fourfold.cost.ops.muon import adams_weights
from fourfold.cost.ops.op import Sizes
from fourfold.cost.step.pipeline import has_own_schedule, in_flight, stage_layers
from fourfold.cost.step.stage_kinds import has_uneven_experts, routed_shares

GIB = 2.0**30
Params = list[Floats]  # of a rank, or bytes of one, by KINDS
# The driver and the CUDA context leave about 98.8% of the nominal size (79.1 of 80 GiB).
USABLE = 0.988
# Half width (log) that no fit removes: 8 of 10 held-out runs of bloom are within 7.5%. Of our own
# engine tensors are counted, and allocators still differ.
FRAGMENTS, FSDP2_FRAGMENTS = 0.08, 0.05
REFUSED, SURE = 0.1, 0.9  # chances of fitting below and above which a verdict is called sure


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes at the peak: of the first and last stage, of the fullest one, and by kind there."""

    first_bytes: Floats
    last_bytes: Floats
    worst_bytes: Floats
    parts: dict[str, Floats]

    def take(self, index: NDArray[np.intp]) -> Memory:
        return self.combined(lambda column: column[index])

    def combined(self, combine: Callable[..., Floats], *others: Memory) -> Memory:
        """`combine` of every column of this and of others."""
        rooms = (self, *others)
        parts = {name: combine(*(room.parts[name] for room in rooms)) for name in self.parts}
        first, last, worst = (
            combine(*(getattr(room, name) for room in rooms))
            for name in ("first_bytes", "last_bytes", "worst_bytes")
        )
        return Memory(first, last, worst, parts)


def state_bytes(c: Columns, coef: Coefficients, *, params: Params) -> Floats:
    """Weights, gradients and optimizer of parameters, divided as ZeRO says."""
    each = zip(params, weight_bytes(c), strict=True)
    return sum((count * bytes_each for count, bytes_each in each), np.zeros(())) * coef["state"]


def weight_bytes(c: Columns) -> Params:
    """Of one parameter: itself, its gradient and its optimizer's state, divided as ZeRO says; and
    what the optimizer keeps beyond that of embedding and head."""

    # Two ranks that hold the same stage divide its optimizer, not its weights and gradients.
    copies = np.where(has_own_schedule(c), fact(c.overlap, "stages", OVERLAPS), 1.0)

    def over(ranks: Floats) -> Floats:
        parted = [np.where(c.zero >= stage, ranks, 1.0) for stage in (1, 2, 3)]
        return c.opt_bytes / parted[0] + copies * (c.acc_bytes / parted[1] + 2.0 / parted[2])

    more = c.end_moment_bytes / np.where(c.zero >= 1, KINDS[""].shards(c), 1.0)
    return [*(over(kind.shards(c)) for kind in KINDS.values()), more]


def gathered_bytes(c: Columns) -> Floats:
    """Whole weights that ZeRO-3 holds for a moment."""
    per_layer = sum(kind.on_rank(c) for kind in KINDS.values())
    embed = c.vocab * c.hidden / c.tp
    return np.where(c.zero >= 3, c.gather_bytes * (2.0 * per_layer + embed), 0.0)


def limit_bytes(c: Columns, coef: Coefficients) -> Floats:
    """Bytes above which a run does not fit: what the driver leaves, less the learned margin."""
    return c.capacity * USABLE * coef["room"]


def saved_input_bytes(c: Columns) -> Floats:
    """The input of a layer that is recomputed whole; sequence parallelism divides it over tp, and
    some engines do without it."""
    split = np.where(c.split_inputs > 0, c.tp, c.split)
    return c.act_bytes * c.tokens * c.hidden / split


def memory(c: Columns, coef: Coefficients) -> Memory:
    """Peak bytes of every run's first, last and fullest stage."""
    if np.all(c.fsdp2 > 0) and len(c):
        return _fsdp2(c, coef)
    fitted = _fitted(c, coef)
    if not np.any(c.fsdp2 > 0):
        return fitted
    return fitted.combined(
        lambda theirs, ours: np.where(c.fsdp2 > 0, ours, theirs), _fsdp2(c, coef)
    )


def _fsdp2(c: Columns, coef: Coefficients) -> Memory:
    """Of our own engine, and of torch's FSDP2 in others: tensors, and what no tensor shows."""
    totals, kinds = _own_stages(c, coef)
    worst = np.maximum.reduce(np.broadcast_arrays(*totals))
    fullest = [total >= worst for total in totals]
    parts = {name: np.select(fullest, [stage[name] for stage in kinds]) for name in kinds[0]}
    return Memory(totals[0], np.where(c.pp > 1, totals[-1], totals[0]), worst, parts)


def _own_stages(c: Columns, coef: Coefficients) -> tuple[list[Floats], list[dict[str, Floats]]]:
    """(bytes, bytes by kind) of the first, the fullest middle and the last stage."""
    micros, (base, cached) = c.micros, around_bytes(c, coef)
    every = stages(c, micros)
    kept = stage_layer_bytes(c, every)
    peaks = [stage_peak(c, one, stage, micros) for stage, one in zip(every, kept, strict=True)]
    kinds = [
        {
            "state": peak.state * cached,
            "activations": peak.activations * cached,
            "logits": peak.loss * cached,
            "gathered_weights": peak.weights * cached,
            "base": base + np.zeros_like(peak.total),
        }
        for peak in peaks
    ]
    return [peak.total * cached + base for peak in peaks], kinds


def stage_kinds(c: Columns, coef: Coefficients) -> list[dict[str, Floats]]:
    """Bytes by kind of the first, the fullest middle and the last stage of our own engine."""
    return _own_stages(c, coef)[1]


def _working_bytes(c: Columns, kept: Floats) -> Floats:
    """What is computed again is there once."""
    again = np.where(c.mlp_ckpt > 0, (1.0 + c.gated) * c.act_bytes, 0.0) + c.saved_bytes
    working = np.where(c.full_ckpt > 0, kept, 0.0)
    working = working + np.where(c.norm_ckpt > 0, c.tokens * again * c.ffn / c.tp, 0.0)
    if np.any(c.moe_ckpt > 0):
        e = ExpertSizes(c, Sizes(c, c.micro))
        rows = e.rows * c.act_bytes * (c.hidden + e.wide + e.ffn)
        working = working + np.where(c.moe_ckpt > 0, rows, 0.0)
    return working + np.where(c.attn_ckpt > 0, scores(c, Sizes(c, c.micro)), 0.0)


def _loss_bytes(c: Columns, coef: Coefficients) -> Floats:
    """Logits, and the gradient of the head that a product writes before it is added to sums of
    another format."""
    # A gathered loss holds the gathered copy beside the shards it came from.
    whole = np.where(c.tp > 1, 1.15, 1.0)
    share = np.where(c.split_loss > 0, 1.0 / c.tp, whole)
    each = 10.0 * coef["logits"] * share + 4.0 * coef["whole_logits"]
    head = np.where(c.acc_bytes > c.act_bytes, c.act_bytes * c.vocab * c.hidden / c.tp, 0.0)
    return c.tokens * c.vocab * each / c.loss_chunks + head


def stage_loads(c: Columns, coef: Coefficients) -> list[tuple[Params, Floats, Floats]]:
    """(parameters by kind and then those that AdamW has beside Muon, bytes of activations, bytes at
    the loss) of the first stage, of the second or the fullest one between, and of the last; how the
    state is sharded does not enter."""
    embed = c.vocab * c.hidden / c.tp
    split, flight = stage_layers(c), in_flight(c, c.micros)
    at = at_stages(c, routed_shares(c), np.ndim(coef["act"])) if has_uneven_experts(c) else c
    saved, alone, loss = saved_input_bytes(c), c.pp == 1, _loss_bytes(c, coef)
    kept = of_stages(c, at, kept_bytes(at, decoder_layer(at, c.micro), coef))
    weights = zip(*(of_stages(c, at, kind.on_rank(at)) for kind in KINDS.values()), strict=True)
    layer_kept = [c.full_ckpt * saved + (1.0 - c.full_ckpt) * one for one in kept]
    held = [
        split.first * flight.first * layer_kept[0],
        split.middle * flight.second * layer_kept[1],
        # What waits for its weight gradients was recomputed before and is held whole.
        split.last * (flight.late * kept[2] + (flight.last - flight.late) * layer_kept[2]),
    ]
    activations = [own + _working_bytes(c, one) for own, one in zip(held, kept, strict=True)]
    ends = (np.where(alone & (c.tied < 1), 2.0, 1.0) * embed, np.zeros(()), embed)
    routers = of_stages(c, at, adams_weights(at))
    counts = zip((split.first, split.middle, split.last), weights, ends, routers, strict=True)
    params = [
        [layers * dense + end, *(layers * each for each in others), end + layers * router]
        for layers, (dense, *others), end, router in counts
    ]
    losses = np.where(alone, loss, 0.0), np.zeros(len(c)), loss
    return list(zip(params, activations, losses, strict=True))


def _fitted(c: Columns, coef: Coefficients) -> Memory:
    unsharded, base = gathered_bytes(c), coef["base_gib"] * GIB
    states, held, losses = [], [], []
    for params, activations, loss in stage_loads(c, coef):
        states.append(state_bytes(c, coef, params=params))
        held.append(activations)
        losses.append(loss)
    first, middle, last = (
        sum(kinds, unsharded + base) for kinds in zip(states, held, losses, strict=True)
    )
    middle, last = np.where(c.pp > 2, middle, 0.0), np.where(c.pp > 1, last, first)
    worst = np.maximum(np.maximum(first, last), middle)

    def fullest(at_first: Floats, at_middle: Floats, at_last: Floats) -> Floats:
        return np.where(first >= worst, at_first, np.where(last >= worst, at_last, at_middle))

    parts = {
        "state": fullest(*states),
        "activations": fullest(*held),
        "logits": fullest(*losses),
        "gathered_weights": unsharded + np.zeros_like(worst),
        "base": base + np.zeros_like(worst),
    }
    return Memory(first, last, worst, parts)


def moves(entry: FittedStack, part: str) -> list[tuple[Coefficient, float]]:
    """(coefficient, an end of its 80% range): what rows taught narrows the prior's spread."""
    ends = []
    for one in COEFFICIENTS:
        spread = one.spread * (1.0 - entry.informed.get(one.name, 0.0)) * TWO_SIDED_80
        if one.part == part and spread > 1e-3:
            moved = (entry.coefficients[one.name] * exp(way * spread) for way in (-1.0, 1.0))
            ends += [(one, min(max(end, one.low), one.high)) for end in moved]
    return ends


def moved_coefficients(
    entry: FittedStack, ends: list[tuple[Coefficient, float]]
) -> dict[str, Floats]:
    """Coefficients as [moves, 1] arrays, one of them moved at a time."""
    coef = {name: np.full((len(ends), 1), value) for name, value in entry.coefficients.items()}
    for i, (coefficient, value) in enumerate(ends):
        coef[coefficient.name][i] = value
    return coef


def memory_bounds(c: Columns, entry: FittedStack) -> tuple[Floats, Floats]:
    """(low, high) bytes of the fullest stage: every coefficient at the ends of its 80% range, the
    effects added as independent ones, with what an allocator's fragments always add or save."""
    return _around(c, entry, memory(c, entry.coefficients).worst_bytes)


def _around(c: Columns, entry: FittedStack, worst: Floats) -> tuple[Floats, Floats]:
    always = np.where(c.fsdp2 > 0, FSDP2_FRAGMENTS, FRAGMENTS)
    effect = np.zeros((1, len(c)))
    if not np.all(c.fsdp2 > 0):
        moved = memory(c, moved_coefficients(entry, moves(entry, "memory"))).worst_bytes
        effect = np.log(moved / worst)
    half = np.sqrt((effect**2).sum(axis=0) / 2.0 + always**2)
    return worst * np.exp(-half), worst * np.exp(half)


def lean_coefficients(entry: FittedStack) -> dict[str, float]:
    """Coefficients of a lean engine, as far as rows leave them open."""

    def moved(name: str, value: float) -> float:
        own = entry.coefficients[name]
        # A profile's own engine wastes nothing that rows could have told of.
        return own * (value / own) ** (1.0 - entry.informed.get(name, 0.0)) if own else own

    lean = {name: moved(name, value) for name, value in LEAN.items()}
    for name, value in lean.items():
        mine = entry.coefficients[name]
        lean[name] = max(mine, value) if name == "room" else min(mine, value)
    return {**entry.coefficients, **lean}


def fit_chance(c: Columns, entry: FittedStack, worst: Floats | None = None) -> Floats:
    """Chance (0..1) that each run fits what the driver and the learned margin leave. Below the
    prediction lies more than above it: of ten engines one wastes nothing. The memory of a stack
    nobody measured is put halfway between that and the usual of measured ones, which lies as far
    above, and half of them above that: bloom's needed 27% more than the others say of it. `worst`:
    bytes of the fullest stage, where they are known."""
    worst = memory(c, entry.coefficients).worst_bytes if worst is None else worst
    low, high = _around(c, entry, worst)
    limit, lean = limit_bytes(c, entry.coefficients), lean_coefficients(entry)
    # Counted tensors are the same whatever an engine wastes.
    least = worst if np.all(c.fsdp2 > 0) else memory(c, lean).worst_bytes
    least = least * np.exp(-np.where(c.fsdp2 > 0, FSDP2_FRAGMENTS, FRAGMENTS))
    # Less memory, and more of the device.
    least = np.minimum(low, least * limit / limit_bytes(c, lean))
    below, above = np.log(worst / least), np.log(high / worst)
    above = above if entry.rows_time else np.maximum(above, 2.0 * below)
    sd = np.where(worst < limit, above, below) / TWO_SIDED_80
    return _normal(np.log(limit / worst) / sd)


def _normal(z: Floats) -> Floats:
    """The normal distribution, to three digits."""
    return 0.5 * (1.0 + np.tanh(0.79788 * (z + 0.044715 * z**3)))
