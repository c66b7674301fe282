"""Who follows a queued run: one command at a time, by a lock on a file in the run's folder, which
moves with the folder when the run is kept. The lock is gone when its holder is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from fourfold.launch.slurm import logs_of

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
