"""What was the most memory a rank used for the run itself? Probes beside it must not count.

On CUDA the allocator keeps the peak; it is read and reset around a probe. On a CPU the ledger
counts, but compiled code hides from it: there the allocator's own reports are added up over one
step, on top of what was held when it began.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fourfold.engine.observe.phases import owners_of
from fourfold.engine.training.trainer import Trainer
from fourfold.result.report import RankMemory


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
    """Bytes at the fullest moment of what is run inside, as the CPU allocator reports them."""
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
