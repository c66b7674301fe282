"""How a rank shows that it lives, and the ways in which it fails, by itself or on purpose."""

from __future__ import annotations

import faulthandler
import math
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fourfold.engine import compat
from fourfold.errors import UserError
from fourfold.result.job import ALIVE_BYTES, DUMP_FILE, WHERE_BYTES, beat_file, padded
from fourfold.result.report import OomReport, Outcome
from fourfold.spec.run import Fault

BEAT_EVERY_S = 0.25


class Heartbeat:
    """The main thread writes the phase it enters, a second one that the rank lives, so one that is
    stopped or holds the interpreter lock shows as a line that no longer moves. When the launcher
    asks (DUMP_FILE), the second thread dumps the stacks and torch's flight recorder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.task, self.stage, self.phase = 0, 0, "start"
        self.steps = self.marks = 0
        with open(beat_file(folder, rank), "w+b") as stream:
            stream.write(padded({}, WHERE_BYTES) + padded({}, ALIVE_BYTES))
            stream.flush()
            self._lines = mmap.mmap(stream.fileno(), WHERE_BYTES + ALIVE_BYTES)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self.enter("start")
        self._live()
        self._thread.start()

    def begin(self, task: int) -> None:
        """A new task: its steps count from 0 again."""
        self.task, self.stage, self.steps = task, 0, 0
        self.enter("build")

    def enter(self, phase: str) -> None:
        """The main thread enters a phase: join, build, forward, backward, optimizer, ... Written at
        once, a few microseconds: a process that is killed next can't say it later."""
        self.phase = phase
        self.marks += 1
        self._lines[:WHERE_BYTES] = padded(
            {
                "task": self.task,
                "stage": self.stage,
                "phase": phase[:64],
                "steps": self.steps,
                "marks": self.marks,
            },
            WHERE_BYTES,
        )

    def step_done(self) -> None:
        self.steps += 1
        self.enter(self.phase)

    def _live(self) -> None:
        alive: dict[str, object] = {"rank": self.rank, "pid": os.getpid(), "at": time.time()}
        line = padded(alive | {"groups": compat.collectives_by_group()}, ALIVE_BYTES)
        if line.startswith(b"{}"):  # too many groups for the line; the rest still matters
            line = padded(alive, ALIVE_BYTES)
        self._lines[WHERE_BYTES:] = line

    def stop(self) -> None:
        self._leaving.set()
        self._thread.join()
        self._live()
        self._lines.close()

    def _run(self) -> None:
        dumped = False
        while not self._leaving.wait(BEAT_EVERY_S):
            self._live()
            if not dumped and (self.folder / DUMP_FILE).exists():
                dumped = True
                self._dump()

    def _dump(self) -> None:
        """Stacks first: they need nothing from torch, whose recorder may itself be stuck."""
        with open(self.folder / f"stack-{self.rank}.txt", "w") as stream:
            faulthandler.dump_traceback(stream, all_threads=True)
        record = compat.flight_record()
        if record:
            (self.folder / f"flight-{self.rank}.json").write_text(record)


# What allocators say when they raise a plain RuntimeError: torch on CPU, cuBLAS, CUDA, NCCL.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED|cannot allocate memory",
    re.IGNORECASE,
)
# No machine has this much (1 PiB), so the allocator itself must refuse.
_TOO_MUCH_BYTES = 2**50


class NonFiniteError(RuntimeError):
    """A loss or a gradient norm is NaN or infinite; `from_here`: it may come from this rank."""

    def __init__(self, message: str, *, from_here: bool = True) -> None:
        super().__init__(message)
        self.from_here = from_here


class OomError(MemoryError):
    """Memory ran out; what was raised then is its `__cause__`, what the rank held its `report`."""

    def __init__(self, report: OomReport | None) -> None:
        super().__init__("out of memory")
        self.report = report


def check_finite(
    norm: Tensor, leaves: Sequence[Tensor], step: int, *, forgiven: bool = False
) -> None:
    """Before the update spreads it to every weight: who holds a bad weight is the source.
    `forgiven`: with finite weights it is too large a scale; the step is skipped, the scale
    lowered."""
    if math.isfinite(float(norm)):
        return
    own = all(bool(torch.isfinite(leaf).all()) for leaf in leaves)
    if own and forgiven:
        return
    where = "this rank's weights are finite" if own else "weights of this rank are not finite"
    raise NonFiniteError(f"gradient norm {float(norm)} in step {step}; {where}", from_here=not own)


def outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, UserError):
        return "illegal"
    if isinstance(error, NonFiniteError):
        return "nonfinite"
    if isinstance(error, KeyboardInterrupt):
        return "cancelled"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
        return "oom"
    return "crashed"


@torch.no_grad()
def inject_fault(fault: Fault | None, *, rank: int, step: int, tensors: Sequence[Tensor]) -> None:
    """Let the asked failure happen on its rank before its step; the first tensor may get a NaN."""
    if fault is None or rank != fault.rank or step != fault.step:
        return
    if fault.kind == "hang":
        while True:
            time.sleep(3600.0)
    if fault.kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault.kind == "oom":
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8, device=device)
    if fault.kind == "nonfinite":
        tensors[0].view(-1)[0] = math.nan  # as from a cosmic ray or a bad kernel
