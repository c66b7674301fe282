"""Seconds of single operations (cost/ops) where nothing else runs, on a GPU and its links.

The same where the device is a host's own cores: operators run one after another, each paid in
full. A rough guess by coefficients that begin with `cpu_`, which only a profile of a CPU has
(cost/fit/machine.py), of as many ranks at work at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.kinds import KINDS
from fourfold.cost.ops.op import Op, Phase
from fourfold.cost.step.kernels import attention_s, gemm_s, grouped_s
from fourfold.cost.step.traffic import (
    context_s,
    floor,
    floor_slopes,
    gradient_s,
    group_rate,
    half_collective_s,
    host_layer_s,
    p2p_rate,
    ring_s,
    tokens_s,
)
from fourfold.spec.words import CP_KINDS, DTYPES

_FP8, _FP4 = DTYPES.index("fp8"), DTYPES.index("fp4")
_ULYSSES = CP_KINDS.index("ulysses")
# `elem` is about 1.8 for engines whose passes are guessed; counted ones take about 1.2 of their
# bytes at the memory's rate by its data sheet.
EXACT = 0.67
# Of what interleaved stages send: the rest travels beside the chunks between. Without it rows of
# NeMo on H100 ask for 1.2 times the network they have.
SENT_ALONE = 0.2


# Kinds of operations that a GPU computes: an engine's pace is that of its kernels.
KERNELS = frozenset(
    (
        "product",
        "grouped product",
        "iteration product",
        "attention",
        "norm",
        "elementwise",
        "cast",
        "copy",
    )
)


@dataclass(slots=True)
class Rates:
    """Of these runs by these coefficients. What operations share is computed once."""

    c: Columns
    coef: Coefficients
    _known: dict[object, Floats] = field(default_factory=dict)
    # By axis: the last message's bytes, and its seconds.
    _messages: dict[str, tuple[Any, Floats]] = field(default_factory=dict)

    def seconds(self, op: Op) -> Floats:
        """A method for each kind of kernel, and for each axis whose messages are more than gathers
        and scatters among neighbours."""
        kind = op.axis.partition(" ")[0] if op.kind == "collective" else op.kind
        seconds = op.share * getattr(self, kind.replace(" ", "_"), self.near)(op)
        return seconds * self.coef["engine"] if op.kind in KERNELS else seconds

    def product(self, op: Op) -> Floats:
        c = self.c
        rate = self._rate(op.narrow)
        return gemm_s(op.m, op.n, op.k, rate=rate, hbm=c.hbm, sms=c.sms, coef=self.coef)

    def grouped_product(self, op: Op) -> Floats:
        """One kernel for all experts of a rank."""
        rate = self._rate(op.narrow) * self.c.grouped_share * self.coef["grouped"]
        is_weights = op.phase == "weights"
        return grouped_s(op, rate=rate, hbm=self.c.hbm, is_weights=is_weights)

    def iteration_product(self, op: Op) -> Floats:
        """Of an optimizer's iteration, in a format of its own."""
        c, coef = self.c, self.coef
        rate = c.peak * c.muon_peak * c.clock * c.product_share * coef["product"]
        return gemm_s(op.m, op.n, op.k, rate=rate, hbm=c.hbm, sms=c.sms, coef=coef)

    def _rate(self, narrow: bool) -> Floats:
        if narrow not in self._known:
            self._known[narrow] = self._product_rate(narrow)
        return self._known[narrow]

    def _product_rate(self, narrow: bool) -> Floats:
        c, coef = self.c, self.coef
        rate = c.peak * c.clock * c.product_share * coef["product"]
        is_low = (c.precision == _FP8) | (c.precision == _FP4)
        if not narrow or not is_low.any():
            return rate
        low = c.peak_low / c.peak * c.narrow_share * coef["fp8"] * c.scaled_rate
        return np.where(is_low, rate * low, rate)

    def attention(self, op: Op) -> Floats:
        return self._core_s(op.phase, op.m)

    def _core_s(self, phase: Phase, micro: Floats) -> Floats:
        if phase not in self._known:
            both = attention_s(self.c, self.coef, micro=micro)
            self._known["forward"], self._known["inputs"] = both
        return self._known[phase]

    def elementwise(self, op: Op) -> Floats:
        return op.bytes * self.coef["elem"] * np.where(op.counted > 0, EXACT, 1.0) / self.c.hbm

    def norm(self, op: Op) -> Floats:
        fused = (self.c.fused_norm > 0) | (op.counted > 0)
        return self.elementwise(op) * np.where(fused, 1.0, self.coef["norm"])

    def cast(self, op: Op) -> Floats:
        return op.bytes * np.where(op.counted > 0, EXACT * self.coef["elem"], 1.0) / self.c.hbm

    def copy(self, op: Op) -> Floats:
        return op.bytes / self.c.hbm

    def tp(self, op: Op) -> Floats:
        """Each gather or scatter of a tensor group; in pieces under products, a part is paid."""
        return op.halves * self._sent(op, self._half_s)

    def _sent(self, op: Op, seconds: Callable[[Floats], Floats]) -> Floats:
        if op.axis not in self._messages or self._messages[op.axis][0] is not op.bytes:
            self._messages[op.axis] = op.bytes, seconds(op.bytes)
        return self._messages[op.axis][1]

    def _half_s(self, data: Floats) -> Floats:
        c, coef = self.c, self.coef
        half = half_collective_s(c, coef, data, size=c.tp, stride=np.ones_like(c.tp))
        half = half + np.where(c.tp > 1, coef["call_s"], 0.0)
        return half * np.where(c.overlap_tp > 0, coef["tp_hidden"], 1.0)

    def cp(self, op: Op) -> Floats:
        """A ring hides its hops under the layer's attention."""
        attention = self._core_s(op.phase, op.m)
        return context_s(self.c, self.coef, op.bytes, op.halves, attention=attention)

    def shard(self, op: Op) -> Floats:
        c, kind = self.c, KINDS[op.axis.removeprefix("shard")]
        size, apart = kind.shards(c), kind.cut(c)
        if op.axis not in self._known:
            self._known[op.axis] = group_rate(c, self.coef, size, apart)
            self._known[f"{op.axis}, ring"] = 0.25 * ring_s(c, self.coef, size, apart)
        move = op.bytes * (size - 1.0) / size / self._known[op.axis]
        return op.times * (move + self._known[f"{op.axis}, ring"])

    def replicas(self, op: Op) -> Floats:
        """The same shard of every replica."""
        c, kind = self.c, KINDS[op.axis.removeprefix("replicas")]
        size, apart = kind.copies(c) / kind.shards(c), kind.shards(c) * kind.cut(c)
        move = op.bytes * (size - 1.0) / size / group_rate(c, self.coef, size, apart)
        return op.times * op.halves * (move + 0.25 * ring_s(c, self.coef, size, apart))

    def ep(self, op: Op) -> Floats:
        """Tokens to experts of other ranks, or back."""
        return self._sent(op, lambda data: tokens_s(self.c, self.coef, data))

    def near(self, op: Op) -> Floats:
        """Gathered among neighbours: rows to all ranks that hold slices of an expert."""
        c, size, stride = self.c, getattr(self.c, op.axis), np.ones_like(self.c.tp)
        return self._sent(
            op, lambda data: half_collective_s(c, self.coef, data, size=size, stride=stride)
        )

    def send(self, op: Op) -> Floats:
        if "send" not in self._known:
            rate = p2p_rate(self.c, self.coef, self.c.gpus / self.c.pp)
            self._known["send"] = self._alone / rate
        return op.times * (op.bytes * self._known["send"] + self.coef["micro_s"] / 2.0)

    @property
    def _alone(self) -> Floats:
        """Of a stage's messages, what nothing hides."""
        return np.where(self.c.vpp > 1, SENT_ALONE, 1.0)

    def host(self, op: Op) -> Floats:
        return host_layer_s(self.c, self.coef)

    def together(self, busy: Floats, move: Floats, launch: Floats) -> tuple[Floats, Floats]:
        """Of a layer: (with what ZeRO-3 moves beside it, with launches that it may wait for)."""
        gathered = overlapped_s(self.c, self.coef, busy=busy, move=move) if np.any(move) else busy
        return gathered, floor(gathered, launch)

    def slopes(self, busy: Floats, launch: Floats) -> tuple[Floats, Floats]:
        """By how much both together grow with each, where nothing is gathered."""
        return floor_slopes(busy, launch)

    def reduced(self, reduce: Op, gather: Op, window: Floats) -> Floats:
        """Of a step's gradients, and of weights that ZeRO-1 divides; `window`: of a backward pass,
        which hides them."""
        return gradient_s(self.c, self.coef, reduce, gather, window=window)

    def pipeline(self, usual: Floats, work: Floats) -> Floats:
        """Of a pipeline that takes `usual`, in which a rank is at work for `work`."""
        return usual


