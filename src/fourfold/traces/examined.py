"""One rank's trace, read and understood: steps, parts, settings; without any expectation.

Kernels of a CUDA graph: no operator launches them, so no trace has their shapes. What is known
of the run stands for them.

The traced run as a RunSpec, from its settings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fourfold import files
from fourfold.errors import UserError
from fourfold.files import refused
from fourfold.result.trace import TRACE_KEY, TracedRun
from fourfold.spec import ModelShape, RunSpec, catalog, check, codec
from fourfold.spec.layout import AXES, EXPERT_AXES
from fourfold.traces.counted import Counts, count
from fourfold.traces.events import Trace, read_chrome
from fourfold.traces.host import HostCalls, TracedTimes, step_times
from fourfold.traces.linked import Linked, TracedSteps, find_steps, link
from fourfold.traces.nsys import SQLITE_MAGIC, read_nsys
from fourfold.traces.placing import Placed, place
from fourfold.traces.scope import (
    TRANSFORMER,
    lookups_of,
    missing_kinds,
    readable_settings,
    without_training,
    without_weights,
)
from fourfold.traces.settings import Setting, infer, preset_of, shards_weights, whole_sizes
from fourfold.traces.shapes import Shapes, shapes_of

NEEDED = ("hidden", "heads", "vocab", "layers", "seq_len", "micro_batch")


def run_of(settings: dict[str, Setting]) -> RunSpec | None:
    """None where the trace says too little of the model."""
    if any(name not in settings for name in NEEDED):
        return None
    value = {name: one.value for name, one in settings.items()}
    try:
        shape = model_of(settings)
        sizes = {axis: value.get(axis, 1) for axis in (*AXES, *EXPERT_AXES)}
        accumulated = value.get("micro_batches", 1) * value["micro_batch"]
        table: dict[str, Any] = {
            "model": codec.encode(shape),
            "gpus": value.get("gpus", 1),
            "layout": sizes,
            "batch": {
                "seq_len": value["seq_len"] * sizes["cp"],
                "micro_batch": value["micro_batch"],
                "global_batch": accumulated * sizes["dp"],
            },
            "policy": _policy(value),
        }
        return codec.load(RunSpec, table)
    except UserError:
        return None


def _policy(value: dict[str, Any]) -> dict[str, Any]:
    precision = value.get("precision", "bf16")
    weights = value.get("weights", "fp32")
    usual = "bf16-pure" if weights == "bf16" else "bf16-mixed"
    named = {"fp32": "fp32", "fp16": "fp16-mixed"}
    policy: dict[str, Any] = {"compile": bool(value.get("compile"))}
    policy["precision"] = named.get(precision, usual)
    if precision == "fp8":
        policy["compute_dtype"] = "fp8"
    policy["recompute"] = value.get("recompute", "none")
    if value.get("sharding"):
        policy["sharding"] = value["sharding"]
    elif shards_weights(value.get("engine", "")) and value.get("dp", 1) > 1:
        policy["sharding"] = "zero3"
    return policy


def model_of(settings: dict[str, Setting]) -> ModelShape:
    """The preset it resembles, cut to its layers; else a plain decoder of these sizes."""
    value = {name: one.value for name, one in settings.items()}
    sizes: dict[str, Any] = dict(whole_sizes(settings))
    preset, _ = preset_of(settings)
    if preset:
        shape = catalog.model(preset)
        return replace(shape, layers=sizes["layers"], tied=value.get("tied", shape.tied))
    moe = {"ffn": sizes.pop("expert_ffn", 0) or sizes["hidden"]}
    usual = {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"]}
    other = {"head_dim": value.get("head_dim"), "tied": bool(value.get("tied")), "name": "traced"}
    sizes = usual | sizes | other
    if "experts" in sizes:
        return catalog.shape("mixtral", **sizes, top_k=value["top_k"], moe=moe)
    return catalog.shape("llama", **sizes)


def is_graphed(linked: Linked, steps: TracedSteps) -> bool:
    """Whether most of the device's time is a graph's."""
    launches = [i for i, text in enumerate(linked.trace.texts) if "GraphLaunch" in text]
    if not launches or not len(linked.trace.calls):
        return False
    kernels = np.array(steps.kernels)
    call, seconds = linked.call[kernels], linked.kernels.seconds[kernels]
    by_graph = (call >= 0) & np.isin(linked.trace.calls.name[np.maximum(call, 0)], launches)
    return bool(seconds[by_graph].sum() > 0.5 * seconds.sum())


def graph_setting(spec: RunSpec | None) -> Setting:
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
        shapes,
        tokens=tokens,
        sequences=batch.micro_batch,
        length=length,
        hidden=model.hidden,
        vocab=model.vocab // layout.tp,
        experts=model.experts // layout.ep,
        expert_rows=tokens * model.top_k,
        expert_ffn=model.moe.ffn if model.moe else 0,
    )
    calls = micros * layers
    return known, replace(
        counts, micro_batches=micros, layers=layers, forwards=calls, backwards=calls
    )


_ENDINGS = (".json", ".json.gz", ".gz", ".sqlite", ".pt.trace.json")


@dataclass(frozen=True, eq=False)
class Examined:
    """`shapes` and `counts` of a graphed run are those of `spec`, where it is known. `lacks`: what
    its steps do not have of a transformer's training."""

    linked: Linked
    steps: TracedSteps
    shapes: Shapes
    placed: Placed
    counts: Counts
    settings: dict[str, Setting]
    spec: RunSpec | None
    times: tuple[TracedTimes, ...]
    is_graphed: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        return self.linked.trace.rank

    @property
    def kernels(self) -> float:
        """Of a step."""
        return len(self.placed.part) / len(self.times)

    def value(self, name: str, default: Any = None) -> Any:
        return self.settings[name].value if name in self.settings else default

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of a step, which they add up to."""
        steps = [one.parts for one in self.times]
        names = sorted({name for one in steps for name in one})
        return {name: sum(one.get(name, 0.0) for one in steps) / len(steps) for name in names}


def trace_files(names: list[str]) -> list[Path]:
    """Files as they are; of a folder, the traces in it."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.name.endswith(_ENDINGS))
            rule = "is a folder without traces (.json, .json.gz or .sqlite)"
            check.that(inside, "trace", name, rule)
            found += inside
        else:
            found.append(path)
    return found


