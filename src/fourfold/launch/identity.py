"""Recognises the processes of a job by a mark in their environment, never by the text of a path:
the token of a start, which lies in the job's folder, and that folder's number, so that a copy of
the folder has none. Who starts them holds the kernel's lock on the folder; so what carries its mark
while another process holds that lock is left over.

Who follows a queued run: one command at a time, by a lock on a file in the run's folder, which
moves with the folder when the run is kept. The lock is gone when its holder is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.slurm import logs_of

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
    word = f"{VARIABLE}={_mark(folder, token)}".encode()
    ended: set[int] = set()
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        living = [pid for pid in _pids() if _end(pid, word)]
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


def _end(pid: int, word: bytes) -> bool:
    """Kill it if that word is in the environment it was started with."""
    with contextlib.suppress(OSError):
        if word in _environment(pid).split(b"\0"):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _environment(pid: int) -> bytes:
    """A process that is just being started shows none for a moment, longer on a loaded machine."""
    until, file = time.monotonic() + _START_S, Path(f"/proc/{pid}/environ")
    while not (found := file.read_bytes()) and time.monotonic() < until:
        if not _is_starting(pid):
            return file.read_bytes()  # it may have started between both looks
        time.sleep(0.005)
    return found


def _is_starting(pid: int) -> bool:
    """Whether it has a program but no words yet; a thread of the kernel never has either."""
    os.readlink(f"/proc/{pid}/exe")  # OSError where there is none
    return not Path(f"/proc/{pid}/cmdline").read_bytes()


def _pids() -> list[int]:
    """None without /proc: there only the pipe from the launcher ends its ranks."""
    with contextlib.suppress(FileNotFoundError):
        own = str(os.getpid())
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and name != own]
    return []


_LOCK = "follower.lock"


@dataclass(frozen=True, slots=True)
class Claim:
    """`number`: of the folder itself, by which it is found again under another name."""

    place: Path
    number: int
    handle: int

    def release(self) -> None:
        os.close(self.handle)


def claim(place: Path) -> Claim | None:
    """None where another command has it; FileNotFoundError where there is no such folder."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(place / _LOCK, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:  # a file system without locks: the first to keep the run has it
        pass
    try:
        if os.stat(place / _LOCK).st_ino == os.fstat(handle).st_ino:
            return Claim(place, os.stat(place).st_ino, handle)
    except FileNotFoundError:
        os.close(handle)
        raise
    os.close(handle)  # kept, and begun again, between two lines of this
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
