"""How do the ranks of one host come to life, and die with their launcher?

One process imports torch and forks the ranks (8 ranks on 2 cores: 5 s, against 29 s when each
imports it). It never starts a thread, a CUDA context or a process group before the fork. It tells
the launcher each rank's end on stdout, one JSON line each.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from fourfold.result.job import log_file

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, sig: signal.Signals) -> None:
    """The kernel sends `sig` when the parent dies; where it is not Linux a watched pipe does it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(sig))
    if os.getppid() != parent:  # it died before we could ask
        os.kill(os.getpid(), signal.SIGKILL)


class Host:
    """The ranks of this machine. SIGTERM, SIGUSR2 (of the launcher, or of the kernel when that
    dies), or the end of stdin, ends them all and this process."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self.folder, self.launcher = folder, launcher
        self.pids: dict[int, int] = {}
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR2, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
        if launcher:
            die_with_parent(launcher, signal.SIGUSR2)

    def be_patient(self) -> None:
        """A batch system signals every process of a job at once: the launcher asks the ranks to
        save, they hear it themselves too, and this process must not end them meanwhile."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def fork(self, ranks: range, become: Callable[[int], int]) -> None:
        """Start the ranks; `become(rank)` runs in the child and gives its exit code."""
        parent = os.getpid()
        for rank in ranks:
            pid = os.fork()
            if pid == 0:
                self._live(rank, parent, become)
            self.pids[pid] = rank

    def _live(self, rank: int, parent: int, become: Callable[[int], int]) -> None:
        """The child's whole life. Leaves by os._exit: the parent's cleanups are not its own."""
        code = 1
        try:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGKILL)
            log = os.open(log_file(self.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            code = become(rank)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> int:
        """Until every rank has ended. The launcher, not this process, decides who must die."""
        worst = 0
        while self.pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self._listen(0.05)
            elif pid in self.pids:
                code = os.waitstatus_to_exitcode(status)
                worst = worst or abs(code)
                self._tell(rank=self.pids.pop(pid), code=code, at=time.time())
        return min(worst, 1)

    def _listen(self, seconds: float) -> None:
        watched = [0] if self.launcher else []
        readable, _, _ = select.select(watched, [], [], seconds)
        if readable and not os.read(0, 4096):
            self._end()

    def _tell(self, **facts: object) -> None:
        os.write(1, (json.dumps(facts) + "\n").encode())

    def _end(self, *_: object) -> None:
        """Kill and reap the ranks, then whatever they started (one process group), then this."""
        for pid in self.pids:
            # The signal may come between a rank's end and our noting it.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if os.getpgid(0) == os.getpid():  # only when the launcher gave us a group of our own
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
