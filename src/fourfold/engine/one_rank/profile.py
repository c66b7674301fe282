"""Device seconds of a forward and a backward pass by kind of work, from torch's profiler."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.phases import phase_of
from fourfold.engine.one_rank.fake_peers import FILL

PARTS = ("matrix products", "attention", "norms and element-wise", "copies and casts", "fills")
_PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "matmul",
    "linear",
    "addmv",
    "mv",
    "_grouped_mm",
    "_scaled_grouped_mm",
)
_COPIES = (
    "copy_",
    "_to_copy",
    "cat",
    "stack",
    "clone",
    "contiguous",
    "split_with_sizes_copy",
    "chunk_cat",
    "_chunk_cat",
    "fill_",
    "zero_",
    "slice_scatter",
    "all_gather_copy_in",
)


def kind_of(name: str) -> str:
    """The part an operator belongs to; what is nothing else is element-wise."""
    space, _, op = name.rpartition("::")
    if op in _PRODUCTS:
        return "matrix products"
    if "attention" in op:
        return "attention"
    if op in _COPIES or space == "fsdp" or op.startswith(("Memcpy", "Memset")):
        return "copies and casts"
    return "norms and element-wise"


@dataclass(slots=True)
class MicroBatchProfiler:
    """Told of every phase of a step, it watches the second to last forward and what follows it
    until a backward is over. `forwards` are those of the step. The profiler slows the host, so idle
    time is what the unprofiled micro batch takes beyond this."""

    device: torch.device
    forwards: int
    begun: int = 0
    turned: int = 0
    watched: int = 0
    refusal: str = ""
    _open: profile | None = None
    _seen: profile | None = None

    def note(self, name: str) -> None:
        phase = phase_of(name)
        self.begun += phase == "embed"
        if self._open is None:
            if self._seen is None and phase == "embed" and self.begun >= self.forwards - 1:
                self._begin()
            return
        self.turned += phase == "embed back"
        if self.turned and phase in ("embed", "head back", "reduce"):
            self.watched = self.begun - max(1, self.forwards - 1) + (phase != "embed")
            self._end()

    def warm_up(self) -> None:
        """A first start takes a second, in which a device cools and gets faster than in a long run.
        Later ones take milliseconds."""
        self._begin()
        if self._open is not None:
            self._open.stop()
            self._open = None

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        synchronize(self.device)
        profiler = profile(activities=activities)
        try:
            profiler.start()
        except RuntimeError as error:  # a driver may keep its counters to itself: told, not fatal
            self.refusal, self.forwards = f"no profile: {error}", 2**62
            return
        self._open = profiler

    def _end(self) -> None:
        assert self._open is not None
        synchronize(self.device)
        self._open.stop()
        self._open, self._seen = None, self._open

    def parts(self) -> dict[str, float]:
        """Seconds by part; empty when the window never closed or the device told nothing."""
        inner = self._seen.profiler if self._seen is not None else None
        if inner is None or inner.kineto_results is None:
            return {}
        events = list(inner.kineto_results.events())
        part_ns = _on_device(events) if self.device.type == "cuda" else _on_host(events)
        return {name: part_ns.get(name, 0.0) / 1e9 for name in PARTS} if part_ns else {}


def _part_of(events: Sequence[Any]) -> Callable[[Any], str]:
    """The part that an operator of the host belongs to, by its name or by the fill it is in."""
    fills: dict[int, list[tuple[int, int]]] = {}
    named = [e for e in events if e.name() == FILL and e.device_type() == DeviceType.CPU]
    for event in sorted(named, key=lambda event: event.start_ns()):
        begin = event.start_ns()
        fills.setdefault(event.start_thread_id(), []).append((begin, begin + event.duration_ns()))

    def part(event: Any) -> str:
        spans, at = fills.get(event.start_thread_id(), []), event.start_ns()
        place = bisect.bisect_right(spans, at, key=lambda span: span[0]) - 1
        return "fills" if place >= 0 and at < spans[place][1] else kind_of(event.name())

    return part


def _on_device(events: Sequence[Any]) -> dict[str, float]:
    """Nanoseconds by part: kernels by the operator that launched them. An instant belongs to the
    most important kernel that runs in it, so that what runs beside costs nothing."""
    part_of = _part_of(events)
    launched: dict[int, str] = {}
    for event in events:
        if event.device_type() != DeviceType.CPU:
            continue
        # The driver's own calls (cudaLaunchKernel) are numbered apart from operators.
        if not event.linked_correlation_id() and not event.name().startswith("cu"):
            launched[event.correlation_id()] = part_of(event)
    edges: list[tuple[int, int, str]] = []
    for event in events:
        # Ranges that the host named are drawn on the device's track too: no kernels. (Kernels of
        # torch.compile have the name of the host's call as well.)
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        kind = launched.get(event.linked_correlation_id()) or kind_of(event.name())
        begin = event.start_ns()
        edges += [(begin, 1, kind), (begin + event.duration_ns(), -1, kind)]
    return _swept(edges)


def _swept(edges: list[tuple[int, int, str]]) -> dict[str, float]:
    running, part_ns, at = dict.fromkeys(PARTS, 0), {}, 0
    for instant, change, kind in sorted(edges):
        top = next((name for name in PARTS if running[name]), None)
        if top is not None:
            part_ns[top] = part_ns.get(top, 0.0) + instant - at
        running[kind] += change
        at = instant
    return part_ns


def _on_host(events: Sequence[Any]) -> dict[str, float]:
    """Nanoseconds by part: each operator's own, without those it calls, down to aten's."""
    part_of = _part_of(events)
    part_ns: dict[str, float] = {}
    inner: dict[int, list[tuple[int, str]]] = {}  # by thread: (end, part) of what is open
    named = ("aten::", "fsdp::")
    spans = [e for e in events if e.device_type() == DeviceType.CPU and e.name().startswith(named)]
    for event in sorted(spans, key=lambda event: (event.start_ns(), -event.duration_ns())):
        thread, begin, lasts = event.start_thread_id(), event.start_ns(), event.duration_ns()
        stack = inner.setdefault(thread, [])
        while stack and stack[-1][0] <= begin:
            stack.pop()
        part = part_of(event)
        if stack:
            part_ns[stack[-1][1]] = part_ns.get(stack[-1][1], 0.0) - lasts
        part_ns[part] = part_ns.get(part, 0.0) + lasts
        stack.append((begin + lasts, part))
    return part_ns
