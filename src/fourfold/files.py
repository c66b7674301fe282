"""Reading and writing user files: writes are atomic, failures say what to do.

An existing file is replaced only by a result of the same kind, known by its mark, or with --force.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from fourfold.errors import MachineError, UserError, lacks

if TYPE_CHECKING:  # 6 ms with what it imports, at every start
    from pathlib import Path

    from filelock import BaseFileLock

# A spec, table or config larger than this is a mistake (a checkpoint, a device), not an input.
MAX_TEXT_BYTES = 512 * 2**20
# A stored report of 10,000 ranks and 50 steps has 40 MB. Parsed, JSON may take twenty times that.
MAX_STORED_BYTES = 64 * 2**20
# Read ahead of what is taken in pieces.
_STREAM_BYTES = 2**18
# Errors of a machine, not of a request.
_MACHINE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
}
# Where a result's mark is looked for, at both ends.
_MARK_BYTES = 4096
_PACKAGE = os.path.dirname(os.path.realpath(__file__))
_only_root = ""


def keep_within(root: str | Path) -> None:
    """From now on this process reads and writes files below `root` alone, wherever links lead, and
    reads the package's own. There is no way back."""
    global _only_root
    _only_root = os.path.realpath(root)


def require_within(path: str | Path, *, writes: bool = False) -> None:
    """Refuse what leads out of the folder that this process is kept within, if it is."""
    if not _only_root or is_below(path, _only_root):
        return
    if writes or not is_below(path, _PACKAGE):
        raise outside(path, _only_root)


def is_below(path: str | Path, root: str | Path) -> bool:
    """Whether opening `path` would lead below `root`, a real path."""
    real = os.path.realpath(path)
    return real == str(root) or real.startswith(os.path.join(root, ""))


def outside(path: str | Path, root: str | Path) -> UserError:
    """What to say of a name that leads out of the folder of a server."""
    return UserError(
        "is outside of the folder of this server",
        field="file",
        value=str(path),
        hint=f"put it below {root}, or start the server with another --folder",
    )


def refused(error: OSError | ValueError, path: object, *, field: str, verb: str) -> UserError:
    """What to say of a path that the system refuses. Bad names are the user's (exit 2), a full or
    failing disk is the machine's (exit 1)."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    machine = isinstance(error, OSError) and error.errno in _MACHINE
    space = "free some space" if machine else "check folder and permissions"
    return (MachineError if machine else UserError)(
        f"cannot be {verb} ({reason})",
        field=field,
        value=os.fsdecode(path) if isinstance(path, bytes) else str(path),
        hint="check the path" if verb != "written" else space,
    )


def read_text(path: str | Path, *, field: str = "file", max_bytes: int = MAX_TEXT_BYTES) -> str:
    return text_of(read_bytes(path, field=field, max_bytes=max_bytes), path, field=field)


def text_of(content: bytes, path: str | Path, *, field: str = "file") -> str:
    """UTF-8, with or without a byte order mark; line ends as on Unix."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise UserError(
            "is not UTF-8 text", field=field, value=str(path), hint="pass a text file"
        ) from None


