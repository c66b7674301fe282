"""How often each weight is multiplied in a step: layers, micro batches, what is computed again."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from fourfold.traces import parts
from fourfold.traces.linked import Linked, TracedSteps
from fourfold.traces.placing import Placed
from fourfold.traces.shapes import Shapes


@dataclass(frozen=True, slots=True)
class Again:
    """Seconds of a step that go into computing something once more, by part, and the share of
    layers that do it (0: none, 1: all)."""

    seconds: dict[str, float]
    share: float
    attention_share: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a step. `forwards` and `backwards` of attention are calls of its operator."""

    micro_batches: int
    layers: int
    ffn: int
    forwards: int
    backwards: int
    again: Again


def count(linked: Linked, placed: Placed, shapes: Shapes, steps: TracedSteps) -> Counts:
    calls: Counter[tuple[str, str]] = Counter()
    for at, one in placed.weighed.items():
        calls[placed.part[at], one.of] += 1
    n = len(steps.steps)
    attended = _attention_calls(linked, placed, n)
    forwards, backwards, _ = attended
    micros = _micro_batches(linked, placed, shapes, steps)
    passes = backwards or calls[parts.OUT, "weights"] / n
    passes = passes or forwards or calls[parts.OUT, "forward"] / n
    layers = round(passes / max(1, micros))
    down = Counter(one.ins for at, one in placed.weighed.items() if placed.part[at] == parts.DOWN)
    ffn = down.most_common(1)[0][0] if down else 0
    return Counts(
        micro_batches=micros,
        layers=layers,
        ffn=ffn,
        forwards=forwards,
        backwards=backwards,
        again=_again(linked, placed, attended, n),
    )


def _micro_batches(linked: Linked, placed: Placed, shapes: Shapes, steps: TracedSteps) -> int:
    """Rows that the head multiplied against the tokens of a micro batch; on a pipeline's other
    stages, tokens that were looked up."""
    rows = sum(
        one.product.m
        for at, one in placed.weighed.items()
        if placed.part[at] == parts.HEAD and one.of == "forward"
    )
    return max(
        1, round((rows or _looked_up(linked, steps)) / len(steps.steps) / max(1, shapes.tokens))
    )


def _looked_up(linked: Linked, steps: TracedSteps) -> int:
    ops, texts = linked.trace.ops, linked.trace.texts
    wanted = [number for number, text in enumerate(texts) if text == "aten::embedding"]
    rows = 0
    for at in np.flatnonzero(np.isin(ops.name, wanted)):
        inside = any(begin <= ops.start[at] < end for begin, end in (s.host for s in steps.steps))
        dims = linked.parsed(int(ops.shape[at])) if inside else ()
        rows += math.prod(dims[1]) if len(dims) >= 2 else 0
    return rows


def _attention_calls(linked: Linked, placed: Placed, n: int) -> tuple[int, int, float]:
    """Of a step: calls forwards and backwards, and seconds of those forwards."""
    spent = 0.0
    ops: dict[bool, set[int]] = {True: set(), False: set()}
    for at, part in placed.part.items():
        if part == parts.ATTENTION:
            op, kernel = linked.op_name(at).lower(), linked.kernel_name(at).lower()
            back = "backward" in op or "bwd" in kernel or "bprop" in kernel
            spent += 0.0 if back else float(linked.kernels.seconds[at])
            if linked.op[at] >= 0:
                ops[back].add(int(linked.op[at]))
    return round(len(ops[False]) / n), round(len(ops[True]) / n), spent / n


def _again(linked: Linked, placed: Placed, attended: tuple[int, int, float], n: int) -> Again:
    """A weight has as many forward products as gradients unless some are computed again; attention
    likewise. Of what is done over memory the forward share goes with them."""
    seconds: dict[str, float] = defaultdict(float)
    by_weight: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for at, one in placed.weighed.items():
        part, ins, outs = placed.part[at], one.ins, one.outs
        if part == parts.EXPERTS:  # which way they go is not known
            ins, outs = sorted((ins, outs))
        passes = by_weight.setdefault((part, ins, outs), defaultdict(list))
        passes[one.of].append(float(linked.kernels.seconds[at]))
    shares = []
    for (part, _, _), passes in by_weight.items():
        forward, weights = passes.get("forward", []), passes.get("weights", [])
        if part == parts.HEAD or not weights or not forward:
            continue
        needed = (2 if part == parts.EXPERTS else 1) * len(weights)
        more = max(0.0, len(forward) - needed)
        seconds[part] += more * sum(forward) / len(forward) / n
        shares.append((sum(forward), min(1.0, more / len(weights))))
    forwards, backwards, spent = attended
    core = max(0, forwards - backwards) if backwards else 0
    if core:
        seconds[parts.ATTENTION] += spent * core / forwards
    known = sum(weight for weight, _ in shares)
    share = sum(weight * one for weight, one in shares) / known if known else 0.0
    if share > 0.05:
        seconds[parts.ELEMENTWISE] += _elementwise_again_s(linked, placed, share) / n
    core_share = core / backwards if backwards else 0.0
    return Again({part: s for part, s in seconds.items() if s > 0}, share, core_share)


def _elementwise_again_s(linked: Linked, placed: Placed, share: float) -> float:
    """Kernels of the backward pass that the forward pass has by the same name, at most the share of
    the forward pass: autograd launches from a thread of its own, and what is fused with gradients
    costs little more."""
    threads: Counter[int] = Counter()
    for at, one in placed.weighed.items():
        if one.of == "forward" and placed.part[at] == parts.HEAD:
            threads[int(linked.thread[at])] += 1
    main = threads.most_common(1)[0][0] if threads else None
    spent: dict[bool, dict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
    for at, part in placed.part.items():
        if part == parts.ELEMENTWISE:
            name = linked.kernel_name(at).rstrip("_0123456789")
            spent[bool(linked.thread[at] == main)][name] += float(linked.kernels.seconds[at])
    forward = sum(spent[True].values())
    alike = sum(s for name, s in spent[False].items() if name in spent[True])
    return min(share * forward, alike)
