"""Runs somebody else's program as a job: watched by its log, ended with all it started.

The program writes one log, on this host or on the nodes of a site. Whoever reads that log counts
steps; silence beyond the run's limits is a hang. Its processes on this host carry the job's mark,
so that those of a killed launcher are found and ended by the next one, as our own ranks are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.folder import exclusive
from fourfold.launch.identity import VARIABLE, end_marked, new_mark
from fourfold.launch.outcomes import kernel_kills
from fourfold.result.job import LOG_FILE, LOG_FILES
from fourfold.result.report import Outcome
from fourfold.units import counted

_SAME_REQUEST_S = 1.0  # signals closer together are one request


class _StopRequests:
    """With a `stop_file` the first signal makes that file and only a later one raises; SIGUSR1 asks
    and never raises. Slurm sends SIGUSR1 before a time limit and SIGTERM at it, `timeout` sends its
    signal twice at once: neither may cut off the save that is under way."""

    def __init__(self, stop_file: Path | None) -> None:
        self._file = stop_file
        self._asked_at: float | None = None

    def stop(self, number: int, _: object) -> None:
        now = time.monotonic()
        asked = self._asked_at is not None and now - self._asked_at > _SAME_REQUEST_S
        if self._file is None or asked:
            raise KeyboardInterrupt
        self._asked_at = self._asked_at or now
        self.ask(number, _)

    def ask(self, number: int, _: object) -> None:
        assert self._file is not None
        what = "saving after this step, then stopping"
        try:
            self._file.touch()
        except OSError as error:  # a full disk: must not end the ranks without a word
            what = f"cannot ask the ranks to save ({error.strerror}); send it again to stop at once"
        # Not print: a handler may interrupt one.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{signal.Signals(number).name}: {what}\n".encode())


@contextlib.contextmanager
def stop_signals(stop_file: Path | None) -> Iterator[None]:
    """SIGTERM acts like Ctrl-C while ranks run. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests = _StopRequests(stop_file)
    handlers = {signal.SIGTERM: requests.stop}
    if stop_file is not None:
        handlers |= {signal.SIGINT: requests.stop, signal.SIGUSR1: requests.ask}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs so: the keyboard's Ctrl-C is not meant for them.
        handlers.pop(signal.SIGINT, None)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_POLL_S, _END_S, _SAY_EVERY_S = 0.2, 5.0, 2.0
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """`take` gets the name of a log and what that has grown by, and says how many steps it has seen
    in all. The program is ended after `enough` of them, `grace_s` later if it does not end by
    itself (0: at once)."""

    take: Callable[[str, bytes], int]
    start_limit_s: float
    step_limit_s: float
    enough: int
    grace_s: float
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """`code` None: it was ended here, since it had done `enough` or was silent for too long
    (`limit` names which). `where`: the node that failed first, where there are several.
    `log`: where its last words are. `by_scheduler`: what the batch system did to it.
    `environment`: where it was."""

    code: int | None
    limit: str
    steps: int
    seconds: float
    start_s: float
    log: Path
    kernel_kills: int = 0
    where: str = ""
    by_scheduler: tuple[Outcome, str] | None = None
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def how(self) -> str:
        if self.by_scheduler is not None:
            return self.by_scheduler[1]
        if self.limit:
            return f"no further step for longer than the {self.limit}"
        on = f" on {self.where}" if self.where else ""
        if self.code is not None and self.code < 0:
            return f"killed by signal {-self.code}{on}"
        return f"exited with code {self.code}{on}"


def run_command(
    command: Sequence[str], env: Mapping[str, str], folder: Path, watch: Watch
) -> Ended:
    """Returns when no process of it is left, however it ended; Ctrl-C and SIGTERM end it too."""
    began, kills = time.monotonic(), kernel_kills()
    mark, process = new_mark(folder), None
    with exclusive(folder):
        try:
            with stop_signals(None):  # also while it is being started
                process = _started(command, {**env, VARIABLE: mark}, folder)
                code, limit, steps, start_s = watched(process.poll, folder, watch)
        finally:
            _end(process, folder)
    return Ended(
        code=code,
        limit=limit,
        steps=steps,
        seconds=time.monotonic() - began,
        start_s=start_s,
        log=folder / LOG_FILE,
        kernel_kills=kernel_kills() - kills,
    )


def _started(
    command: Sequence[str], env: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    with open(folder / LOG_FILE, "ab") as log:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except OSError as error:
            rule, hint = f"cannot be started ({error.strerror})", "check the engine's template"
            raise UserError(rule, field="command", value=command[0], hint=hint) from None


def watched(
    poll: Callable[[], int | None],
    folder: Path,
    watch: Watch,
    queued: Callable[[], str] = lambda: "",
) -> tuple[int | None, str, int, float]:
    """(exit code, limit that passed, steps seen, seconds until the first) of a program that was
    started; `poll` has its exit code, `queued` says what it still waits for."""
    began = changed_at = said_at = time.monotonic()
    steps, start_s = 0, 0.0
    read: dict[Path, int] = {}
    while True:
        code = poll()  # before reading: its last words are then in the log
        seen = steps
        for log in sorted(folder.glob(LOG_FILES)):
            seen = _take(log, read, watch, seen)
        now = time.monotonic()
        if queued():  # time in a queue is no silence
            began = changed_at = now
        if seen != steps:
            start_s = start_s or now - began
            steps, changed_at = seen, now
        if code is not None:
            return code, "", steps, start_s
        silent_s = now - changed_at
        if steps >= watch.enough and silent_s >= watch.grace_s:
            return None, "", steps, start_s
        limit_s = watch.step_limit_s if steps else watch.start_limit_s
        if silent_s > limit_s and steps < watch.enough:
            name = "step" if steps else "start"
            return None, f"{name} limit of {limit_s:g} s", steps, start_s
        if now - said_at > _SAY_EVERY_S:
            said_at = now
            watch.say(queued() or (f"{counted(steps, 'step')} done" if steps else "starting"))
        time.sleep(_POLL_S)


def _take(log: Path, read: dict[Path, int], watch: Watch, steps: int) -> int:
    """Steps seen after what the log has grown by. Opened anew at every look: only then does a
    network file system ask what another host has written."""
    if not log.exists():
        return steps
    with files.open_own(log) as stream:
        stream.seek(read.get(log, 0))
        while chunk := stream.read(_CHUNK_BYTES):
            steps = watch.take(log.name, chunk)
            read[log] = read.get(log, 0) + len(chunk)
    return steps


def _end(process: subprocess.Popen[bytes] | None, folder: Path) -> None:
    """Asked first, then killed: the group, and whatever left it but carries the mark."""
    if process is not None:
        _end_group(process)
    end_marked(folder)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + _END_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
