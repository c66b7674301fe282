"""The folder of a job: this launcher's alone while it works there, and empty of earlier starts.

It may lie in a training or a store that somebody else made: nothing in it is followed out of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fourfold import files
from fourfold.errors import UserError
from fourfold.launch.identity import TOKEN_FILE, end_leftovers
from fourfold.result.job import DUMP_FILE, JOB_FILE, REPORT_FILE, STOP_FILE

# What one start of ranks leaves; set aside when another follows in the same job.
TRACES = ("beat-*", "failure-*", "stack-*", "flight-*", "store-*", DUMP_FILE, STOP_FILE)
_OURS = (*TRACES, "facts-*", "answer-*", "*.log", "failed-*", JOB_FILE, REPORT_FILE, TOKEN_FILE)


@contextlib.contextmanager
def job_folder(folder: Path) -> Iterator[None]:
    """Made or emptied of what a job leaves, with no process of an earlier start in it."""
    try:
        handle = _own(folder)
    except OSError as error:
        raise files.refused(error, folder, field="folder", verb="used") from None
    try:
        _lock(handle, folder)
        end_leftovers(folder)
        with _as_user_error(folder):
            for pattern in _OURS:
                for path in folder.glob(pattern):
                    _remove(path)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """No second start in a folder that exists, even where somebody has removed files from it."""
    with _as_user_error(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def end_processes_of(folder: Path) -> int:
    """End what a killed launcher left running for this job folder, and say how many. Where a living
    one works there, nothing is."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _lock(handle, folder)
        return end_leftovers(folder)
    except UserError:
        return 0
    finally:
        os.close(handle)


def _own(folder: Path) -> int:
    """A descriptor of the folder itself: names may change while it is used."""
    if folder.is_symlink():
        raise UserError(
            "is a symbolic link, which a job folder may not be",
            field="folder",
            value=str(folder),
            hint="pass the folder it points to",
        )
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(handle: int, folder: Path) -> None:
    """The kernel's lock, on the folder and not on its name; gone when this process is."""
    import fcntl

    # Some network file systems lock no folders; a training has a lock file besides.
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "is in use by another start",
                field="folder",
                value=str(folder),
                hint="wait for it, or choose another folder",
            ) from None


def set_aside(folder: Path, task: int) -> None:
    """Keep what a failed task left behind, out of the way of the next start."""
    aside = folder / f"failed-{task}"
    for pattern in TRACES:
        for path in folder.glob(pattern):
            aside.mkdir(exist_ok=True)
            shutil.move(path, aside / path.name)


def _remove(path: Path) -> None:
    """A link, not what it leads to."""
    if stat.S_ISDIR(path.lstat().st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def _as_user_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.refused(error, folder, field="folder", verb="used") from None
