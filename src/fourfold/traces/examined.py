"""One rank's trace, read and understood: steps, parts, settings; without any expectation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.result.traces import TRACE_KEY, TracedRun
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.traces import graphs, parts
from fourfold.traces.chrome import GZIP_MAGIC
from fourfold.traces.counted import Counts, count
from fourfold.traces.events import Trace, read_chrome
from fourfold.traces.expect import Run
from fourfold.traces.host import HostCalls
from fourfold.traces.linked import Linked, link
from fourfold.traces.nsys import SQLITE_MAGIC, read_nsys
from fourfold.traces.placing import Placed, place
from fourfold.traces.run import run_of
from fourfold.traces.settings import Setting, infer
from fourfold.traces.shapes import Shapes, shapes_of
from fourfold.traces.steps import TracedSteps, find_steps
from fourfold.traces.timeline import TracedTimes, step_times

_ENDINGS = (".json", ".json.gz", ".gz", ".sqlite", ".pt.trace.json")
_PLAIN_ROUTING = ("indexing_backward", "_index_put_impl_", "index_put")


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """`parts`: mean seconds of a step, which they add up to. `moved`: of communication by axis,
    hidden or not."""

    linked: Linked
    steps: TracedSteps
    shapes: Shapes
    placed: Placed
    counts: Counts
    settings: dict[str, Setting]
    spec: RunSpec | None
    times: tuple[TracedTimes, ...]
    told: TracedRun | None
    is_graphed: bool = False

    @property
    def rank(self) -> int:
        return self.linked.trace.rank

    @property
    def parts(self) -> dict[str, float]:
        return self._mean([one.parts for one in self.times])

    @property
    def moved(self) -> dict[str, float]:
        return self._mean([one.moved for one in self.times])

    def _mean(self, steps: list[dict[str, float]]) -> dict[str, float]:
        names = sorted({name for one in steps for name in one})
        return {name: sum(one.get(name, 0.0) for one in steps) / len(steps) for name in names}

    @property
    def run(self) -> Run:
        shapes, counts = self.shapes, self.counts
        if self.is_graphed and self.spec is not None:
            shapes, counts = graphs.sizes_of(self.spec, shapes, counts)
        small = sum(part == parts.ELEMENTWISE for part in self.placed.part.values())
        texts = self.linked.trace.texts
        n = len(self.steps.steps)
        return Run(
            placed=self.placed,
            shapes=shapes,
            counts=counts,
            settings=self.settings,
            spec=self.spec,
            steps=n,
            kernels=len(self.placed.part) / n,
            small_kernels=small / n,
            plain_routing=any(word in text for text in texts for word in _PLAIN_ROUTING),
            is_graphed=self.is_graphed,
        )


def trace_files(names: list[str]) -> list[Path]:
    """Files as they are; of a folder, the traces in it."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(one for one in path.iterdir() if one.name.endswith(_ENDINGS))
            if not inside:
                rule = "is a folder without traces (.json, .json.gz or .sqlite)"
                raise UserError(rule, field="trace", value=name)
            found += inside
        else:
            found.append(path)
    return found


def read_trace(path: Path) -> Trace:
    try:
        with open(path, "rb") as stream:
            magic = stream.read(16)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        raise UserError(rule, field="trace", value=str(path), hint="check the path") from None
    if magic.startswith(SQLITE_MAGIC):
        return read_nsys(path)
    if not magic and not magic.startswith(GZIP_MAGIC):
        raise UserError("is empty", field="trace", value=str(path), hint="profile again")
    return read_chrome(path)


def examine(trace: Trace, overruled: dict[str, tuple[Any, str]] | None = None) -> Examined:
    """`overruled`: settings that are known better, by name, each with who says so."""
    linked = link(trace)
    steps = find_steps(linked)
    shapes = shapes_of(linked, steps.kernels)
    placed = place(linked, shapes, steps)
    counts = count(linked, placed, shapes, steps)
    settings = infer(linked, placed, shapes, counts, len(steps.steps))
    told = _told(trace)
    known = dict(_told_settings(told)) if told else {}
    for name, (value, by) in {**known, **(overruled or {})}.items():
        old = settings.get(name)
        settings[name] = old.overruled(value, by) if old else Setting(name, value, by)
    host = HostCalls(linked)
    times = tuple(step_times(linked, placed.part, step, host) for step in steps.steps)
    spec = told.spec if told else run_of(settings)
    graphed = graphs.is_graphed(linked, steps)
    return Examined(linked, steps, shapes, placed, counts, settings, spec, times, told, graphed)


def _told(trace: Trace) -> TracedRun | None:
    """What our own engine wrote of its run."""
    plain = trace.meta.get(TRACE_KEY)
    if not isinstance(plain, dict):
        return None
    try:
        return codec.decode(TracedRun, plain)
    except UserError:  # of a newer release
        return None


def _told_settings(told: TracedRun) -> list[tuple[str, tuple[Any, str]]]:
    policy, by = told.spec.policy, "the trace says so"
    return [
        ("weights", (policy.dtypes.param, by)),
        ("sharding", (policy.sharding, by)),
        ("compile", (policy.compile, by)),
        ("tied", (told.spec.model.tied, by)),
    ]


def with_spec(found: Examined, spec: RunSpec) -> Examined:
    return replace(found, spec=spec)
