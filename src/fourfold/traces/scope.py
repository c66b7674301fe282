"""Whether the steps of a trace are of a kind that the planner expects: training of a transformer.
Of others, what the trace tells nevertheless."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.traces import parts
from fourfold.traces.counted import Again, Counts
from fourfold.traces.linked import Linked, TracedSteps
from fourfold.traces.placing import Placed
from fourfold.traces.settings import Setting
from fourfold.traces.shapes import Shapes

BACKWARD, TRANSFORMER = "backward pass", "transformer"
_TRAINING = parts.pattern("training")
_OF_ANY_NETWORK = frozenset(("gpu", "engine", "precision", "compile", "gpus", *AXES, *EXPERT_AXES))
_OF_TRAINING = frozenset(("tied", "micro_batch", "micro_batches", "recompute", "weights", "layers"))


def missing_kinds(linked: Linked, placed: Placed) -> tuple[str, ...]:
    """Return what the steps lack to be those of a transformer's training."""
    trace = linked.trace
    numbers = {
        int(number) for spans in (trace.ops, trace.kernels) for number in np.unique(spans.name)
    }
    names = [*(trace.texts[number] for number in numbers), *(mark.name for mark in trace.marks)]
    lacks = [] if any(map(_TRAINING.search, names)) else [BACKWARD]
    if parts.ATTENTION not in placed.part.values():
        lacks.append(TRANSFORMER)
    return tuple(lacks)


def without_training(counts: Counts) -> Counts:
    return replace(counts, again=Again({}, 0.0, 0.0))


def without_weights(placed: Placed) -> Placed:
    """Of a network without attention: its products are of no layer that has a name here."""
    names = dict.fromkeys(parts.PRODUCTS, parts.OTHER) | {parts.ROUTING: parts.ELEMENTWISE}
    return replace(placed, part={at: names.get(one, one) for at, one in placed.part.items()})


def readable_settings(
    settings: dict[str, Setting],
    lacks: tuple[str, ...],
    *,
    shapes: Shapes,
    counts: Counts,
    lookups: float,
) -> dict[str, Setting]:
    """Return the settings that hold although the steps lack something. `lookups`: of the embedding
    in a step, one in each forward pass."""
    if TRANSFORMER in lacks:
        return {name: one for name, one in settings.items() if name in _OF_ANY_NETWORK}
    found = {name: one for name, one in settings.items() if name not in _OF_TRAINING}
    if lookups:
        layers = max(1, round(counts.forwards / lookups))
        said = f"{counts.forwards} calls of attention in {lookups:g} forward passes"
        found["layers"] = Setting("layers", layers, said)
    if shapes.attention_shapes > 1:  # generation: each pass has a length of its own
        found.pop("seq_len", None)
    elif shapes.sequences:
        shape = f"{shapes.attention_op} of {shapes.sequences} sequences"
        found["sequences"] = Setting("sequences", shapes.sequences, shape)
    return found


def lookups_of(linked: Linked, steps: TracedSteps) -> float:
    """Return how often a step looks tokens up."""
    ops = linked.trace.ops
    numbers = [i for i, text in enumerate(linked.trace.texts) if text == "aten::embedding"]
    places = np.flatnonzero(np.isin(ops.name, numbers))
    starts = ops.start[places]
    spans = (step.host for step in steps.steps)
    return sum(int(((starts >= a) & (starts < b)).sum()) for a, b in spans) / len(steps.steps)
