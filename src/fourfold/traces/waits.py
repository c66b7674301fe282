"""Causes in which the device waits: data, synchronisations, memory, launches, the host itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from fourfold.traces import parts
from fourfold.traces.cause import Cause, TraceCase


def data(case: TraceCase) -> Iterator[Cause]:
    spent = case.measured.get(parts.DATA, 0.0)
    per = f"{1e3 * spent:.0f} ms a step before its first kernel, with an idle host"
    yield Cause(
        "data loader", spent, 0.9 * spent, spent, "measured", per,
        "load ahead: more workers, prefetch, pinned memory, tokenise beforehand", "loader=0",
        (parts.DATA,),
    )  # fmt: skip


def sync(case: TraceCase) -> Iterator[Cause]:
    spent = case.measured.get(parts.SYNC, 0.0)
    calls, ops = _sync_callers(case)
    where = f", called by {ops}" if ops else ""
    yield Cause(
        "synchronisation", spent, 0.6 * spent, spent, "measured",
        f"{calls} a step{where}; afterwards the device waits for new launches",
        "take .item(), .cpu(), nonzero and synchronize() out of the step", "sync=0",
        (parts.SYNC,),
    )  # fmt: skip


def _sync_callers(case: TraceCase) -> tuple[str, str]:
    gaps = [g for t in case.times for g in t.gaps if g.part == parts.SYNC]
    named = Counter(gap.what for gap in gaps)
    if not named:
        return "0 calls", ""
    call, _ = named.most_common(1)[0]
    trace = case.linked.trace
    code = trace.texts.index(call) if call in trace.texts else -1
    inside = np.zeros(len(trace.calls), bool)
    for step in case.times:
        inside |= (trace.calls.end > step.spans[0].start) & (trace.calls.start < step.spans[-1].end)
    made = np.flatnonzero((trace.calls.name == code) & inside)
    count = round(len(made) / max(1, len(case.times)))
    owners: Counter[str] = Counter()
    place = {int(e): i for i, e in enumerate(trace.ops.external)}
    for at in made:
        op = place.get(int(trace.calls.external[at]))
        if op is not None:
            owners[trace.texts[trace.ops.name[op]]] += 1
    return f"{count} {call}", owners.most_common(1)[0][0] if owners else ""


def memory(case: TraceCase) -> Iterator[Cause]:
    spent = case.measured.get(parts.MEMORY, 0.0)
    names = Counter(g.what for t in case.times for g in t.gaps if g.part == parts.MEMORY)
    call = names.most_common(1)[0][0] if names else ""
    yield Cause(
        "cache flushes", spent, 0.7 * spent, spent, "measured",
        f"{call} in the step: the allocator gives memory back and takes it again",
        "no empty_cache() in the step; more free memory, or "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "flush=0", (parts.MEMORY,),
    )  # fmt: skip


def launches(case: TraceCase) -> Iterator[Cause]:
    spent = case.measured.get(parts.LAUNCHES, 0.0)
    busy = sum(case.measured.get(name, 0.0) for name in parts.COMPUTE)
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
    spent = case.measured.get(parts.OUTSIDE, 0.0)
    if case.linked.on_host:
        return
    yield Cause(
        "host outside of torch", spent, 0.7 * spent, spent, "measured",
        "the device waits while the host runs neither operators nor calls of the driver",
        "look for Python work in the loop: logging, garbage collection, checkpoints", "host=0",
        (parts.OUTSIDE,),
    )  # fmt: skip
