"""Counts what a rank holds, computes and sends as operators run, on real or fake tensors. It does
not see what a kernel allocates inside itself, nor what an allocator rounds up."""

from __future__ import annotations

import contextlib
import functools
import heapq
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fourfold.engine import compat, compat_modes
from fourfold.engine.observe.operators import collective, is_collective, op_flops
from fourfold.result.one_rank import Large

# Kinds that outlive a step; what is left is activations, whatever made it.
STATE_KINDS = ("parameters", "gradients", "optimizer")
_LARGEST = 10


@dataclass(slots=True)
class Allocation:
    """One live storage: its size now, what it is for, and what made it, in which phase."""

    key: int
    size: int
    kind: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    phase: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.size} bytes {self.kind} {shape} {self.dtype} by {self.op} in {self.phase}"

    def large(self, name: str = "") -> Large:
        shape = "x".join(map(str, self.shape))
        return Large(
            bytes=self.size,
            kind=self.kind,
            shape=shape,
            dtype=self.dtype,
            op=self.op,
            phase=self.phase,
            name=name,
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment: bytes in all and by kind, when, and the largest tensors."""

    size: int
    kinds: dict[str, int]
    phase: str
    largest: tuple[Allocation, ...]


class MemoryLimitError(MemoryError):
    """Live bytes passed the run's memory_limit. `over`: that moment, with the tensor that did it,
    for which `asked_bytes` were asked."""

    def __init__(self, over: Snapshot, limit_bytes: int, asked: Allocation) -> None:
        what = f"{over.size} live bytes pass memory_limit={limit_bytes} with {asked}"
        super().__init__(f"{what}; largest: {'; '.join(map(str, over.largest[:3]))}")
        self.over, self.limit_bytes, self.asked_bytes = over, limit_bytes, asked.size


@functools.cache
def _is_made_of_others(kind: type) -> bool:
    is_distributed = issubclass(kind, compat.distributed_tensors())
    return is_distributed or kind.__module__.startswith("torchao.")


class Ledger(compat_modes.UncompiledMode):
    """`axes`: group name -> axis. More live bytes than `limit_bytes` raise MemoryLimitError."""

    def __init__(
        self, axes: Mapping[str, str] | None = None, limit_bytes: int | None = None
    ) -> None:
        super().__init__()
        self.axes = dict(axes or {})
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.kinds: Counter[str] = Counter()
        self.phase = "build"
        # Asked at every mark: (kind, tensor) of what is state by now, gradients above all.
        self.owners: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        self._allocations: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}
        self._paused = 0
        self._patches = contextlib.ExitStack()
        self.begin()

    def begin(self) -> None:
        """Start counting anew (a step): the peak from what is live now, no FLOPs, no traffic."""
        self.flops = 0
        self.traffic: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.peak_bytes = self.live_bytes
        self.phase_bytes = {self.phase: self.live_bytes}
        self._rising = True
        self._snapshot()

    def mark(self, phase: str) -> None:
        """Name what follows, and tell state from activations as of now."""
        self.phase = phase
        self.phase_bytes[phase] = max(self.phase_bytes.get(phase, 0), self.live_bytes)
        for kind, tensor in self.owners():
            self.own(kind, tensor)

    def own(self, kind: str, tensor: Tensor) -> None:
        """This tensor's storage counts as `kind` from now on."""
        entry = self._allocations.get(compat.storage_key(compat.local(tensor)))
        if entry is not None and entry[0].kind != kind:
            self.kinds[entry[0].kind] -= entry[0].size
            self.kinds[kind] += entry[0].size
            entry[0].kind = kind

    @property
    def peak(self) -> Snapshot:
        if self._rising and self.live_bytes == self.peak_bytes:
            self._snapshot()
        return self._peak

    def state_bytes(self) -> int:
        return sum(self.kinds[kind] for kind in STATE_KINDS)

    # What happens to storages.

    def see(self, tensor: Tensor, op: str = "given") -> None:
        """Count a tensor's storage if it is new; meta tensors have none."""
        if compat_modes.is_meta(tensor):
            return
        storage = tensor.untyped_storage()
        key = compat.storage_key(storage)
        if key in self._allocations:
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        allocation = Allocation(key, 0, "activations", op, shape, dtype, self.phase)
        self._allocations[key] = allocation, weakref.ref(storage, lambda _: self._forget(key))
        self._resize(allocation, storage.nbytes())

    def _forget(self, key: int) -> None:
        allocation, _ = self._allocations[key]
        self._resize(allocation, 0)  # first: it may be the moment to note the peak
        del self._allocations[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees and fills its gathered weights this way."""
        entry = self._allocations.get(compat.storage_key(storage))
        if entry is None:
            return
        allocation = entry[0]
        if allocation.kind == "activations":
            self.kinds["activations"] -= allocation.size
            self.kinds["gathered"] += allocation.size
            allocation.kind = "gathered"
        self._resize(allocation, storage.nbytes())

    def _resize(self, allocation: Allocation, size: int) -> None:
        """Count an allocation with another size: from 0 when it begins, to 0 when it ends."""
        change = size - allocation.size
        if change < 0 and self._rising and self.live_bytes == self.peak_bytes:
            self._snapshot()
        allocation.size = size
        self.live_bytes += change
        self.kinds[allocation.kind] += change
        if self.live_bytes > self.phase_bytes[self.phase]:
            self.phase_bytes[self.phase] = self.live_bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._rising = self.live_bytes, True
            if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
                self._over(allocation)

    def _over(self, allocation: Allocation) -> None:
        limit, self.limit_bytes = self.limit_bytes or 0, None  # once: the way out also allocates
        for kind, tensor in self.owners():  # gradients may be newer than the last mark
            self.own(kind, tensor)
        self._snapshot()
        raise MemoryLimitError(self.now(), limit, allocation)

    def now(self) -> Snapshot:
        allocations = (entry[0] for entry in self._allocations.values())
        largest = heapq.nlargest(_LARGEST, allocations, key=lambda allocation: allocation.size)
        kinds, copies = dict(self.kinds), tuple(map(replace, largest))
        return Snapshot(self.live_bytes, kinds, self.phase, copies)

    def _snapshot(self) -> None:
        """Who was there. A walk over all storages, so only where the peak turns, not on its way up.
        Within 1% of the last snapshot the same tensors are the largest; only the total moves on."""
        self._rising = False
        before: Snapshot | None = getattr(self, "_peak", None)
        if before is not None and before.size <= self.peak_bytes <= before.size * 1.01:
            kinds = dict(self.kinds)
            self._peak = Snapshot(self.live_bytes, kinds, self.phase, before.largest)
        else:
            self._peak = self.now()

    # What operators do.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asked at every turn: where a fake tensor is
            return compat_modes.fake_device(func, args[0]) or func(*args, **kwargs)
        if types and any(map(_is_made_of_others, types)):
            return NotImplemented  # let it come down to plain local tensors first
        out = func(*args, **kwargs)
        op_name = compat.op_name(func)
        if op_name == "_c10d_functional::wait_tensor":
            out = args[0]  # what was waited for; as a fake tensor it would be counted again
        if self._paused:
            return out
        self.flops += op_flops(func, args, kwargs, out)
        if is_collective(func):
            message = collective(func, args, kwargs, out)
            if message is not None:
                name, op, size = message
                key = (self.axes.get(name, name), op)
                self.traffic[key] += size
                self.calls[key] += 1
        for leaf in (out,) if isinstance(out, Tensor) else compat.tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.see(leaf, op_name)
        return out

    def __enter__(self) -> Ledger:
        self._patches = contextlib.ExitStack()
        self._patches.enter_context(self._watched_resizes())
        self._patches.enter_context(compat_modes.around_shape_propagation(self._not_counting))
        self._patches.enter_context(compat.uncompiled())
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._patches.close()

    @contextlib.contextmanager
    def _watched_resizes(self) -> Iterator[None]:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        with compat.patched(torch.UntypedStorage, "resize_", resize_):
            yield

    @contextlib.contextmanager
    def _not_counting(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
