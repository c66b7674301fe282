"""Births and deaths of storages in order, as an allocator sees them: who made each, in which module
and on which line, on which stream and in which phase it began and ended."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fourfold.cost.memory.allocator import RETURN_CACHE, StorageEvent, fit, replay, rounded
from fourfold.engine import compat, compat_modes
from fourfold.engine.observe.ledger import Allocation, Ledger
from fourfold.engine.observe.operators import workspace_bytes
from fourfold.result.one_rank import (
    AllocatorBytes,
    AllocatorFits,
    LiveTensor,
    MemoryKind,
    RankMemoryCount,
)

_LARGEST = 10
_BUILD = "build"
_COMMUNICATION = ("fsdp::", "c10d::", "_c10d_functional::")  # operators by whom buffers are made


class CodePlace(NamedTuple):
    """The innermost module that was running, and the innermost line of the engine's code. In a
    backward pass, those of the forward operator whose gradient is computed."""

    module: str
    line: str


@dataclass(slots=True)
class StorageRecord:
    """One storage from its birth to its death. `kind` is '' where nobody owned it; `place`: what
    made it; `born` and `died`: numbers of the marks before it began and ended (died None: it
    outlived the history)."""

    bytes: int
    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    stream: int
    place: CodePlace
    born: int
    died: int | None = None

    def live(self, kind: str, phase: str) -> LiveTensor:
        return LiveTensor(
            bytes=self.bytes,
            kind=kind,
            module=self.place.module,
            line=self.place.line,
            shape="x".join(map(str, self.shape)),
            dtype=self.dtype,
            op=self.op,
            phase=phase,
        )


class StorageLedger(Ledger):
    """A ledger that keeps its history. `packages`: folders of the engine's code, whose lines are
    noted. A tensor's number that no fake tensor knows is answered by 1, and counted."""

    def __init__(self, *packages: Path) -> None:
        self.history: list[StorageEvent] = []
        self.records: list[StorageRecord] = []
        # (number of the event, phase that begins there)
        self.marks: list[tuple[int, str]] = [(0, _BUILD)]
        self._first_event = 0
        self.modules = compat_modes.ModulePath()
        self.num_unknown_values = 0
        self._packages = tuple(f"{package}/" for package in packages)
        self._place_by_node: dict[int, CodePlace] = {}
        self._number_by_key: dict[int, int] = {}
        # Streams in the order they were first used; the first is the one that computes.
        self._streams: list[Any] = [torch.cpu.current_stream()]
        super().__init__()

    def begin(self) -> None:
        """Peaks are of what happens from here on; what is live stays."""
        super().begin()
        self._first_event = len(self.history)

    # What happens to storages.

    def mark(self, phase: str) -> None:
        self.marks.append((len(self.history), phase))
        super().mark(phase)

    def own(self, kind: str, tensor: Tensor) -> None:
        number = self._number_by_key.get(compat.storage_key(compat.local(tensor)))
        if number is not None:
            self.records[number].kind = kind
        super().own(kind, tensor)

    def _resize(self, allocation: Allocation, size: int) -> None:
        if (number := self._number_by_key.pop(allocation.key, None)) is not None:
            self._end(number)
        if size:
            kind = "" if allocation.kind == "activations" else allocation.kind
            self._number_by_key[allocation.key] = self._begin(
                size, kind, allocation.op, allocation.shape, allocation.dtype
            )
        super()._resize(allocation, size)

    def _begin(
        self, size: int, kind: str, op: str, shape: tuple[int, ...] = (), dtype: str = "uint8"
    ) -> int:
        number, stream = len(self.records), self._stream()
        self.records.append(
            StorageRecord(
                bytes=size,
                kind=kind,
                op=op,
                shape=shape,
                dtype=dtype,
                stream=stream,
                place=self._place(),
                born=len(self.marks) - 1,
            )
        )
        self.history.append(StorageEvent(number, size, stream))
        return number

    def _end(self, number: int) -> None:
        record = self.records[number]
        record.died = len(self.marks) - 1
        self.history.append(StorageEvent(number, record.bytes, record.stream, is_free=True))

    def hold(self, size: int, kind: str, op: str) -> None:
        """Note memory that a library keeps from here on, such as its workspace."""
        self._begin(size, kind, op)

    def empty_cache(self) -> None:
        """Note that the engine returns what it does not use to the driver."""
        self.history.append(RETURN_CACHE)

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()
        for number, known in enumerate(self._streams):
            if known is stream:
                return number
        self._streams.append(stream)
        return len(self._streams) - 1

    def _place(self) -> CodePlace:
        node = compat_modes.backward_number()
        module = str(self.modules)
        if node is not None and not module:  # modules run in a backward pass to recompute
            known = self._place_by_node.get(node)
            if known is not None:
                return known
        return CodePlace(module, self._line())

    def _line(self) -> str:
        """'torchtitan/train.py:577'."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self._packages):
                package = next(each for each in self._packages if name.startswith(each))
                begin = package.rindex("/", 0, -1) + 1
                return f"{name[begin:]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    # What operators do.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (value := compat_modes.unknown_value(func, args)) is not None:
            self.num_unknown_values += 1
            return value
        if not self._paused and torch.is_grad_enabled():
            # An operator that makes no node has the number of the one before.
            node = compat_modes.forward_number()
            if node not in self._place_by_node:
                self._place_by_node[node] = self._place()
        sizes = () if self._paused else workspace_bytes(func, args)
        for number in [self._begin(size, "workspace", compat.op_name(func)) for size in sizes]:
            self._end(number)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> StorageLedger:
        super().__enter__()
        self._patches.enter_context(self.modules.followed())
        return self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what is made is not on the GPU."""
        with self._not_counting():
            yield

    # What it comes to.

    def count(
        self, *, rank: int, stage: int, params: int, limit_bytes: int | None = None
    ) -> RankMemoryCount:
        """Return the memory of the rank since `begin`, and whether it fits into a limit."""
        peak_event, phases = self._peaks()
        live = self._live_at(peak_event)
        kinds: Counter[str] = Counter()
        for record in live:
            kinds[self._kind(record)] += record.bytes
        largest = sorted(live, key=lambda record: -record.bytes)[:_LARGEST]
        segments, expandable = (
            replay(self.history, begin=self._first_event, expandable_segments=is_expandable)
            for is_expandable in (False, True)
        )
        return RankMemoryCount(
            rank=rank,
            stage=stage,
            params=params,
            allocated_bytes=AllocatorBytes(
                segments=segments.allocated_bytes, expandable=expandable.allocated_bytes
            ),
            reserved_bytes=AllocatorBytes(
                segments=segments.reserved_bytes, expandable=expandable.reserved_bytes
            ),
            kinds=tuple(MemoryKind(name=n, bytes=size) for n, size in kinds.most_common()),
            phases=tuple(MemoryKind(name=n, bytes=size) for n, size in phases.items()),
            peak_phase=[phase for number, phase in self.marks if number <= peak_event][-1],
            peak=tuple(r.live(self._kind(r), self.marks[r.born][1]) for r in largest),
            num_events=len(self.history),
            num_unknown_values=self.num_unknown_values,
            fits=None if limit_bytes is None else self._fits(limit_bytes),
        )

    def _fits(self, limit_bytes: int) -> AllocatorFits:
        return AllocatorFits(
            segments=fit(self.history, limit_bytes),
            expandable=fit(self.history, limit_bytes, expandable_segments=True),
        )

    def _peaks(self) -> tuple[int, dict[str, int]]:
        """(the event after which most is allocated, highest bytes by phase)."""
        begins = dict(self.marks)
        size = highest = peak_event = 0
        phase, phases = _BUILD, dict[str, int]()
        for number, event in enumerate(self.history):
            phase = begins.get(number, phase)
            if event is not RETURN_CACHE:
                size += -rounded(event.bytes) if event.is_free else rounded(event.bytes)
            if number >= self._first_event:
                phases[phase] = max(phases.get(phase, 0), size)
                if size > highest:
                    highest, peak_event = size, number
        return peak_event, phases

    def _live_at(self, event_number: int) -> list[StorageRecord]:
        live: dict[int, StorageRecord] = {}
        for event in self.history[: event_number + 1]:
            if event is RETURN_CACHE:
                continue
            if event.is_free:
                del live[event.storage]
            else:
                live[event.storage] = self.records[event.storage]
        return list(live.values())

    def _kind(self, record: StorageRecord) -> str:
        """Kinds that nobody said follow from when a storage lived: what a forward pass made and a
        later phase freed was saved for the backward pass."""
        if record.kind:
            return record.kind
        if record.stream > 0 or record.op.startswith(_COMMUNICATION):
            return "communication"
        phase = self.marks[record.born][1]
        if phase in (_BUILD, "optimizer") and record.died is None:
            return "other state"
        is_saved = phase == "forward" and record.died != record.born
        return "activations" if is_saved else "temporary"
