"""How sure a prediction is, and which choices of a run were measured: evidence by name.

Half of the 80% interval (log) is what no coefficient explains of a stack's rows, and what rows left
open of each coefficient, by how much this run depends on it (memory's is made so, too): of a stack
that nobody measured here all is open. It grows beyond measured ranges, and by what an unstated
network may do. A choice is something a planner can take or leave (virtual stages, ZeRO-3, Ulysses),
not a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack, Provenance
from fourfold.cost.fit.coefficients import BY_NAME, TIGHT, TIME
from fourfold.cost.fit.ranges import offsets
from fourfold.cost.step.estimate import Times, estimate
from fourfold.cost.step.traffic import crosses
from fourfold.spec.words import CP_KINDS, DTYPES, SCHEDULES

Bools = NDArray[np.bool_]
Ends = tuple[Floats, Floats]
TWO_SIDED_80 = 1.2816  # 80% of a normal distribution lies within 1.28 sd
# Half widths (log) at 80%, set on folds (docs/accuracy.md): of what no coefficient explains, in its
# noise; of a doubling beyond measured ranges, where formulas may be wrong.
SCATTER, PER_DOUBLING = 1.5, 0.02
# Times that of runs with experts, whose errors have longer tails and whose rows are few.
ROUTED_SCATTER, ROUTED_AWAY = 1.4, 5.0
STEP = 1e-3  # of the logarithm of a coefficient
# Bytes/s of a node's network where nobody states it: the tenth and the ninetieth percentile of 25
# to 400 GB/s, even by logarithm.
SLOW_NET, FAST_NET = 33e9, 303e9
# Coefficients of a host's speed.
HOST = ("host_s", "fixed_s", "moe_host_s")


def sensitivities(c: Columns, entry: FittedStack) -> Floats:
    """[rows, coefficients] d log(step) / d log(coefficient) in units of its prior's spread."""
    coef = {name: np.full((len(TIME) + 1, 1), value) for name, value in entry.coefficients.items()}
    for i, name in enumerate(TIME):
        coef[name][i] *= np.exp(STEP)
    steps = np.log(np.broadcast_to(estimate(c, coef).step_s, (len(TIME) + 1, len(c))))
    return ((steps[:-1] - steps[-1]) / STEP).T * spreads(c, TIME)


def spreads(c: Columns, names: Sequence[str]) -> Floats:
    """[rows, coefficients] of priors (log), those of kernels as the device's rates are known."""
    found = np.tile([BY_NAME[name].spread for name in names], (len(c), 1))
    of_device = {"product": c.product_spread, "attention": c.attention_spread}
    for name in names:
        if name in of_device:
            found[:, names.index(name)] = of_device[name]
    return found


def scatter(entry: FittedStack) -> float:
    """Half an interval (log) of runs whose coefficients are all known."""
    return SCATTER * (ROUTED_SCATTER if entry.measured_as.experts else 1.0) * entry.noise


def open_slopes(c: Columns, entry: FittedStack) -> Floats:
    """[runs, coefficients] half widths (log) by what is open of each, with their signs."""
    open_share = np.array([1.0 - entry.informed.get(name, 0.0) for name in TIME])
    # Stacks vary less around similar ones than around what is usual.
    scale = TWO_SIDED_80 * (TIGHT if entry.rows_time else 1.0)
    return scale * np.sqrt(open_share) * sensitivities(c, entry)


