"""JSON that carries its own checksum, and checksums of bytes that were summed in parts.

The last line of a sealed file is the crc32 of all bytes before that line: the file stays plain
JSON, and every change of a single bit is seen. A checksum finds damage and edits; it does not prove
who wrote a file, so what comes back is checked like any other input. Files from before there were
checksums are read without.
"""

from __future__ import annotations

import functools
import re
import zlib
from pathlib import Path
from typing import Any

from fourfold import files
from fourfold.errors import UserError
from fourfold.result.files.inside import NotWholeError
from fourfold.spec import codec

_SEAL = re.compile(rb',\n"crc32": "([0-9a-f]{8})"}\n\Z')
_SEAL_BYTES = len(b',\n"crc32": "01234567"}\n')
# crc32 as zlib counts it: bits reversed, the highest power of x in the lowest bit.
_POLYNOMIAL = 0xEDB88320


def seal(text: str) -> bytes:
    """A JSON object's text with its checksum as the last field."""
    body = text.rstrip()
    assert body.endswith("}"), "only an object can be sealed"
    content = body[:-1].rstrip().encode()
    return content + f',\n"crc32": "{zlib.crc32(content):08x}"}}\n'.encode()


def is_sealed(content: bytes) -> bool:
    """Whether it has, or once had, a checksum in its last line."""
    return _SEAL.search(content[-2 * _SEAL_BYTES :]) is not None


def unseal(content: bytes, name: str) -> str:
    """The JSON text without its checksum, once that is seen to be right."""
    seal = _SEAL.search(content[-2 * _SEAL_BYTES :])
    body = content[: len(content) - _SEAL_BYTES]
    if seal is None or f"{zlib.crc32(body):08x}".encode() != seal[1]:
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
        plain = codec.parse_json(text)
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