def read_bytes(path: str | Path, *, field: str = "file", max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """A user's file or pipe, up to `max_bytes`; devices and folders are refused."""
    return _read(path, field, max_bytes, own=False)


def read_own(path: str | Path, *, field: str = "file", max_bytes: int = MAX_STORED_BYTES) -> bytes:
    """A file that fourfold wrote: a regular file. Pipes and devices in its place are refused, so
    that nothing waits."""
    return _read(path, field, max_bytes, own=True)


def open_stream(path: str | Path, *, field: str = "file") -> io.BufferedReader:
    """Return a buffered stream of a user's file or pipe, for a reader that takes it in pieces.
    Folders and devices are refused; a pipe without a writer reads as empty."""
    return _open(path, field, math.inf, _STREAM_BYTES, own=False)


def open_own(path: str | Path, *, field: str = "file") -> io.BufferedReader:
    """Return a buffered stream of a file that fourfold wrote, a regular one."""
    return _open(path, field, math.inf, _STREAM_BYTES, own=True)


def open_regular(path: str | Path, *, field: str = "file") -> io.BufferedReader:
    """Return a buffered stream of a user's file that can be read more than once: no pipe."""
    stream = _open(path, field, math.inf, _STREAM_BYTES, own=False)
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise UserError("is not a regular file", field=field, value=str(path))
    return stream


def read_own_text(path: str | Path, *, field: str = "file") -> str:
    """Return the UTF-8 text of a file that fourfold wrote."""
    return text_of(read_own(path, field=field), path, field=field)


def _read(path: str | Path, field: str, max_bytes: int, *, own: bool) -> bytes:
    try:
        with _open(path, field, max_bytes, io.DEFAULT_BUFFER_SIZE, own=own) as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise refused(error, path, field=field, verb="read") from None
    if len(content) > max_bytes:
        _refuse(_too_large(max_bytes, own=own), path, field)
    return content


def _open(
    path: str | Path, field: str, max_bytes: float, buffer_bytes: int, *, own: bool
) -> io.BufferedReader:
    # A named pipe without a writer would block for ever; without blocking it reads as empty.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        require_within(path)
        handle = os.open(path, flags)
        try:
            problem = _problem(handle, path, max_bytes, own=own)
            if problem is not None:
                _refuse(problem, path, field)
            os.set_blocking(handle, True)
            return io.BufferedReader(io.FileIO(handle), buffer_bytes)
        except BaseException:
            os.close(handle)
            raise
    except UserError:  # a ValueError as well
        raise
    except (OSError, ValueError) as error:
        raise refused(error, path, field=field, verb="read") from None


def _refuse(problem: tuple[str, str], path: str | Path, field: str) -> NoReturn:
    raise UserError(problem[0], field=field, value=str(path), hint=problem[1])


def _too_large(max_bytes: float, *, own: bool) -> tuple[str, str]:
    return f"is over {max_bytes / 2**20:g} MiB", "" if own else "pass a text file"


def _problem(
    handle: int, path: str | Path, max_bytes: float, *, own: bool
) -> tuple[str, str] | None:
    """(rule, hint) for what cannot be read: folders, disks, /dev/zero, files that are too large."""
    status = os.fstat(handle)
    kind = status.st_mode
    if own and not stat.S_ISREG(kind):
        return "is not a regular file", ""
    if stat.S_ISDIR(kind):
        return "is a folder", "pass a file in it"
    is_text_device = os.isatty(handle) or str(path) == os.devnull
    if stat.S_ISBLK(kind) or (stat.S_ISCHR(kind) and not is_text_device):
        return "is a device", "pass a text file"
    return _too_large(max_bytes, own=own) if status.st_size > max_bytes else None


def require_mine(path: str | Path, *, mark: str, force: bool, field: str = "out") -> None:
    """Refuse to replace what fourfold did not write. `mark`: a text near the beginning or the end
    of every such result; '' for files that people edit, which are never replaced unasked."""
    if force or not os.path.isfile(path):  # pipes and /dev/stdout are written to, not replaced
        return
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            content = stream.read(_MARK_BYTES)
            stream.seek(max(0, size - _MARK_BYTES))
            content += stream.read(_MARK_BYTES)
    except OSError as error:
        raise refused(error, path, field=field, verb="read") from None
    if not size or (mark and mark.encode() in content):
        return
    what = "exists and was not written by this command" if mark else "already exists"
    hint = "use --force to overwrite it, or choose another name"
    raise UserError(what, field=field, value=str(path), hint=hint)


def require_place(path: str | Path) -> None:
    """Refuse now what could not be written later: the folder, or the one it will be made in."""
    target = os.path.realpath(path)
    is_folder = os.path.isdir(target)
    if os.path.exists(target) and not is_folder and not os.path.isfile(target):
        return  # a pipe is written to where it is
    folder = os.path.dirname(target)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    number = errno.EISDIR * is_folder or errno.ENOTDIR * (not os.path.isdir(folder))
    if not number and not os.access(folder, os.W_OK | os.X_OK):
        number = errno.EACCES
    if number:
        error = OSError(number, os.strerror(number))
        raise refused(error, path, field="out", verb="written")


def write_text(path: str | Path, text: str, *, field: str = "out", own: bool = False) -> None:
    """Write all of `text` or nothing, as UTF-8; odd bytes of a file name are escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), field=field, own=own)


def write_bytes(path: str | Path, content: bytes, *, field: str = "out", own: bool = False) -> None:
    """Write all or nothing: a reader never sees half a file, a crash loses no old one. `own`: a
    file of fourfold's own folders, where a link is replaced and never written through."""
    try:
        require_within(path, writes=True)
        target = os.path.realpath(path)
        special = os.path.exists(target) and not (os.path.isfile(target) or os.path.isdir(target))
        if not own and (special or str(path).startswith("/dev/")):
            # A pipe or /dev/stdout is written to: replacing it would destroy it.
            with open(path, "ab", buffering=0) as stream:
                stream.write(content)
            return
    except UserError:  # a ValueError as well
        raise
    except (OSError, ValueError) as error:
        raise refused(error, path, field=field, verb="written") from None
    with pending(path, field=field, own=own) as stream:
        stream.write(content)


@contextlib.contextmanager
def pending(path: str | Path, *, field: str = "out", own: bool = False) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file `path` when the block ends well, else nothing does;
    for what is too large for `write_bytes`."""
    import tempfile  # 15 ms with what it imports, only paid on writing

    temporary = ""
    require_within(path, writes=True)
    try:
        # The target of a user's link is replaced, not the link.
        target = os.path.abspath(path) if own else os.path.realpath(path)
        folder, name = os.path.split(target)
        os.makedirs(folder, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{name[:32]}.", dir=folder)
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_of(target, own=own))
        os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        raise refused(error, path, field=field, verb="written") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


@contextlib.contextmanager
def locked(path: str | Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Alone among all who lock `path`, for what reads a file and writes it again; others wait, and
    say so by `on_wait`. The lock is a hidden file beside it (network file systems lock no folders),
    and gone afterwards."""
    import fcntl

    require_within(path, writes=True)
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):  # a pipe is written to, not read
        yield
        return
    folder, name = os.path.split(target)
    lock = os.path.join(folder, f".{name[:200]}.lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.makedirs(folder, exist_ok=True)
        while True:
            handle = os.open(lock, flags, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    on_wait()
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(lock).st_ino == os.fstat(handle).st_ino:
                    break
            os.close(handle)  # whoever had it has removed it: it is nobody's lock any more
    except OSError as error:
        raise refused(error, path, field="out", verb="written") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(lock)
        os.close(handle)


def try_lock(path: str | Path, *, mode: int = 0o644) -> BaseFileLock | None:
    """Return a lock on the file `path`, made where it is missing, None where another holds it; gone
    with its holder. OSError where the file system has no locks. It is `filelock`'s, a package of
    those who run; `locked`, which waits, serves tables too, for which numpy is enough."""
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError:
        raise lacks("filelock") from None
    require_within(path, writes=True)
    lock = FileLock(path, blocking=False, mode=mode, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mode_of(path: str, *, own: bool = False) -> int:
    """Permissions of the file that is replaced, else what the umask gives a new file."""
    if os.path.exists(path) and not (own and os.path.islink(path)):
        return os.stat(path).st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
