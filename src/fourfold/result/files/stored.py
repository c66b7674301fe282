"""Files of stored runs and trainings: regular ones, never more bytes than expected; and JSON that
carries its own checksum.

The last line of a sealed file is the crc32 of all bytes before it; older files have none. A
checksum finds damage and edits, not who wrote a file: what comes back is checked like any input.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fourfold import files
from fourfold.errors import UserError
from fourfold.spec import texts


class NotWholeError(UserError):
    """Bytes are missing, or are not those that were written."""


class UnreadableError(UserError):
    """It can't be read by this version, this user or this kind of access; no byte need be wrong."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size."""
    files.require_within(path)
    try:
        # A pipe without a writer would block the opening, and a device be read without end.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from None
    try:
        size = _regular_size(path, os.fstat(handle))
    except UserError:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb", buffering=0) as stream:
        try:
            yield stream, size
        except OSError as error:
            raise _refused(path, error) from None


def _regular_size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableError("is not a regular file", field="file", value=str(path))
    return status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes."""
    with opened(path) as (stream, size):
        if size > limit:
            rule = f"has {size:,} bytes, where at most {limit:,} are expected"
            hint = "is this the right file?"
            raise UnreadableError(rule, field="file", value=str(path), hint=hint)
        return take(stream, size)


def take(stream: BinaryIO, size: int) -> bytes:
    """The next `size` bytes, or what there is of them; one read may give fewer."""
    parts = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]  # no copy of a large block


def size_of(path: Path) -> int:
    """Of a regular file, without opening it."""
    try:
        return _regular_size(path, os.stat(path))
    except OSError as error:
        raise _refused(path, error) from None


def appending(path: Path) -> BinaryIO:
    """A file to add to."""
    files.require_within(path, writes=True)
    try:
        return open(path, "ab")
    except OSError as error:
        raise files.refused(error, path, field="file", verb="written") from None


def free_name(path: Path) -> Path:
    """`path`, or the first of `path.2`, `path.3`, ... that nothing has."""
    tried, number = path, 1
    while os.path.lexists(tried):
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
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    hint = "fix that and start again; nothing is lost"
    return UnreadableError(f"cannot be read ({reason})", **where, hint=hint)


_SEAL = re.compile(rb',\n"crc32": "([0-9a-f]{8})"}\n\Z')
_SEAL_BYTES = len(b',\n"crc32": "01234567"}\n')
# crc32 as zlib counts it: bits reversed, the highest power of x in the lowest bit.
_POLYNOMIAL = 0xEDB88320


def digits(crc32: int) -> str:
    """As it stands in files."""
    return f"{crc32:08x}"


def seal(text: str) -> bytes:
    """A JSON object's text with its checksum as the last field."""
    body = text.rstrip()
    assert body.endswith("}"), "only an object can be sealed"
    content = body[:-1].rstrip().encode()
    return content + f',\n"crc32": "{digits(zlib.crc32(content))}"}}\n'.encode()


def is_sealed(content: bytes) -> bool:
    """Whether it has, or once had, a checksum in its last line."""
    return _SEAL.search(content[-2 * _SEAL_BYTES :]) is not None


def unseal(content: bytes, name: str) -> str:
    """The JSON text without its checksum, once that is seen to be right."""
    seal = _SEAL.search(content[-2 * _SEAL_BYTES :])
    body = content[: len(content) - _SEAL_BYTES]
    if seal is None or digits(zlib.crc32(body)).encode() != seal[1]:
        raise changed(name)
    try:
        return body.decode() + "}"
    except UnicodeDecodeError:
        raise changed(name) from None


def changed(name: str) -> NotWholeError:
    return NotWholeError(f"its file {name} has changed since it was written")


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of two parts together, from that of each; zlib's crc32_combine."""
    return _times(_power(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the crc's."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _power(count: int) -> int:
    """x to the number of bits in `count` bytes."""
    result, factor = 1 << 31, _times(1 << 30, 1 << 30)  # x^0, x^2
    factor = _times(factor, factor)  # x^4
    factor = _times(factor, factor)  # x^8: one byte
    while count:
        if count & 1:
            result = _times(factor, result)
        factor = _times(factor, factor)
        count >>= 1
    return result


def read_stored(
    path: Path, *, field: str = "run", max_bytes: int = files.MAX_STORED_BYTES
) -> dict[str, Any]:
    """The table a stored file holds, or an error that says what is wrong with it."""
    content = files.read_own(path, field=field, max_bytes=max_bytes)
    try:
        text = unseal(content, path.name) if is_sealed(content) else content.decode()
        # A note typed in another encoding has halves of characters; its run is kept.
        plain = texts.parse_json(text, halves=True)
        if not isinstance(plain, dict):
            raise UserError("is not a JSON object")
        if "crc32" in plain:  # it had one, in another place
            raise changed(path.name)
    except NotWholeError:
        rule = "was changed after it was written: its checksum does not match"
        hint = "restore it from a copy, or remove the checksum to keep the change"
        raise UserError(rule, field=field, value=str(path), hint=hint) from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", field=field, value=str(path)) from None
    except UserError as error:
        raise UserError(error.rule, field=field, value=str(path), hint=error.hint) from None
    return plain
