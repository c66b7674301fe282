"""What does a file of the store hold? Plain data, once its own checksum is seen to be right.

The checksum finds damage and edits; it does not prove who wrote a file. What comes back is checked
like any other input. Files from before there were checksums are read without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.files.inside import NotWholeError
from fourfold.result.files.sealed import is_sealed, unseal
from fourfold.spec import codec

_CHANGED = UserError(
    "was changed after it was written: its checksum does not match",
    hint="restore it from a copy, or remove the checksum to keep the change",
)


def read_stored(
    path: Path, *, field: str = "run", max_bytes: int = files.MAX_STORED_BYTES
) -> dict[str, Any]:
    """The table a stored file holds, or an error that says what is wrong with it."""
    content = files.read_own(path, field=field, max_bytes=max_bytes)
    try:
        return _opened(content, path.name)
    except UserError as error:
        raise UserError(error.rule, field=field, value=str(path), hint=error.hint) from None


def _opened(content: bytes, name: str) -> dict[str, Any]:
    sealed = is_sealed(content)
    try:
        text = unseal(content, name) if sealed else content.decode()
    except NotWholeError:
        raise _CHANGED from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text") from None
    plain = codec.parse_json(text)
    if not isinstance(plain, dict):
        raise UserError("is not a JSON object")
    if "crc32" in plain:  # it had one, in another place
        raise _CHANGED
    return plain
