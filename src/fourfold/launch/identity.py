"""Recognises processes by a token that each start of a job makes, never by the text of a path. A
leftover has this folder's token, was started for this very folder, and its launcher is dead.

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
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.slurm import logs_of
from fourfold.result import machine

TOKEN_FILE = "token"
VARIABLE = "FOURFOLD_JOB"
_MARK = re.compile(r"([0-9a-f]{32}):([0-9]+):([0-9]+):([^:\s]+):([^:\s]*)")
_END_S = 10.0
_START_S = 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """What a process says of itself: its token, its folder by number, and who launched it."""

    token: str
    folder: int
    launcher: int
    born: str
    boot: str

    def __str__(self) -> str:
        return f"{self.token}:{self.folder}:{self.launcher}:{self.born}:{self.boot}"

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        match = _MARK.fullmatch(text)
        if match is None:
            return None
        token, folder, launcher, born, boot = match.groups()
        return cls(token, int(folder), int(launcher), born, boot)

    @property
    def is_orphan(self) -> bool:
        """Whether the launcher is gone, or another process of this boot has its number."""
        return self.boot == machine.boot_id() and machine.process_born(self.launcher) != self.born


def new_mark(folder: Path) -> Mark:
    """For the next start in this folder, by this process; the token is in the folder then."""
    token = secrets.token_hex(16)
    files.write_text(folder / TOKEN_FILE, f"{token}\n")
    born = machine.process_born(os.getpid()) or "?"
    return Mark(token, os.stat(folder).st_ino, os.getpid(), born, machine.boot_id())


def end_leftovers(folder: Path, *, own: bool = False) -> int:
    """Kill what a dead launcher of this folder left running, and what this one did if `own`; how
    many there were."""
    token = _token(folder)
    if not token:
        return 0
    number = os.stat(folder).st_ino
    ended: set[int] = set()
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        living = [pid for pid in _pids() if _end(pid, token, number, own=own)]
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
    return text if re.fullmatch(r"[0-9a-f]{32}", text) else ""


def _end(pid: int, token: str, number: int, *, own: bool) -> bool:
    """Kill it if it is a leftover; a descriptor keeps its number from another process meanwhile."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        handle = _descriptor(pid)
        if handle >= 0:
            stack.callback(os.close, handle)
        if machine.process_state(pid) in ("", "Z", "X"):
            return False
        marks = [mark for mark in _marks(pid) if mark.token == token and mark.folder == number]
        mine = own and any(mark.launcher == os.getpid() for mark in marks)
        if not mine and not any(mark.is_orphan for mark in marks):
            return False
        if handle >= 0:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
        return True
    return False


def _descriptor(pid: int) -> int:
    """-1 where the kernel is too old for them, or a container forbids it."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    except ProcessLookupError:
        raise
    except OSError:
        return -1


def _marks(pid: int) -> Iterator[Mark]:
    """Of the environment it was started with; where that can't be read, of its command line."""
    if os.path.isdir("/proc/self"):
        words = _environment(pid).split(b"\0")
        prefix = f"{VARIABLE}=".encode()
    else:
        command = ["ps", "-o", "command=", "-p", str(pid)]
        done = subprocess.run(command, capture_output=True, check=False)
        words, prefix = done.stdout.split(), b"--mark="
    for word in words:
        if word.startswith(prefix):
            mark = Mark.parse(word[len(prefix) :].decode(errors="replace"))
            if mark is not None:
                yield mark


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
    if os.path.isdir("/proc/self"):
        names = [name for name in os.listdir("/proc") if name.isdecimal()]
    else:
        listed = subprocess.run(["ps", "-axo", "pid="], capture_output=True, text=True, check=False)
        names = listed.stdout.split()
    return [int(name) for name in names if int(name) != os.getpid()]


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
