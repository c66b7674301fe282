"""Starts the ranks of one host, and ends them with their launcher.

One process imports torch and forks the ranks (8 ranks on 2 cores: 5 s, against 29 s when each
imports it). It never starts a thread, a CUDA context or a process group before the fork. It tells
the launcher of its ranks, one JSON line for each pid, stop, going on and end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
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


def _die_with_launcher(lifeline: int, worker: int) -> None:
    """In a rank: end everybody when the launcher's end of the pipe closes. The worker would, but it
    may be stopped; then its group, stopped ones too, ends by whichever rank sees it first."""

    def watch() -> None:
        while os.read(lifeline, 4096):
            pass  # nobody writes
        if os.getpgid(0) == worker:
            os.killpg(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


class Host:
    """The ranks of this machine. SIGTERM, SIGUSR2 (of the launcher, or of the kernel when that
    dies), or the end of stdin, ends them all and this process."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self.folder, self.launcher = folder, launcher
        self.pids: dict[int, int] = {}
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR2, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
        self._news = -1
        if launcher:
            # What an import prints must not come between the news.
            self._news = os.dup(1)
            os.dup2(2, 1)
            # Until there are ranks to end there is nothing to do but die, stopped or not.
            die_with_parent(launcher, signal.SIGKILL)

    def be_patient(self) -> None:
        """A batch system signals every process of a job at once: the launcher asks the ranks to
        save, they hear it themselves too, and this process must not end them meanwhile."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def fork(self, ranks: range, become: Callable[[int], int]) -> None:
        """Start the ranks; `become(rank)` runs in the child and gives its exit code."""
        parent = os.getpid()
        if self.launcher:
            die_with_parent(self.launcher, signal.SIGUSR2)
        for rank in ranks:
            try:
                pid = os.fork()
            except OSError as error:
                print(
                    f"rank {rank} of {len(ranks)} could not be started ({error.strerror}): start "
                    "fewer, or allow this user more processes and memory",
                    file=sys.stderr,
                )
                self._kill_ranks()
                os._exit(1)
            if pid == 0:
                self._live(rank, parent, become)
            self.pids[pid] = rank
            self._tell(rank=rank, pid=pid)

    def _live(self, rank: int, parent: int, become: Callable[[int], int]) -> None:
        """The child's whole life. Leaves by os._exit: the parent's cleanups are not its own."""
        code = 1
        try:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
            die_with_parent(parent, signal.SIGKILL)
            if self.launcher:
                os.close(self._news)
                _die_with_launcher(os.dup(0), parent)
            log = os.open(
                log_file(self.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
            )
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
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                self._listen(0.05)
            elif pid not in self.pids:
                continue
            elif os.WIFSTOPPED(status):
                self._tell(rank=self.pids[pid], stopped=os.WSTOPSIG(status))
            elif os.WIFCONTINUED(status):
                self._tell(rank=self.pids[pid], running=True)
            else:
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
        if self._news >= 0:
            os.write(self._news, (json.dumps(facts) + "\n").encode())

    def _kill_ranks(self) -> None:
        for pid in self.pids:
            # The signal may come between a rank's end and our noting it.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _end(self, *_: object) -> None:
        """Kill and reap the ranks, then whatever they started (one process group), then this."""
        self._kill_ranks()
        if os.getpgid(0) == os.getpid():  # only when the launcher gave us a group of our own
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
