"""Reading and writing user files: writes are atomic, failures say what to do.

An existing file is replaced only by a result of the same kind, known by its mark, or with --force.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from fourfold.errors import UserError

# A spec, table or config larger than this is a mistake (a checkpoint, a device), not an input.
MAX_TEXT_BYTES = 512 * 2**20
# Where a result's mark is looked for, at both ends.
_MARK_BYTES = 4096


def read_text(path: str | Path, *, field: str = "file") -> str:
    """The file's text, or an error that names file and reason. A pipe is read to its end."""
    try:
        # A named pipe without a writer would block for ever; without blocking it reads as empty.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as stream:
            problem = _not_text(os.fstat(handle), os.isatty(handle), path)
            if problem:
                raise UserError(problem[0], field=field, value=str(path), way_out=problem[1])
            os.set_blocking(handle, True)
            content = stream.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise UserError(_TOO_LARGE[0], field=field, value=str(path), way_out=_TOO_LARGE[1])
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UserError:
        raise
    except UnicodeDecodeError:
        raise UserError(
            "is not UTF-8 text", field=field, value=str(path), way_out="name a text file"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot be read ({reason})", field=field, value=str(path), way_out="check the path"
        ) from None


_TOO_LARGE = ("is over 512 MiB", "name a text file")


def _not_text(status: os.stat_result, terminal: bool, path: str | Path) -> tuple[str, str] | None:
    """(rule, way out) for what cannot be a text: folders, disks, /dev/zero."""
    if stat.S_ISDIR(status.st_mode):
        return "is a folder", "name a file in it"
    if stat.S_ISBLK(status.st_mode) or (
        stat.S_ISCHR(status.st_mode) and not terminal and str(path) != os.devnull
    ):
        return "is a device", "name a text file"
    return _TOO_LARGE if status.st_size > MAX_TEXT_BYTES else None


def require_mine(path: str | Path, *, mark: str, force: bool, field: str = "out") -> None:
    """Refuse to replace what fourfold did not write. `mark`: a text near the beginning or the end
    of every such result; '' for files that people edit, which are never replaced unasked."""
    target = Path(path)
    if force or not target.is_file():  # pipes and /dev/stdout are written to, not replaced
        return
    with open(target, "rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        content = stream.read(_MARK_BYTES)
        stream.seek(max(0, size - _MARK_BYTES))
        content += stream.read()
    if not size or (mark and mark.encode() in content):
        return
    what = "exists and is no earlier result of this command" if mark else "exists"
    raise UserError(what, field=field, value=str(path), way_out="add --force, or name another file")


def write_text(path: str | Path, text: str, *, field: str = "out") -> None:
    """Write all of `text` or nothing, as UTF-8; odd bytes of a file name are escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"), field=field)


def write_bytes(path: str | Path, content: bytes, *, field: str = "out") -> None:
    """Write all or nothing: a reader never sees half a file, a crash loses no old one."""
    import tempfile  # 15 ms with what it imports, only paid on writing

    temporary = ""
    try:
        # The target of a link is replaced, not the link.
        target = Path(os.path.realpath(path))
        special = target.exists() and not (target.is_file() or target.is_dir())
        if special or str(path).startswith("/dev/"):
            # A pipe or /dev/stdout is written to: replacing it would destroy it.
            with open(path, "ab", buffering=0) as stream:
                stream.write(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:32]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot be written ({reason})",
            field=field,
            value=str(path),
            way_out="check folder, permissions and free space",
        ) from None


@contextlib.contextmanager
def pending(path: str | Path, *, field: str = "out") -> Iterator[BinaryIO]:
    """A stream whose content becomes the file `path` when the block ends well, else nothing does;
    for what is too large for `write_bytes`."""
    import tempfile

    temporary = ""
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name[:32]}.", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror or error})",
            field=field,
            value=str(path),
            way_out="check folder, permissions and free space",
        ) from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mode_of(path: Path) -> int:
    """Permissions of the file that is replaced, else what the umask gives a new file."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
