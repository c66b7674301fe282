"""Kernels of a CUDA graph: no operator launches them, so no trace has their shapes. What is known
of the run stands for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fourfold.spec.run import RunSpec
from fourfold.traces.counted import Counts
from fourfold.traces.linked import Linked
from fourfold.traces.settings import Setting
from fourfold.traces.shapes import Shapes
from fourfold.traces.steps import TracedSteps


def is_graphed(linked: Linked, steps: TracedSteps) -> bool:
    """Whether most of the device's time is a graph's."""
    launches = [i for i, text in enumerate(linked.trace.texts) if "GraphLaunch" in text]
    if not launches or not len(linked.trace.calls):
        return False
    kernels = np.array(steps.kernels)
    call, seconds = linked.call[kernels], linked.kernels.seconds[kernels]
    by_graph = (call >= 0) & np.isin(linked.trace.calls.name[np.maximum(call, 0)], launches)
    return bool(seconds[by_graph].sum() > 0.5 * seconds.sum())


def said(spec: RunSpec | None) -> Setting:
    evidence = "cudaGraphLaunch starts most kernels"
    doubt = "a graph's kernels have no shapes in a trace: give --spec or a --log"
    return Setting("launched", "CUDA graphs", evidence, "" if spec else doubt)


def sizes_of(spec: RunSpec, shapes: Shapes, counts: Counts) -> tuple[Shapes, Counts]:
    """Of one rank, as its shapes would have told."""
    model, layout, batch = spec.model, spec.layout, spec.batch
    length = batch.seq_len // layout.cp
    tokens, micros = batch.micro_batch * length, batch.micro_count(layout.dp)
    layers = model.layers // layout.pp
    known = replace(
        shapes, tokens=tokens, sequences=batch.micro_batch, length=length,
        hidden=model.hidden, vocab=model.vocab // layout.tp, experts=model.experts // layout.ep,
        expert_rows=tokens * model.top_k, expert_ffn=model.moe.ffn if model.moe else 0,
    )  # fmt: skip
    calls = micros * layers
    return known, replace(
        counts, micro_batches=micros, layers=layers, forwards=calls, backwards=calls
    )
