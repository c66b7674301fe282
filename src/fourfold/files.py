"""Reading and writing user files: writes are atomic, failures say what to do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fourfold.errors import UserError

# A spec, table or config larger than this is a mistake (a checkpoint, a device), not an input.
MAX_TEXT_BYTES = 512 * 2**20


def read_text(path: str | Path, *, field: str = "file") -> str:
    """The file's text, or an error that names the file and the reason."""
    try:
        path = Path(path)
        if path.is_dir():
            raise UserError(
                "is a folder", field=field, value=str(path), way_out="name a file in it"
            )
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(
                "is over 512 MiB", field=field, value=str(path), way_out="name a text file"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(
            "is not UTF-8 text", field=field, value=str(path), way_out="name a text file"
        ) from None
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"cannot be read ({reason})", field=field, value=str(path), way_out="check the path"
        ) from None


def write_text(path: str | Path, text: str, *, field: str = "out") -> None:
    """Write all of `text` or nothing, as UTF-8."""
    write_bytes(path, text.encode("utf-8"), field=field)


def write_bytes(path: str | Path, content: bytes, *, field: str = "out") -> None:
    """Write all or nothing: a reader never sees half a file, a crash loses no old one."""
    path = Path(path)
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
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


def _mode_of(path: Path) -> int:
    """Permissions of the file that is replaced, else what the umask gives a new file."""
    if path.exists():
        return path.stat().st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
