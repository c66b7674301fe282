"""Was this training asked to stop? By a signal to any rank, or by the launcher's file; all ranks
agree on the step, without waiting for the device.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.result.job import STOP_FILE


class StopRequest:
    """Made before ranks join, so that a signal in between is not lost."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / STOP_FILE if rank == 0 else None
        self._signalled = False
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._answer: dist.Work | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._hear)

    def _hear(self, *_: object) -> None:
        self._signalled = True

    def connect(self) -> None:
        """A CPU group of its own, whose only collectives are these questions. Collective."""
        if dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    @property
    def wanted(self) -> bool:
        """Whether this rank has heard of a request."""
        return self._signalled or (self._file is not None and self._file.exists())

    def agreed(self) -> bool:
        """Once a step on all ranks: what the step before asked, answered while this one ran."""
        if self._group is None:
            return self.wanted
        answer = False
        if self._answer is not None:
            self._answer.wait()
            answer = bool(self._flag.item())
        self._flag = torch.tensor([int(self.wanted)], dtype=torch.int32)
        self._answer = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return answer

    def leave(self) -> None:
        """No question may be open when the group goes away."""
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
