"""Why a step takes longer than it should: seconds outside of what is expected, each with a cause,
its evidence and a remedy; the largest first.

Uneven experts: grouped products of one shape that do not take the same time.

Causes in which the device waits: data, synchronisations, memory, launches, the host itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.traces import parts
from fourfold.traces.cause import (
    LEAST_SHARE,
    Cause,
    TraceCase,
    attention,
    clock,
    fp32,
    ratio,
    recompute,
    uncompiled,
)
from fourfold.traces.linked import Linked
from fourfold.traces.placing import Placed


def data(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.DATA)
    per = f"{1e3 * spent:.0f} ms a step before its first kernel, with an idle host"
    yield Cause(
        "data loader", spent, 0.9 * spent, spent, "measured", per,
        "load ahead: more workers, prefetch, pinned memory, tokenise beforehand", "loader=0",
        (parts.DATA,),
    )  # fmt: skip


def sync(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.SYNC)
    calls, ops = _sync_callers(case)
    where = f", called by {ops}" if ops else ""
    yield Cause(
        "synchronisation", spent, 0.6 * spent, spent, "measured",
        f"{calls} a step{where}; afterwards the device waits for new launches",
        "take .item(), .cpu(), nonzero and synchronize() out of the step", "sync=0",
        (parts.SYNC,),
    )  # fmt: skip


def _sync_callers(case: TraceCase) -> tuple[str, str]:
    gaps = [g for t in case.run.times for g in t.gaps if g.part == parts.SYNC]
    named = Counter(gap.what for gap in gaps)
    if not named:
        return "0 calls", ""
    call, _ = named.most_common(1)[0]
    trace = case.run.linked.trace
    code = trace.texts.index(call) if call in trace.texts else -1
    inside = np.zeros(len(trace.calls), bool)
    for step in case.run.times:
        inside |= (trace.calls.end > step.spans[0].start) & (trace.calls.start < step.spans[-1].end)
    made = np.flatnonzero((trace.calls.name == code) & inside)
    count = round(len(made) / max(1, len(case.run.times)))
    owners: Counter[str] = Counter()
    place = {int(e): i for i, e in enumerate(trace.ops.external)}
    for at in made:
        op = place.get(int(trace.calls.external[at]))
        if op is not None:
            owners[trace.texts[trace.ops.name[op]]] += 1
    return f"{count} {call}", owners.most_common(1)[0][0] if owners else ""


def memory(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.MEMORY)
    names = Counter(g.what for t in case.run.times for g in t.gaps if g.part == parts.MEMORY)
    call = names.most_common(1)[0][0] if names else ""
    yield Cause(
        "cache flushes", spent, 0.7 * spent, spent, "measured",
        f"{call} in the step: the allocator gives memory back and takes it again",
        "no empty_cache() in the step; more free memory, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "flush=0", (parts.MEMORY,),
    )  # fmt: skip


def launches(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.LAUNCHES)
    busy = case.spent(*parts.COMPUTE)
    each = busy / max(1.0, case.run.kernels)
    tokens = case.run.shapes.tokens
    tiny = each < 60e-6
    name = "launch-bound: tiny work" if tiny else "launch-bound"
    evidence = (
        f"{case.run.kernels:,.0f} kernels of {1e6 * each:.0f} us a step; the device waits for the "
        f"host; micro batches of {tokens:,} tokens"
    )
    graph = "CUDA graphs" if case.run.value("compile") else "torch.compile, CUDA graphs"
    remedy = f"larger micro batches, {graph}" if tiny else f"{graph}, fewer and larger kernels"
    yield Cause(name, spent, 0.7 * spent, spent, "measured", evidence, remedy, "launches=0",
                (parts.LAUNCHES,))  # fmt: skip


def outside(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.OUTSIDE)
    if case.run.linked.on_host:
        return
    yield Cause(
        "host outside of torch", spent, 0.7 * spent, spent, "measured",
        "the device waits while the host runs neither operators nor calls of the driver",
        "look for Python work in the loop: logging, garbage collection, checkpoints", "host=0",
        (parts.OUTSIDE,),
    )  # fmt: skip


# The share of calls (the fastest) that stand for even routing: layers differ, and some are near it.
_EVEN_QUANTILE = 0.10
# Equal work varies by less.
_NOISE = 0.06


@dataclass(frozen=True, slots=True)
class Imbalance:
    """`seconds` of a step beyond what all calls would take at the speed of the most even ones."""

    seconds: float
    fastest_ms: float
    slowest_ms: float


def expert_imbalance(linked: Linked, placed: Placed, steps: int) -> Imbalance | None:
    groups: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for at, one in placed.weighed.items():
        if placed.part[at] == parts.EXPERTS:
            p = one.product
            groups[p.m, p.n, p.k, p.groups].append(float(linked.kernels.seconds[at]))
    many = {key: np.array(seconds) for key, seconds in groups.items() if len(seconds) >= 4}
    if not many:
        return None
    lost, spread = 0.0, (0.0, 0.0, 0.0)
    for seconds in many.values():
        even = float(np.quantile(seconds, _EVEN_QUANTILE))
        lost += float(np.maximum(seconds - even, 0.0).sum()) / steps
        ratio = float(seconds.max()) / even
        spread = max(spread, (ratio, 1e3 * float(seconds.min()), 1e3 * float(seconds.max())))
    if spread[0] < 1.0 + _NOISE:
        return None
    return Imbalance(lost, spread[1], spread[2])


def find_causes(case: TraceCase) -> list[Cause]:
    least = LEAST_SHARE * case.step_s
    found = [cause for look in _LOOKS for cause in look(case) if cause.seconds > least]
    return sorted(found, key=lambda cause: -cause.seconds)


def _communication(case: TraceCase) -> Iterator[Cause]:
    for name, shown in case.measured.items():
        if not name.startswith(parts.COMMUNICATION):
            continue
        axis = name.removeprefix(parts.COMMUNICATION)
        moved = sum(t.moved.get(name, 0.0) for t in case.run.times) / len(case.run.times)
        hidden = 100.0 * max(0.0, 1.0 - shown / moved) if moved else 0.0
        over = shown - (case.expected.parts[name].mid if name in case.expected.parts else 0.0)
        yield Cause(
            f"exposed communication: {axis}", over, 0.3 * over, over, "measured",
            f"{1e3 * moved:.0f} ms of collectives, {hidden:.0f}% of them beside computation",
            _COMM_REMEDY.get(axis, "overlap it with computation, or use fewer ranks of this axis"),
            f"{axis}_comm=0", (name,),
        )  # fmt: skip


_COMM_REMEDY = {
    "dp": "prefetch weights, reduce in larger buckets, accumulate more micro batches a step",
    "tp": "fewer tensor ranks, within one host; overlap with products (async TP)",
    "ep": "experts within a host, a fused dispatcher, overlap with another micro batch",
    "pp": "more micro batches, interleaved stages",
}


def _imbalance(case: TraceCase) -> Iterator[Cause]:
    found = expert_imbalance(case.run.linked, case.run.placed, len(case.run.times))
    if found is None:
        return
    over = found.seconds
    yield Cause(
        "imbalance of experts", over, 0.7 * over, 1.3 * over, "measured",
        f"grouped products of one shape take {found.fastest_ms:.2f} to {found.slowest_ms:.2f} ms "
        f"from layer to layer; their shapes are the same, so their tokens are spread unevenly",
        "balance the router (auxiliary loss or bias), or a capacity; forced routing is the bound",
        "routing=even", (parts.EXPERTS,),
    )  # fmt: skip


def _slow_experts(case: TraceCase) -> Iterator[Cause]:
    for name, what, remedy in (
        (
            parts.ROUTING,
            "routing of tokens to experts",
            "fused permutation, fewer copies and casts",
        ),
        (parts.OPTIMIZER, "slow optimizer", "fused AdamW, one flat buffer, compiled update"),
    ):
        if case.is_outside(name):
            over = case.over(name)
            slow = ratio(case, (name,))
            yield Cause(what, over, 0.5 * over, 1.2 * over, "likely",
                        f"{slow:.1f} times what is expected", remedy, f"{name.split(',')[0]}=1",
                        (name,))  # fmt: skip


_LOOKS: tuple[Callable[[TraceCase], Iterator[Cause]], ...] = (
    data, sync, memory, launches, outside, fp32,
    clock, attention, uncompiled, recompute,
    _communication, _imbalance, _slow_experts,
)  # fmt: skip
