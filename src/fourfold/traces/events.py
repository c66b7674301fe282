"""A trace as columns: kernels, calls of the driver, operators and marks of the host."""

from __future__ import annotations

import gc
from array import array
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import UserError
from fourfold.traces.chrome import ChromeReader
from fourfold.traces.parts import NAMES

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_KINDS, PRODUCT_OPS = NAMES["categories"], NAMES["products"]
_NUMBERS = {int, float}
_NEVER_LAUNCH = frozenset(NAMES["names"]["never_launch"])
# Since 1970, to the year 2112: larger times leave no digits for the length of a kernel.
_MAX_TIME_US = float(2**52)
_MAX_DURATION_US = 1e12
# Real traces have millions of events, thousands of marks, and some thousand names and shapes.
_MAX_EVENTS, _MAX_KEPT = 20_000_000, 8_000_000
_MAX_MARKS, _MAX_TEXTS = 1_000_000, 1_000_000
MAX_NAME_CHARS, _MAX_TEXT_CHARS = 4096, 256 * 2**20


class NamedRange(NamedTuple):
    """A range that the program named; seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Spans:
    """Columns of one kind of event, by start. Seconds; `name`, `shape`, `types` and `detail` (of a
    product its strides, of a collective its group) are numbers of texts; `external` and
    `correlation` link kernels, calls and operators; -1: none."""

    start: Floats
    end: Floats
    name: Ints
    thread: Ints
    external: Ints
    correlation: Ints
    shape: Ints
    types: Ints
    detail: Ints

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def seconds(self) -> Floats:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One rank. `texts`: names and shapes by number."""

    path: str
    meta: dict[str, Any]
    texts: list[str]
    kernels: Spans
    calls: Spans
    ops: Spans
    marks: tuple[NamedRange, ...]

    @property
    def rank(self) -> int:
        told = self.meta.get("fourfold") or self.meta.get("distributedInfo") or {}
        rank = told.get("rank", 0) if isinstance(told, dict) else 0
        return rank if isinstance(rank, int) else 0


@dataclass(slots=True)
class _Table:
    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    whole: array[int] = field(default_factory=lambda: array("q"))  # seven numbers of each event

    def spans(self, base: float) -> Spans:
        start = (np.frombuffer(self.start, dtype=np.float64) - base) / 1e6
        end = (np.frombuffer(self.end, dtype=np.float64) - base) / 1e6
        whole = np.frombuffer(self.whole, dtype=np.int64).reshape(-1, 7)
        order = np.argsort(start, kind="stable")
        columns = (np.ascontiguousarray(whole[order, i]) for i in range(7))
        return Spans(start[order], end[order], *columns)


