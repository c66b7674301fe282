"""A temporary folder for a job whose files nobody wants later; what killed commands left of theirs
is cleared away when the next one asks for its own.

A folder is in use while its lock is held: the kernel lets go of it however its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fourfold.errors import MachineError
from fourfold.launch.folder import end_processes_of

_PREFIX = "fourfold-"
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_LOCK = ".fourfold-scratch"
# Between making a folder and locking it; one without a lock for so long was killed there.
_MAKING_S = 3600.0


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Only ours to read, and gone afterwards."""
    import tempfile  # 15 ms with what it imports

    try:
        root = Path(tempfile.gettempdir())
        _clear(root)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    except OSError as error:
        raise MachineError(
            f"cannot create a temporary folder ({error.strerror or error})",
            hint="free some space, or set TMPDIR",
        ) from None
    handle = -1
    try:
        handle = _locked(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


def _locked(folder: Path) -> int:
    """It gets its name when it is locked: a lock that nobody holds is of a dead holder."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / ".lock", folder / _LOCK)
    return handle


def _clear(root: Path) -> None:
    """Remove our own folders whose holder is dead; whatever can't be removed stays."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(entry.name) and _is_ours(entry.stat(follow_symlinks=False)):
                    _clear_one(root / entry.name)


def _is_ours(facts: os.stat_result) -> bool:
    private = stat.S_IMODE(facts.st_mode) == 0o700
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and private


def _clear_one(folder: Path) -> None:
    try:
        handle = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        if time.time() - folder.lstat().st_mtime > _MAKING_S and not any(folder.iterdir()):
            folder.rmdir()
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held: an OSError, and it stays
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
