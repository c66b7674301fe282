"""A rank's heartbeat: the main thread writes the phase it enters, a second one that the rank lives,
so one that is stopped or holds the interpreter lock shows as a line that no longer moves."""

from __future__ import annotations

import faulthandler
import mmap
import os
import threading
import time
from pathlib import Path

from fourfold.engine import compat
from fourfold.result.job import ALIVE_BYTES, DUMP_FILE, WHERE_BYTES, beat_file, padded

BEAT_EVERY_S = 0.25


class Heartbeat:
    """One rank's beat, from start to end of its process. When the launcher asks (DUMP_FILE), the
    beating thread dumps the stacks and torch's flight recorder."""

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

    def begin(self, task: int, stage: int = 0) -> None:
        """A new task: its steps count from 0 again."""
        self.task, self.stage, self.steps = task, stage, 0
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
