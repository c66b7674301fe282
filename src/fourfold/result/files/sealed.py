"""JSON that carries its own checksum, and checksums of bytes that were summed in parts.

The last line of a sealed file is the crc32 of all bytes before that line: the file stays plain
JSON, and every change of a single bit is seen. A checksum finds damage, not intent.
"""

from __future__ import annotations

import functools
import re
import zlib

from fourfold.result.files.inside import NotWholeError

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
    found = _SEAL.search(content[-2 * _SEAL_BYTES :])
    body = content[: len(content) - _SEAL_BYTES]
    if found is None or f"{zlib.crc32(body):08x}".encode() != found[1]:
        raise changed(name)
    try:
        return body.decode() + "}"
    except UnicodeDecodeError:
        raise changed(name) from None


def changed(name: str) -> NotWholeError:
    return NotWholeError(f"its file {name} has changed since it was written: it is damaged")


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
