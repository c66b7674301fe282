"""The folder of a job: locked while a launcher works there, emptied of earlier starts, and never
followed out of; or a temporary one, cleared away by the next command if this one is killed."""

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

from fourfold import files
from fourfold.errors import MachineError, UserError
from fourfold.launch.identity import TOKEN_FILE, end_leftovers
from fourfold.result.job import DUMP_FILE, ENGINE_FILE, JOB_FILE, REPORT_FILE, STOP_FILE
from fourfold.spec import check

# What one start of ranks leaves; set aside when another follows in the same job.
TRACES = ("beat-*", "failure-*", "stack-*", "flight-*", "store-*", "news-*", "slurm*",
          DUMP_FILE, STOP_FILE)  # fmt: skip
_OURS = (*TRACES, "facts-*", "answer-*", "*.log", "failed-*", JOB_FILE, REPORT_FILE, TOKEN_FILE,
         ENGINE_FILE, "settings")  # fmt: skip


@contextlib.contextmanager
def job_folder(folder: Path) -> Iterator[None]:
    """Made or emptied of what a job leaves, with no process of an earlier start in it."""
    with contextlib.ExitStack() as stack:
        with _as_user_error(folder):
            rule = "is a symbolic link, which a job folder may not be"
            hint = "pass the folder it points to"
            check.that(not folder.is_symlink(), "folder", str(folder), rule, hint)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder, os.O_NOFOLLOW))
            end_leftovers(folder)
            for path in (path for pattern in _OURS for path in folder.glob(pattern)):
                _remove(path)
        yield


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """No second start in a folder that exists, even where somebody has removed files from it."""
    with contextlib.ExitStack() as stack:
        with _as_user_error(folder):
            stack.enter_context(_locked(folder))
        yield


def end_processes_of(folder: Path) -> int:
    """End what a killed launcher left running for this job folder, and say how many. Where a living
    one works there, nothing is."""
    if folder.is_symlink() or not folder.is_dir():
        return 0
    try:
        with _locked(folder, os.O_NOFOLLOW):
            return end_leftovers(folder)
    except UserError:
        return 0


@contextlib.contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """The kernel's lock, on the folder and not on its name; gone when this process is."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        # Some network file systems lock no folders; a training has a lock file besides.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rule, hint = "is in use by another start", "wait for it, or choose another folder"
                raise UserError(rule, field="folder", value=str(folder), hint=hint) from None
        yield
    finally:
        os.close(handle)


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
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(folder / ".lock", flags, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # It gets its name when it is locked: a lock that nobody holds is of a dead holder.
        os.rename(folder / ".lock", folder / _LOCK)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


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