def overlapped_s(c: Columns, coef: Coefficients, *, busy: Floats, move: Floats) -> Floats:
    """What both take; grows with either."""
    together = ((busy**2) ** 2 + (move**2) ** 2) ** 0.25 + 0.2 * coef["dp_exposed"] * move
    return np.where(c.prefetch > 0, together, busy + move)


# What FSDP takes to wrap a layer for one gather or scatter, against starting the layer's operators.
_WRAPPED = 0.6


def is_cpu(coef: Coefficients) -> bool:
    return "cpu_start_s" in coef


def rates_of(c: Columns, coef: Coefficients) -> Rates:
    return CpuRates(c, coef) if is_cpu(coef) else Rates(c, coef)


class CpuRates(Rates):
    def product(self, op: Op) -> Floats:
        return (
            2.0 * op.m * op.n * op.k / (self.c.peak * self.c.product_share * self.coef["product"])
        )

    def grouped_product(self, op: Op) -> Floats:
        return op.groups * self.product(op)

    def iteration_product(self, op: Op) -> Floats:
        return self.product(op) / self.c.muon_peak

    def elementwise(self, op: Op) -> Floats:
        return op.bytes * self.coef["cpu_byte_s"]

    norm = cast = elementwise

    def tp(self, op: Op) -> Floats:
        return self._collective(op, self.c.tp, np.where(op.halves > 0, 1.0, 0.0))

    def cp(self, op: Op) -> Floats:
        data = op.bytes * np.where(self.c.cp_kind == _ULYSSES, self.c.cp, 1.0)
        return self._collective(op, self.c.cp, op.halves, data=data)

    def shard(self, op: Op) -> Floats:
        size = KINDS[op.axis.removeprefix("shard")].shards(self.c)
        return op.times * self._wrapped(op, size, op.halves)

    def replicas(self, op: Op) -> Floats:
        kind = KINDS[op.axis.removeprefix("replicas")]
        size = kind.copies(self.c) / kind.shards(self.c)
        return op.times * self._collective(op, size, op.halves)

    def ep(self, op: Op) -> Floats:
        """Rows of tokens, one for each chosen expert, and their counts."""
        c = self.c
        return self._collective(op, c.ep, 2.0 * op.halves, data=op.bytes * c.top_k * c.fullest)

    def near(self, op: Op) -> Floats:
        return self._collective(op, getattr(self.c, op.axis), op.halves)

    def reduced(self, reduce: Op, gather: Op, window: Floats) -> Floats:
        """Layer by layer, and the ends."""
        calls = self.c.layers / self.c.pp + 1.0
        kind = KINDS[reduce.axis.removeprefix("dp")]
        sizes = ((reduce, kind.copies(self.c)), (gather, kind.shards(self.c)))
        return sum((op.times * self._wrapped(op, size, calls) for op, size in sizes), np.zeros(()))

    def _wrapped(self, op: Op, size: Floats, calls: Floats) -> Floats:
        """FSDP copies into its buffers and out of them."""
        around = 2.0 * op.bytes / self.c.hbm + calls * _WRAPPED * self.coef["cpu_start_s"]
        return self._collective(op, size, calls) + around

    def _collective(
        self, op: Op, size: Floats, calls: Floats, data: Floats | None = None
    ) -> Floats:
        """Hop by hop, and bytes that a rank sends."""
        moved = op.halves * (op.bytes if data is None else data) * (size - 1.0) / size
        start = calls * (size - 1.0) * self.coef["cpu_gather_s"]
        return np.where(size > 1, start + moved * self.coef["cpu_gather_byte_s"], 0.0)

    def send(self, op: Op) -> Floats:
        move = self._alone * op.bytes * self.coef["cpu_send_byte_s"]
        return op.times * (self.coef["cpu_send_s"] + move)

    def host(self, op: Op) -> Floats:
        return self.coef["cpu_start_s"] * (1.0 + self.c.full_ckpt / 3.0)

    def together(self, busy: Floats, move: Floats, launch: Floats) -> tuple[Floats, Floats]:
        return busy + move, busy + move + launch

    def slopes(self, busy: Floats, launch: Floats) -> tuple[Floats, Floats]:
        return np.ones(()), np.ones(())

    def pipeline(self, usual: Floats, work: Floats) -> Floats:
        """Rates are of ranks that are all at work. Where they are more than cores, one that waits
        leaves its turn to the others: together they take as long as their `work` does, or as a
        pipeline whose ranks have a core each."""
        alone = np.maximum(work, self.coef["cpu_share"] * usual)
        return np.where(self.c.pp > 1, alone, usual)