class Builder:
    """Keeps of events what a diagnosis needs; times in microseconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers: dict[str, int] = {}
        self._tables = {kind: _Table() for kind in ("kernel", "call", "op")}
        self._marks: list[tuple[str, float, float]] = []
        self._number = self._numbers.setdefault  # (text, the next number) -> its number
        self._num_events = self._num_checked = self._num_chars = 0

    def add(self, events: list[dict[str, Any]]) -> None:
        """One loop without calls of its own: a large trace has millions of events."""
        kinds, mark, span = _KINDS, self.mark, self.span
        for event in events:
            if event.get("ph") != "X":
                continue
            cat = str(event.get("cat"))
            kind = kinds.get(cat) or kinds.get(cat.lower())
            name = event.get("name")
            if type(name) is not str:
                name = str(name)[:200]
            if kind is None or name in _NEVER_LAUNCH:
                continue
            if len(name) > MAX_NAME_CHARS:
                name = name[:MAX_NAME_CHARS]
            start: Any = event.get("ts")
            lasts: Any = event.get("dur", 0)
            if type(start) not in _NUMBERS or type(lasts) not in _NUMBERS:
                self._refuse(start if type(start) not in _NUMBERS else lasts)
            if kind == "mark":
                mark(name, start, lasts)
                continue
            args = event.get("args")
            thread = event.get("tid")
            span(kind, start, lasts, name, thread, args if type(args) is dict else {})
        self.count(len(events))

    def span(
        self, kind: str, start: float, lasts: float, name: str, thread: Any, args: dict[str, Any]
    ) -> None:
        table, number = self._tables[kind], self._number
        if not (-_MAX_TIME_US < start < _MAX_TIME_US and 0 <= lasts < _MAX_DURATION_US):
            self._refuse_time(start, lasts)
        table.start.append(start)
        table.end.append(start + lasts)
        shape = types = detail = -1
        if kind == "op":
            told = args.get("Input Dims")
            if told is not None:
                shape = number(repr(told), len(self._numbers))
            told = args.get("Input type")
            if told is not None:
                types = number(repr(told), len(self._numbers))
            told = args.get("Input Strides")
            if told is not None and name in PRODUCT_OPS:
                detail = number(repr(told), len(self._numbers))
        elif kind == "kernel" and ("Collective name" in args or "Process Group Name" in args):
            told = {key: args[key] for key in NAMES["names"]["of_collective"] if key in args}
            detail = number(repr(told), len(self._numbers))
        external, correlation = args.get("External id"), args.get("correlation")
        if type(external) is not int or type(correlation) is not int or type(thread) is not int:
            external = _whole(args.get("external id") if external is None else external)
            correlation = _whole(correlation)
            thread = thread if type(thread) is int else number(str(thread), len(self._numbers))
        whole = (number(name, len(self._numbers)), thread, external, correlation, shape, types)
        try:
            table.whole.extend((*whole, detail))
        except OverflowError:
            self._refuse(max(whole, key=abs))

    def _refuse(self, value: Any) -> NoReturn:
        self._refuse_rule(f"has an event with {str(value)[:40]!r} where a time or a number belongs")

    def _refuse_time(self, start: float, lasts: float) -> NoReturn:
        if lasts < 0:
            self._refuse_rule(f"has an event of negative duration ({str(lasts)[:40]} us)")
        self._refuse(lasts if -_MAX_TIME_US < start < _MAX_TIME_US else start)

    def _refuse_rule(self, rule: str, hint: str = "profile again") -> NoReturn:
        raise UserError(rule, field="trace", value=str(self.path), hint=hint)

    def count(self, num_events: int) -> None:
        """Count events that were read, kept or not; refuse more than memory should hold."""
        self._num_events += num_events
        texts = self._numbers
        new = islice(reversed(texts), len(texts) - self._num_checked)
        self._num_chars += sum(map(len, new))
        self._num_checked = len(texts)
        for number, limit, of in (
            (self._num_events, _MAX_EVENTS, "events"),
            (sum(len(t.start) for t in self._tables.values()), _MAX_KEPT, "kernels and operators"),
            (len(self._marks), _MAX_MARKS, "marks of the program"),
            (len(texts), _MAX_TEXTS, "different names and shapes"),
            (self._num_chars, _MAX_TEXT_CHARS, "letters in names and shapes"),
        ):
            if number > limit:
                self._refuse_rule(f"has over {limit:,} {of}", "profile fewer steps")

    def mark(self, name: str, start: float, lasts: float) -> None:
        if not (-_MAX_TIME_US < start < _MAX_TIME_US and 0 <= lasts < _MAX_DURATION_US):
            self._refuse_time(start, lasts)
        self._marks.append((name, start, start + lasts))

    def trace(self, meta: dict[str, Any]) -> Trace:
        tables = self._tables
        times = [np.frombuffer(t.start) for t in tables.values()]
        if not tables["kernel"].start and not tables["op"].start:
            rule = "has neither kernels nor operators of a profiler"
            self._refuse_rule(rule, "profile with activities CPU and CUDA")
        base = min(float(column.min()) for column in times if len(column))
        marks = sorted(self._marks, key=lambda mark: mark[1])
        return Trace(
            path=str(self.path),
            meta=meta,
            texts=list(self._numbers),
            kernels=tables["kernel"].spans(base),
            calls=tables["call"].spans(base),
            ops=tables["op"].spans(base),
            marks=tuple(
                NamedRange(name, (start - base) / 1e6, (end - base) / 1e6)
                for name, start, end in marks
            ),
        )


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62:
        return value
    if isinstance(value, str) and value.isdecimal() and len(value) < 18:
        return int(value)
    return -1


def read_chrome(path: Path) -> Trace:
    reader, builder = ChromeReader(path), Builder(path)
    was_on = gc.isenabled()
    gc.disable()  # looking for circles among millions of events takes as long as reading them
    try:
        for events in reader.events():
            builder.add(events)
    finally:
        if was_on:
            gc.enable()
    meta = reader.meta if isinstance(reader.meta, dict) else {}
    return builder.trace(meta)
