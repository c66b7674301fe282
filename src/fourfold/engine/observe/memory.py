"""The most memory a rank used for the run itself, and what it held when memory ran out."""

from __future__ import annotations

import gc
import heapq
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fourfold.engine.compat import local, storage_key
from fourfold.engine.observe.ledger import Ledger, MemoryLimitError
from fourfold.engine.observe.phases import owners_of
from fourfold.engine.parallel.shards import published
from fourfold.engine.training.trainer import Trainer
from fourfold.result.one_rank import Large, MemoryKind
from fourfold.result.report import OomReport, RankMemory


class PeakMemory:
    """Of one rank; `note` before a probe, `forget` after it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.allocated_bytes = self.reserved_bytes = 0
        self.update_bytes = 0
        self._reserved = self._left_by_probe = 0

    def begin_update(self) -> None:
        """From here to `end_update` the optimizer works; its peak is kept apart too."""
        if self.device.type == "cuda":
            self.note()
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_update(self) -> None:
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            self.update_bytes = max(self.update_bytes, most)

    def note(self) -> None:
        if self.device.type != "cuda":
            return
        self._reserved = torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device) - self._left_by_probe
        self.allocated_bytes = max(self.allocated_bytes, allocated)
        self.reserved_bytes = max(self.reserved_bytes, reserved)

    def forget(self) -> None:
        """What the probe left in the cache stays there: giving it back would slow the next step."""
        if self.device.type == "cuda":
            self._left_by_probe = torch.cuda.memory_reserved(self.device) - self._reserved
            torch.cuda.reset_peak_memory_stats(self.device)

    def memory(
        self, *, rank: int, stage: int, counted_bytes: int = 0, retries: int = 0
    ) -> RankMemory:
        """As of the last `note`; on a CPU `counted_bytes`, which somebody else counted."""
        device_bytes = 0
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            device_bytes = total - free
        return RankMemory(
            rank=rank,
            stage=stage,
            peak_bytes=max(counted_bytes, self.allocated_bytes),
            reserved_bytes=self.reserved_bytes,
            device_bytes=device_bytes,
            retries=retries,
            optimizer_bytes=self.update_bytes,
        )


def retries(device: torch.device) -> int:
    """Allocations so far that only went through after the cache was emptied."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


