"""How is a file read that somebody else may have put into a folder of ours? Only regular files,
never through a link, never more bytes than are expected; and what is wrong with it is said in kind.

Three kinds of trouble: bytes that changed or are missing (`NotWholeError`: an earlier state may be
used), a thing that can't be read here (`UnreadableError`: the work in it may be sound), and a
request that can't be met (`UserError`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fourfold import files
from fourfold.errors import UserError

_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_MOVE_AWAY = "move it away; nothing was read through it"


class NotWholeError(UserError):
    """Bytes are missing, or are not those that were written."""


class UnreadableError(UserError):
    """It can't be read by this version, this user or this kind of access; no byte need be wrong."""


def kind_of(path: Path) -> str:
    """'file', 'a folder', 'a link', ...; '' where there is nothing. Links are not followed."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None
    return next((words for test, words in _KINDS if test(mode)), "file")


def must_be(path: Path, kind: str, *, may_lack: bool = False) -> None:
    """Refuse anything but 'file' or 'a folder'."""
    actual = kind_of(path)
    if actual == kind or (may_lack and not actual):
        return
    if not actual:
        raise NotWholeError("is missing", field="file", value=str(path))
    names = {"file": "a regular file"}
    rule = f"is {names.get(actual, actual)}, where {names.get(kind, kind)} belongs"
    raise UnreadableError(rule, field="file", value=str(path), hint=_MOVE_AWAY)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size."""
    try:
        # A pipe without a writer would block the opening, and a device be read without end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        must_be(path, "file")
        raise UnreadableError("is not a regular file", field="file", value=str(path))
    with os.fdopen(handle, "rb", buffering=0) as stream:
        try:
            yield stream, status.st_size
        except OSError as error:
            raise _refused(path, error) from None


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes."""
    with opened(path) as (stream, size):
        if size > limit:
            rule = f"has {size:,} bytes, where at most {limit:,} are expected"
            hint = "is this the right file?"
            raise UnreadableError(rule, field="file", value=str(path), hint=hint)
        parts = []
        while size > 0 and (part := stream.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def size_of(path: Path) -> int:
    """Of a regular file, without opening it."""
    must_be(path, "file")
    try:
        return os.lstat(path).st_size
    except OSError as error:
        raise _refused(path, error) from None


def appending(path: Path) -> BinaryIO:
    """A regular file to add to; a link there is refused."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        must_be(path, "file", may_lack=True)
        raise files.refused(error, path, field="file", verb="written") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        must_be(path, "file")
    return os.fdopen(handle, "ab")


def free_name(path: Path) -> Path:
    """`path`, or the first of `path.2`, `path.3`, ... that nothing has."""
    tried, number = path, 1
    while kind_of(tried):
        number += 1
        tried = path.with_name(f"{path.name}.{number}")
    return tried


def _refused(path: Path, error: OSError | ValueError) -> UserError:
    number = error.errno if isinstance(error, OSError) else None
    where = {"field": "file", "value": str(path)}
    if number in (errno.ENOENT, errno.ENOTDIR):
        return NotWholeError("is missing", **where)
    if number == errno.EIO:
        return NotWholeError("cannot be read from disk (Input/output error)", **where)
    if number == errno.ELOOP:
        rule = "is a symbolic link, where a regular file belongs"
        return UnreadableError(rule, **where, hint=_MOVE_AWAY)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    hint = "fix that and start again; nothing is lost"
    return UnreadableError(f"cannot be read ({reason})", **where, hint=hint)
