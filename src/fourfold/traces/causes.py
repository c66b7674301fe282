"""Why a step takes longer than it should: seconds outside of what is expected, each with a cause,
its evidence and a remedy; the largest first.

Uneven experts: grouped GEMMs of one shape that do not take the same time.

Causes in which the device waits: data, synchronisations, memory, launches, the host itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from fourfold.traces import parts
from fourfold.traces.cause import (
    EXPOSED,
    LEAST_SHARE,
    Cause,
    TraceCase,
    attention,
    cause,
    clock,
    fp32,
    ratio,
    recompute,
    uncompiled,
)
from fourfold.traces.linked import Linked
from fourfold.traces.placing import UNKNOWN, Placed
from fourfold.units import counted


def data(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.DATA)
    if case.run.linked.on_host:
        per = f"{_no_operator(case, parts.DATA)}, where a batch begins"
    else:
        per = f"{1e3 * spent:.0f} ms a step before its first kernel, with an idle host"
    yield cause("data", spent, per, parts.DATA)


def _no_operator(case: TraceCase, part: str) -> str:
    """Where no operator of a run on cores runs, by what ends most of it."""
    waits: dict[str, list[float]] = defaultdict(list)
    for gap in (gap for step in case.run.times for gap in step.gaps if gap.part == part):
        waits[gap.what].append(gap.seconds)
    if not waits:
        return "no operator runs"
    where, longest = max(waits.items(), key=lambda item: sum(item[1]))
    each, steps = 1e3 * sum(longest) / len(longest), len(case.run.times)
    often = f"{counted(round(len(longest) / steps), 'time')} a step"
    if len(longest) < steps:
        often = f"in {len(longest)} of {counted(steps, 'step')}"
    return f"no operator runs for {each:.0f} ms {where}, {often}"


def sync(case: TraceCase) -> Iterator[Cause]:
    calls, ops = _sync_callers(case)
    where = f", called by {ops}" if ops else ""
    evidence = f"{calls} a step{where}; afterwards the device waits for new launches"
    yield cause("sync", case.spent(parts.SYNC), evidence, parts.SYNC)


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
    names = Counter(g.what for t in case.run.times for g in t.gaps if g.part == parts.MEMORY)
    call = names.most_common(1)[0][0] if names else ""
    evidence = f"{call} in the step: the allocator gives memory back and takes it again"
    yield cause("memory", case.spent(parts.MEMORY), evidence, parts.MEMORY)


def launches(case: TraceCase) -> Iterator[Cause]:
    spent = case.spent(parts.LAUNCHES)
    busy = case.spent(*parts.COMPUTE)
    each = busy / max(1.0, case.run.kernels)
    batches = "batches" if case.run.lacks else "micro batches"
    if case.run.linked.on_host:
        evidence = (
            f"{case.run.kernels:,.0f} operators of {1e6 * each:.0f} us a step; between them Python "
            "and the dispatcher"
        )
        compiler = "" if case.run.value("compile") else "torch.compile, "
        words = {"compiler": compiler, "batches": batches}
        yield cause("dispatch", spent, evidence, parts.LAUNCHES, **words)
        return
    tokens = case.run.shapes.tokens
    kind = "tiny" if each < 60e-6 else "launches"
    evidence = (
        f"{case.run.kernels:,.0f} kernels of {1e6 * each:.0f} us a step; the device waits for the "
        "host"
    )
    if tokens and not case.run.lacks:  # a trace without shapes does not tell
        evidence += f"; micro batches of {tokens:,} tokens"
    graph = "CUDA graphs" if case.run.value("compile") else "torch.compile, CUDA graphs"
    yield cause(kind, spent, evidence, parts.LAUNCHES, graph=graph, batches=batches)


def outside(case: TraceCase) -> Iterator[Cause]:
    evidence = "the device waits while the host runs neither operators nor calls of the driver"
    if case.run.linked.on_host:
        evidence = _no_operator(case, parts.OUTSIDE)
    yield cause("outside", case.spent(parts.OUTSIDE), evidence, parts.OUTSIDE)


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
    found = [one for look in _LOOKS for one in look(case) if one.seconds > least]
    return sorted(found, key=lambda one: -one.seconds)


def _communication(case: TraceCase) -> Iterator[Cause]:
    for name, shown in case.measured.items():
        if not name.startswith(parts.COMMUNICATION):
            continue
        axis = name.removeprefix(parts.COMMUNICATION)
        moved = sum(t.moved.get(name, 0.0) for t in case.run.times) / len(case.run.times)
        hidden = 100.0 * max(0.0, 1.0 - shown / moved) if moved else 0.0
        over = shown - (case.expected.parts[name].mid if name in case.expected.parts else 0.0)
        evidence = f"{1e3 * moved:.0f} ms of collectives, {hidden:.0f}% of them beside computation"
        if axis in (*parts.NAMES["collectives"], UNKNOWN):
            evidence += "; the trace does not name their process group"
        remedy = EXPOSED.get(axis, EXPOSED["other"])
        yield cause("communication", over, evidence, name, axis=axis, remedy=remedy)


def _imbalance(case: TraceCase) -> Iterator[Cause]:
    found = expert_imbalance(case.run.linked, case.run.placed, len(case.run.times))
    if found is None:
        return
    evidence = (
        f"grouped GEMMs of one shape take {found.fastest_ms:.2f} to {found.slowest_ms:.2f} ms "
        f"from layer to layer; their shapes are the same, so their tokens are spread unevenly"
    )
    yield cause("imbalance", found.seconds, evidence, parts.EXPERTS)


def _slow_experts(case: TraceCase) -> Iterator[Cause]:
    for name, kind in ((parts.ROUTING, "routing"), (parts.OPTIMIZER, "optimizer")):
        if case.is_outside(name):
            evidence = f"{ratio(case, (name,)):.1f} times what is expected"
            yield cause(kind, case.over(name), evidence, name)


_LOOKS: tuple[Callable[[TraceCase], Iterator[Cause]], ...] = (
    data,
    sync,
    memory,
    launches,
    outside,
    fp32,
    clock,
    attention,
    uncompiled,
    recompute,
    _communication,
    _imbalance,
    _slow_experts,
)
