"""Turns of questions that share a few processes: cheap ones first, and clients in turn.

A question is due when its estimated CPU seconds, times the wait that each of them is worth, have
passed; the earliest due runs next. One of 0.2 s that comes last is due before one of 2 s that came
a minute earlier, and no question waits for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fourfold.errors import UserError

# Questions that run at once; one place is kept for small ones.
PROCESSES = min(8, max(2, os.cpu_count() or 1))
MAX_WAITING, MAX_WAITING_OF_CLIENT = 256, 64
SMALL_S = 0.5  # CPU seconds of a question that may use the kept place
# Seconds that a CPU second of a question may wait for smaller ones, and the longest such wait.
_WAIT_PER_CPU_S, _MAX_WAIT_S = 60.0, 600.0


class BusyError(UserError):
    """Too many questions wait already, in all or of one client."""


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedCall:
    """A question's place: `turn` is set when it may run."""

    client: str = ""
    cost_s: float  # estimated CPU seconds
    due_s: float = 0.0  # the earliest is next
    turn: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_small(self) -> bool:
        return self.cost_s <= SMALL_S


Call = TypeVar("Call", bound=QueuedCall)


class Turns(Generic[Call]):
    def __init__(self, processes: int = PROCESSES) -> None:
        self.processes = processes
        self.waiting: list[Call] = []
        self.running: list[Call] = []

    def enter(self, call: Call) -> None:
        """Queue a call. Each question of a client that is there already delays its next one."""
        queued = Counter(queued.client for queued in [*self.waiting, *self.running])
        of_client = queued[call.client]
        if len(self.waiting) >= MAX_WAITING or of_client >= MAX_WAITING_OF_CLIENT:
            raise BusyError("too many questions are waiting here", hint="ask again in a while")
        wait_s = min(_MAX_WAIT_S, _WAIT_PER_CPU_S * call.cost_s)
        call.due_s = asyncio.get_running_loop().time() + wait_s * (1 + of_client)
        self.waiting.append(call)
        self._start()

    def leave(self, call: Call) -> None:
        """Forget a call that was answered, refused or cancelled."""
        for calls in (self.waiting, self.running):
            if call in calls:
                calls.remove(call)
        self._start()

    def _start(self) -> None:
        """Give free places to the calls that are due first."""
        while len(self.running) < self.processes:
            is_full = sum(not call.is_small for call in self.running) >= self.processes - 1
            able = [call for call in self.waiting if call.is_small or not is_full]
            if not able:
                return
            first = min(able, key=lambda call: call.due_s)
            self.waiting.remove(first)
            self.running.append(first)
            first.turn.set()