@contextmanager
def allocator_peak(trainer: Trainer) -> Iterator[list[int]]:
    """Bytes at the fullest moment of what is run inside, as the CPU allocator reports them, on top
    of what was held before: compiled code hides from the ledger."""
    peaks: list[int] = []
    state_bytes = _state_bytes(trainer)
    watch = profile(profile_memory=True)
    with watch:
        yield peaks
    events: Any = watch.kineto_results  # torch gives it no type
    reports = [event for event in events.events() if event.name() == "[memory]"]
    live = highest = 0
    for event in sorted(reports, key=lambda report: report.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    peaks.append(state_bytes + highest)


def _state_bytes(trainer: Trainer) -> int:
    """Storages of weights, optimizer state, buffers and tables, each once."""
    tensors: list[Tensor] = [tensor for _, tensor in owners_of(trainer)]
    tensors += [buffer for chunk in trainer.chunks for buffer in chunk.buffers()]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


_LARGEST = 10
_UNKNOWN = Large(bytes=0, kind="activations", shape="", dtype="", op="", phase="")
_ASKED = re.compile(r"tried to allocate\s+([\d.]+)\s*(bytes|[KMGT]iB)?", re.I)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def names_of(trainer: Trainer) -> dict[int, str]:
    """Storage -> the published tensors in it; a fused projection holds several. In the middle of a
    step modules hold gathered weights, in whose place the shards come back."""
    names_by_storage: dict[int, list[str]] = {}
    for shard in trainer.shards:
        key = storage_key(local(shard.param.detach()))
        names_by_storage.setdefault(key, []).append(shard.name)
        if shard.param.grad is not None:
            grad = storage_key(local(shard.param.grad))
            names_by_storage.setdefault(grad, ["gradient of"]).append(shard.name)
    for chunk in trainer.chunks:
        for param, names in published(chunk):
            key = storage_key(local(param.detach()))
            names_by_storage.setdefault(key, [name for name, _ in names])
    return {key: " ".join(names) for key, names in names_by_storage.items()}


def oom_report(
    device: torch.device, ledger: Ledger | None, trainer: Trainer | None, error: BaseException
) -> OomReport | None:
    """None where nobody counted."""
    if device.type == "cuda":
        return of_allocator(device, trainer, error)
    return of_ledger(ledger, trainer, error) if ledger is not None else None


def of_ledger(ledger: Ledger, trainer: Trainer | None, error: BaseException) -> OomReport:
    """At the limit the ledger took its picture itself; an allocator's refusal finds it here."""
    names = names_of(trainer) if trainer is not None else {}
    over, asked, limit = ledger.now(), asked_bytes(str(error)), 0
    if isinstance(error, MemoryLimitError):
        over, asked, limit = error.over, error.asked_bytes, error.limit_bytes
    return OomReport(
        live_bytes=over.size,
        asked_bytes=asked,
        limit_bytes=limit,
        kinds=_kinds(over.kinds),
        largest=tuple(a.large(names.get(a.key, "")) for a in over.largest),
        source="ledger of live tensors",
    )


def _kinds(kinds: dict[str, int]) -> tuple[MemoryKind, ...]:
    ordered = sorted(kinds.items(), key=lambda pair: -pair[1])
    return tuple(MemoryKind(name=name, bytes=size) for name, size in ordered if size > 0)


def of_allocator(device: torch.device, trainer: Trainer | None, error: BaseException) -> OomReport:
    """Blocks get kind, shape and name from tensors Python can reach; what only autograd's graph
    holds stays a block of activations. (A snapshot without history costs nothing before.)"""
    stats = torch.cuda.memory_stats(device)
    live = int(stats.get("allocated_bytes.all.current", 0))
    known = _reachable(trainer)
    blocks = list(_blocks(device))
    kinds: Counter[str] = Counter()
    for address, size in blocks:
        kinds[known[address].kind if address in known else "activations"] += size
    top = heapq.nlargest(_LARGEST, blocks, key=lambda block: block[1])
    return OomReport(
        live_bytes=live,
        asked_bytes=asked_bytes(str(error)),
        limit_bytes=_limit_bytes(device),
        reserved_bytes=int(stats.get("reserved_bytes.all.current", 0)),
        kinds=_kinds(dict(kinds)),
        largest=tuple(replace(known.get(address, _UNKNOWN), bytes=size) for address, size in top),
        source="blocks of the CUDA allocator",
    )


def _blocks(device: torch.device) -> Any:
    """(address, bytes) of every block in use on the device."""
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != (device.index or 0):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                yield block.get("address", address), block["size"]
            address += block["size"]


def _reachable(trainer: Trainer | None) -> dict[int, Large]:
    """Address of a storage -> what Python knows of it; state by owner, the rest by shape."""
    known: dict[int, Large] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.is_cuda:
            known.setdefault(thing.untyped_storage().data_ptr(), _seen(thing, "activations", ""))
    if trainer is None:
        return known
    names = names_of(trainer)
    for kind, tensor in owners_of(trainer):
        storage = tensor.untyped_storage()
        known[storage.data_ptr()] = _seen(tensor, kind, names.get(storage_key(storage), ""))
    return known


def _seen(tensor: Tensor, kind: str, name: str) -> Large:
    shape = "x".join(map(str, tensor.shape))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Large(bytes=0, kind=kind, shape=shape, dtype=dtype, op="", phase="", name=name)


def _limit_bytes(device: torch.device) -> int:
    """The run's memory_limit is set as a share of the device."""
    total = torch.cuda.get_device_properties(device).total_memory
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return round(total * share)


def asked_bytes(message: str) -> int:
    """'Tried to allocate 2.00 GiB' -> bytes; 0 where the message does not say."""
    match = _ASKED.search(message)
    if match is None:
        return 0
    return round(float(match.group(1)) * _UNITS[(match.group(2) or "bytes").lower()])
