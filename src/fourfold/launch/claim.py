"""Who follows a queued run: one command at a time, by a lock on a file in the run's folder, which
moves with the folder when the run is kept. The lock is gone when its holder is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

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
