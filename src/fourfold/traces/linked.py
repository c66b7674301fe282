"""Kernels with the operator and the call that launched them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fourfold.traces.events import Ints, Spans, Trace

Dims = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class Linked:
    """`op` and `call` of each kernel are places in the trace's operators and calls; -1: none. On a
    trace without kernels the host's own operators stand for them."""

    trace: Trace
    kernels: Spans
    op: Ints
    call: Ints
    on_host: bool = False
    _dims: dict[int, Dims] = field(default_factory=dict)

    def kernel_name(self, at: int) -> str:
        return self.trace.texts[self.kernels.name[at]]

    def op_name(self, at: int) -> str:
        place = self.op[at]
        return self.trace.texts[self.trace.ops.name[place]] if place >= 0 else ""

    def dims(self, at: int) -> Dims:
        """Shapes of the operator's inputs; of a list of tensors those inside it."""
        place = self.op[at]
        return self.parsed(int(self.trace.ops.shape[place])) if place >= 0 else ()

    def strides(self, at: int) -> Dims:
        place = self.op[at]
        return self.parsed(int(self.trace.ops.detail[place])) if place >= 0 else ()

    def types(self, at: int) -> tuple[str, ...]:
        place = self.op[at]
        told = self.trace.ops.types[place] if place >= 0 else -1
        return tuple(map(str, literal(self.trace.texts[told]))) if told >= 0 else ()

    def detail(self, at: int) -> dict[str, Any]:
        told = self.kernels.detail[at]
        found = ast.literal_eval(self.trace.texts[told]) if told >= 0 else {}
        return found if isinstance(found, dict) else {}

    def parsed(self, number: int) -> Dims:
        if number < 0:
            return ()
        if number not in self._dims:
            told = literal(self.trace.texts[number])
            self._dims[number] = tuple(_sizes(one) for one in told)
        return self._dims[number]

    @cached_property
    def launch_s(self) -> Any:
        """When the host launched each kernel; where nobody knows, when it began."""
        known = self.call >= 0
        told = self.trace.calls.start[np.where(known, self.call, 0)] if len(self.trace.calls) else 0
        return np.where(known, told, self.kernels.start)

    @cached_property
    def thread(self) -> Any:
        """Of the host that launched each kernel; -1: not known."""
        known = self.call >= 0
        told = (
            self.trace.calls.thread[np.where(known, self.call, 0)] if len(self.trace.calls) else 0
        )
        return np.where(known, told, -1)


def literal(text: str) -> list[Any]:
    """A list as Python writes it; a trace may hold anything in its place."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _sizes(one: Any) -> tuple[int, ...]:
    if not isinstance(one, list):
        return ()
    if one and isinstance(one[0], list):  # a list of tensors: the first stands for all
        return _sizes(one[0])
    return tuple(size for size in one if isinstance(size, int))


def link(trace: Trace) -> Linked:
    if not len(trace.kernels):
        return _host_link(trace)
    kernels, calls, ops = trace.kernels, trace.calls, trace.ops
    call = _places(calls.correlation, kernels.correlation)
    external = kernels.external.copy()
    lacks = (external < 0) & (call >= 0)
    external[lacks] = calls.external[call[lacks]]
    return Linked(trace, kernels, _places(ops.external, external), call)


def _places(keys: Ints, wanted: Ints) -> Ints:
    """Of each wanted key, where the last one like it is; -1 where none is."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], wanted, side="right") - 1
    found = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[found] == wanted) & (wanted >= 0), found, -1)


def _host_link(trace: Trace) -> Linked:
    """Of a run on cores: operators that call no other one, of every thread."""
    ops = trace.ops
    names = np.array([text.startswith("aten::") or "::" in text for text in trace.texts], bool)
    inner = np.flatnonzero(_leaves(ops) & names[ops.name])
    kernels = Spans(**{name: getattr(ops, name)[inner] for name in Spans.__annotations__})
    none = np.full(len(inner), -1)
    blank = Spans(kernels.start, kernels.end, kernels.name, kernels.thread, kernels.external,
                  none, none, none, none)  # fmt: skip
    return Linked(trace, blank, inner, none, on_host=True)


def _leaves(ops: Spans) -> Any:
    """Which have no operator inside: on the same thread the next one begins after they end."""
    leaf = np.ones(len(ops), bool)
    for thread in np.unique(ops.thread):
        own = np.flatnonzero(ops.thread == thread)
        leaf[own[:-1]] = ops.start[own[1:]] >= ops.end[own[:-1]]
    return leaf
