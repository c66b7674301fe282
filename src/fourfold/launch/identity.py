"""Recognises the processes of a job by a mark in their environment, never by the text of a path:
the token of a start, which lies in the job's folder, and that folder's number, so that a copy of
the folder has none. Who starts them holds the kernel's lock on the folder; so what carries its mark
while another process holds that lock is left over.

Who follows a queued run: one command at a time, by a lock on a file in the run's folder, which
moves with the folder when the run is kept. The lock is gone when its holder is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.slurm import logs_of
from fourfold.result.machine import import_psutil

if TYPE_CHECKING:  # of those who run
    import psutil
    from filelock import BaseFileLock

TOKEN_FILE = "token"
VARIABLE = "FOURFOLD_JOB"
_TOKEN = re.compile(r"[0-9a-f]{32}")
_END_S = 10.0
_START_S = 1.0


def new_mark(folder: Path) -> str:
    """For the next start in this folder; its token is in the folder then."""
    token = secrets.token_hex(16)
    files.write_text(folder / TOKEN_FILE, f"{token}\n")
    return _mark(folder, token)


def _mark(folder: Path, token: str) -> str:
    return f"{token}:{os.stat(folder).st_ino}"


def end_marked(folder: Path) -> int:
    """Kill the processes of the last start in this folder, which nobody else works in by now; how
    many there were."""
    token = _token(folder)
    if not token:
        return 0
    mark, ended, psutil = _mark(folder, token), set(), import_psutil()
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        living = [pid for pid in psutil.pids() if pid != os.getpid() and _end(pid, mark)]
        if not living:
            break
        ended.update(living)
        time.sleep(0.05)
    return len(ended)


def _token(folder: Path) -> str:
    """Of a regular file in the folder itself; '' for anything else."""
    try:
        text = files.read_own(folder / TOKEN_FILE, max_bytes=1024).decode(errors="replace").strip()
    except (OSError, UserError):
        return ""
    return text if _TOKEN.fullmatch(text) else ""


def _end(pid: int, mark: str) -> bool:
    """Kill it if it was started with that mark in its environment."""
    psutil = import_psutil()
    with contextlib.suppress(psutil.Error):  # it is gone, or another user's
        process = psutil.Process(pid)
        if _environment(process).get(VARIABLE) == mark:
            process.kill()
            return True
    return False


def _environment(process: psutil.Process) -> dict[str, str]:
    """A process that is just being started shows none for a moment, longer on a loaded machine."""
    until = time.monotonic() + _START_S
    while not (variables := process.environ()) and time.monotonic() < until:
        # It has a program but no words yet; a thread of the kernel never has either.
        if process.cmdline() or not process.exe():
            return process.environ()  # it may have started between both looks
        time.sleep(0.005)
    return variables


_LOCK = "follower.lock"


@dataclass(frozen=True, slots=True)
class Claim:
    """`number`: of the folder itself, by which it is found again under another name."""

    place: Path
    number: int
    lock: BaseFileLock | None

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


# What a file system without locks answers: there the first to keep the run has it.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def claim(place: Path) -> Claim | None:
    """None where another command has it; FileNotFoundError where there is no such folder."""
    number = os.stat(place).st_ino
    lock = None
    try:
        lock = files.try_lock(place / _LOCK, mode=0o600)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    else:
        if lock is None:
            return None
    own = Claim(place, number, lock)
    if number_of(place) == number:
        return own
    own.release()  # kept, and perhaps begun again, between two lines of this
    return None


def number_of(place: Path) -> int:
    """0 where there is no such folder."""
    with contextlib.suppress(OSError):
        return os.lstat(place).st_ino
    return 0


_PREFIX = "queue-"


class ScriptFolders:
    """Of the queue in the folder `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: list[Claim] = []

    def new(self) -> Path:
        """Held until `release`."""
        while True:
            folder = self._root / f"{_PREFIX}{secrets.token_hex(4)}"
            folder.mkdir(parents=True)
            with contextlib.suppress(FileNotFoundError):  # cleared away before it was locked
                if (own := claim(folder)) is not None:
                    self._held.append(own)
                    return folder

    def release(self) -> None:
        """Their runs name them now."""
        for own in self._held:
            own.release()
        self._held = []

    def clear(self) -> None:
        for folder in self._root.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                own = claim(folder)
                if own is not None:
                    if not self._is_named(folder):
                        shutil.rmtree(folder, ignore_errors=True)
                    own.release()

    def _is_named(self, folder: Path) -> bool:
        """Looked up when it is locked: whoever made it may have released it just then."""
        runs = [path for path in self._root.iterdir() if not path.name.startswith(_PREFIX)]
        return any(logs_of(path) == folder for path in runs)