def read_trace(path: Path) -> Trace:
    try:
        with files.open_regular(path, field="trace") as stream:
            magic = stream.read(16)
    except OSError as error:
        raise refused(error, path, field="trace", verb="read") from None
    if magic.startswith(SQLITE_MAGIC):
        return read_nsys(path)
    check.that(magic, "trace", str(path), "is empty", "profile again")
    return read_chrome(path)


def examine(trace: Trace) -> Examined:
    linked = link(trace)
    steps = find_steps(linked)
    shapes = shapes_of(linked, steps.kernels)
    placed = place(linked, shapes, steps)
    counts = count(linked, placed, shapes, steps)
    settings = infer(linked, placed, shapes, counts, len(steps.steps))
    told = _told(trace)
    for name, value in _told_settings(told.spec).items() if told else ():
        old, by = settings.get(name), "the trace says so"
        settings[name] = old.overruled(value, by) if old else Setting(name, value, by)
    lacks = () if told else missing_kinds(linked, placed)
    if lacks:
        counts, lookups = without_training(counts), lookups_of(linked, steps)
        placed = without_weights(placed) if TRANSFORMER in lacks else placed
        settings = readable_settings(settings, lacks, shapes=shapes, counts=counts, lookups=lookups)
    spec = told.spec if told else None if lacks else run_of(settings)
    host = HostCalls(linked)
    times = tuple(step_times(linked, placed.part, step, host) for step in steps.steps)
    graphed = is_graphed(linked, steps)
    return Examined(linked, steps, shapes, placed, counts, settings, spec, times, graphed, lacks)


def _told(trace: Trace) -> TracedRun | None:
    """What our own engine wrote of its run."""
    plain = trace.meta.get(TRACE_KEY)
    if not isinstance(plain, dict):
        return None
    try:
        return codec.decode(TracedRun, plain)
    except UserError:  # of a newer release
        return None


def _told_settings(spec: RunSpec) -> dict[str, Any]:
    policy, model = spec.policy, spec.model
    told = {"weights": policy.dtypes.param, "sharding": policy.sharding, "compile": policy.compile}
    if model.moe:  # not every way to compute them shows in a trace
        told |= {"experts": model.experts // spec.layout.ep, "top_k": model.top_k}
    return told | {"tied": model.tied}