@dataclass(frozen=True)
class StepInterval:
    """Of runs, and what makes it wide; each part is found once, when it is asked for."""

    c: Columns
    entry: FittedStack
    times: Times

    @cached_property
    def ends_s(self) -> Ends:
        """(low, high) seconds that hold 80% of measured runs."""
        below, above = self.half**2, self.half**2
        if np.any(self._is_net_open):
            faster, slower = _net_moves(self.c.take(self._is_net_open), self.entry)
            below[self._is_net_open] += faster**2
            above[self._is_net_open] += slower**2
        step_s = self.times.step_s
        return step_s * np.exp(-np.sqrt(below)), step_s * np.exp(np.sqrt(above))

    @cached_property
    def half(self) -> Floats:
        """Half of the interval (log), the network known."""
        # One after the other: numpy adds a row in another order when it stands alone.
        square = np.zeros(len(self.c))
        for away in offsets(self.c, self.entry.ranges).values():
            square = square + away**2
        far = np.sqrt(square)
        each = PER_DOUBLING * (ROUTED_AWAY if self.entry.measured_as.experts else 1.0)
        # Each doubling beyond what was measured takes back half of what its rows said.
        own = 1.0 + (self.entry.width - 1.0) * 0.5**far
        return np.maximum(self.entry.least_half, np.hypot(own * self.usual, each * far))

    @cached_property
    def usual(self) -> Floats:
        """Half of the interval (log) within measured ranges, of a stack that is like most."""
        total = np.full(len(self.c), scatter(self.entry) ** 2)
        for doubt in self._doubts.T:
            total = total + doubt**2
        return np.sqrt(total)

    @cached_property
    def _doubts(self) -> Floats:
        """[runs, coefficients] half widths (log) by what is open of each."""
        return open_slopes(self.c, self.entry)

    @cached_property
    def _is_net_open(self) -> Bools:
        """Runs that need a network which nobody stated."""
        return (self.c.net_open > 0) & (self.c.gpus > self.c.domain)

    def open_network(self) -> list[str]:
        """Of each run whose network nobody stated: what its interval would be if it were; '' where
        that is the same."""
        found = [""] * len(self.c)
        if not np.any(self._is_net_open):
            return found
        low, high = (end / self.times.step_s - 1.0 for end in self.ends_s)
        for i in np.flatnonzero(self._is_net_open):
            before = f"{low[i]:+.0%} to {high[i]:+.0%}"
            after = f"{np.expm1(-self.half[i]):+.0%} to {np.expm1(self.half[i]):+.0%}"
            if before != after:
                found[i] = f"network not stated: {before}; with --network RATE {after}"
        return found

    def why_wide(self) -> list[str]:
        """What makes the interval of each run wide; '' where it is not."""
        low, high = self.ends_s
        unstated, away = self.open_network(), offsets(self.c, self.entry.ranges)
        doubts = np.abs(self._doubts)
        host = np.sqrt((doubts[:, [TIME.index(name) for name in HOST]] ** 2).sum(axis=1))
        unmeasured = ["nothing of this stack was measured on this machine"]
        found = []
        for i in range(len(self.c)):
            reasons = [] if self.entry.rows_time else [*unmeasured]
            reasons += [unstated[i]] if unstated[i] else []
            if host[i] > WIDE:
                reasons.append("host-bound, and the CPU was not measured")
            elif doubts[i].max() > 0.5 * WIDE:
                about = BY_NAME[TIME[int(doubts[i].argmax())]].about
                reasons.append(f"not known here: {about}")
            far = {name: abs(float(one[i])) for name, one in away.items()}
            worst = sorted((name for name in far if far[name] >= 1.0), key=lambda name: -far[name])
            for name in worst[:2]:
                called = _CALLED.get(name, name)
                reasons.append(f"{called}: {2 ** far[name]:.0f}x from the nearest measured value")
            is_wide = np.log(high[i] / low[i]) >= 2.0 * WIDE
            found.append(("; ".join(reasons) or "its measured runs scatter") if is_wide else "")
        return found


def _net_moves(c: Columns, entry: FittedStack) -> Ends:
    """How much less and more (log) a step takes on a fast and on a slow network."""
    nets = np.stack([c.net, np.minimum(c.net, SLOW_NET), np.maximum(c.net, FAST_NET)])
    usual, slow, fast = np.log(estimate(replace(c, net=nets), entry.coefficients).step_s)
    return usual - fast, slow - usual


def provenance(c: Columns, entry: FittedStack) -> list[Provenance]:
    """What the prediction of each run rests on."""
    if entry.basis != "measured":
        return [entry.basis] * len(c)
    away = offsets(c, entry.ranges).values()
    is_beyond = np.any([one != 0.0 for one in away], axis=0) if away else np.zeros(len(c))
    return ["near" if beyond else "measured" for beyond in is_beyond]


def choices(c: Columns) -> dict[str, Bools]:
    """For each choice which runs make it."""
    shared = c.dp * c.cp > 1
    kept = (c.full_ckpt == 0) & (c.attn_ckpt == 0) & (c.norm_ckpt == 0)
    found = {
        "tensor parallel": c.tp > 1,
        "tensor parallel across nodes": crosses(c, c.tp, np.ones_like(c.tp)),
        "sequence parallel": (c.tp > 1) & (c.sp > 0),
        "tensor parallel without sequence parallel": (c.tp > 1) & (c.sp == 0),
        "pipeline": c.pp > 1,
        "virtual stages": (c.pp > 1) & (c.vpp > 1),
        "data parallel": c.dp > 1,
        "hybrid sharding": (c.zero > 0) & (c.shard < c.dp * c.cp),
        "recompute none": kept,
        "recompute selective": c.attn_ckpt > 0,
        "recompute of norms and activations": (c.norm_ckpt > 0) & (c.mlp_ckpt == 0),
        "recompute of norms and MLPs": c.mlp_ckpt > 0,
        "recompute full": c.full_ckpt == 1,
        "recompute of some layers": (c.full_ckpt > 0) & (c.full_ckpt < 1),
        "more than one sequence a micro batch": c.micro > 1,
    }
    for stage in range(4):
        found[f"zero{stage}"] = shared & (c.zero == stage)
    for code, kind in enumerate(CP_KINDS):
        found[f"context parallel ({kind})"] = (c.cp > 1) & (c.cp_kind == code)
    for kind in ("gpipe", "zero-bubble"):
        found[f"schedule {kind}"] = (c.pp > 1) & (c.schedule == SCHEDULES.index(kind))
    for kind in sorted({*DTYPES} - {"bf16", "fp16"}):
        found[f"precision {kind}"] = c.precision == DTYPES.index(kind)
    return found


def counts(c: Columns) -> dict[str, int]:
    """How many of these runs make each choice; those that none makes are left out."""
    return {name: int(mask.sum()) for name, mask in choices(c).items() if mask.any()}


WIDE = 0.12  # half of an interval (log) that asks for a reason
_CALLED = {
    "hidden": "the width",
    "seq": "the sequence",
    "gpus": "the number of GPUs",
    "tokens": "the number of tokens in a micro batch",
    "micros": "the number of micro batches",
    "vpp": "the number of virtual stages",
    "low_precision": "the format of products",
}
