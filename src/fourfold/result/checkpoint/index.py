"""The index of a checkpoint: every file, tensor and chunk in index.json, with checksums.

A chunk is a rectangle of a tensor, summed in blocks so that a reader of a few rows checks what it
reads. Chunks fill their tensor and their file exactly, and no size is believed beyond the files'.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fourfold.errors import UserError
from fourfold.result.files.stored import UnreadableError, combine, digits, seal, unseal
from fourfold.spec import codec, texts

INDEX_FILE = "index.json"
VERSION = 1
BLOCK_BYTES = 2**22
MAX_INDEX_BYTES = 2**29
# safetensors' names of formats -> bytes of a value.
VALUE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# One name in the folder itself.
_FILE_NAME = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\Z")
_SUM = re.compile(r"[0-9a-f]{8}\Z")
MAX_NAME = 512
_MAX_DIMS, _MAX_SIZE = 4, 2**48


def _sum(text: str) -> str:
    if _SUM.fullmatch(text) is None:
        raise UserError("is not eight digits of a crc32")
    return text


Sum = Annotated[str, _sum]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `start + size` of `file` hold the part at `offsets` with `sizes`; `crc32`:
    of each block."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    size: int
    crc32: tuple[Sum, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor by its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class FileEntry:
    """`header_size` counts everything before the first chunk."""

    size: int
    crc32: Sum
    header_size: int
    header_crc32: Sum


@dataclass(frozen=True, slots=True)
class Index:
    block_bytes: int
    files: dict[str, FileEntry]
    tensors: dict[str, StoredTensor]


def is_name(name: str) -> bool:
    """A plain name of a file in the folder: no path, no '..', nothing odd to print."""
    return len(name) <= 100 and _FILE_NAME.fullmatch(name) is not None


def dumps(index: Index) -> bytes:
    """The sealed file; a tensor on a line."""
    plain: dict[str, Any] = {"type": "CheckpointIndex", "version": VERSION, **codec.encode(index)}
    tensors = plain.pop("tensors").items()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in tensors)
    return seal(f'{json.dumps(plain)[:-1]},\n"tensors": {{\n{lines}}}}}')


def loads(content: bytes, real_sizes: Mapping[str, int]) -> Index:
    """Read and check; `real_sizes` are those that the files of the folder have."""
    plain = texts.parse_json(unseal(content, INDEX_FILE))
    if not isinstance(plain, dict) or plain.pop("type", None) != "CheckpointIndex":
        raise refused("it is not a checkpoint index")
    version = plain.pop("version", None)
    if type(version) is not int or version != VERSION:
        rule = f"its {INDEX_FILE} has a version that this fourfold does not read"
        rule = f"{rule} (it reads {VERSION})"
        raise UnreadableError(rule, field="version", value=version, hint="update fourfold")
    try:
        index = codec.decode(Index, plain)
    except UserError as error:
        raise refused(f"{error.field[:80]} {error.rule}") from None
    check(index, real_sizes)
    return index


def check(index: Index, real_sizes: Mapping[str, int]) -> None:
    """Files are there, tensors filled exactly, and every byte belongs to one chunk."""
    if not 0 < index.block_bytes <= _MAX_SIZE:
        raise refused("its blocks have no size from 1 to 2^48")
    chunks: dict[str, list[Chunk]] = {name: [] for name in index.files}
    for name, entry in index.files.items():
        if not is_name(name) or real_sizes.get(name) != entry.size:
            raise refused(f"it names a file {name!r} that is not in the folder as it says")
    for name, stored in index.tensors.items():
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise refused("a tensor has no proper name")
        if stored.dtype not in VALUE_BYTES:
            rule = f"its tensor {name} has a format that this fourfold does not read"
            hint = f"read are {', '.join(VALUE_BYTES)}; update fourfold"
            raise UnreadableError(rule, field="dtype", value=stored.dtype, hint=hint)
        must_fill(name, stored)
        for chunk in stored.chunks:
            if chunk.file not in chunks:
                raise refused(f"{name} lies in {chunk.file!r}, which is not one of its files")
            if chunk.size != value_bytes(stored.dtype, chunk.sizes):
                raise refused(f"a chunk of {name} has another size than its values")
            if len(chunk.crc32) != -(-chunk.size // index.block_bytes):
                raise refused(f"a chunk of {name} has not one checksum for each block")
            chunks[chunk.file].append(chunk)
    for name, entry in index.files.items():
        _must_fill_file(name, entry, chunks[name], index.block_bytes)


def must_fill(name: str, stored: StoredTensor) -> None:
    """Chunks cover every value once. A corner inside belongs to an even number of chunks, and only
    the tensor's own corners are left over, where each value is covered an odd number of times; and
    volumes add up to the tensor's, so that number is one."""
    if not 0 < len(stored.shape) <= _MAX_DIMS or max(stored.shape) > _MAX_SIZE:
        raise refused(f"{name} has not 1 to {_MAX_DIMS} sizes of at most 2^48")
    volume, left = 0, set[tuple[int, ...]]()
    for chunk in stored.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(stored.shape) and all(
            offset >= 0 and size > 0 and offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, stored.shape, strict=True)
        )
        if not inside:
            raise refused(f"a chunk of {name} lies outside of it")
        volume += math.prod(chunk.sizes)
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        left ^= set(itertools.product(*((offset, offset + size) for offset, size in ends)))
    corners = set(itertools.product(*((0, size) for size in stored.shape)))
    if volume != math.prod(stored.shape) or left != corners:
        raise refused(f"the chunks of {name} do not fill it, each value once")


def _must_fill_file(name: str, entry: FileEntry, chunks: Sequence[Chunk], block_bytes: int) -> None:
    """Header, then chunk after chunk, to the end; the sums of the parts make that of the file."""
    if entry.header_size < 0:
        raise refused(f"the header of {name} has no size")
    at, total = entry.header_size, int(entry.header_crc32, 16)
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if chunk.start != at:
            raise refused(f"chunks in {name} overlap or leave room between them")
        at += chunk.size
        for number, crc32 in enumerate(chunk.crc32):
            block = min(block_bytes, chunk.size - number * block_bytes)
            total = combine(total, int(crc32, 16), block)
    if at != entry.size:
        raise refused(f"chunks in {name} end at byte {at:,}, the file at {entry.size:,}")
    if digits(total) != entry.crc32:
        raise refused(f"the checksum of {name} is not that of its parts")


def value_bytes(dtype: str, sizes: Sequence[int]) -> int:
    return VALUE_BYTES[dtype] * math.prod(sizes)


def refused(what: str) -> UnreadableError:
    """The bytes are those that were written, but do not make sense."""
    hint = "use another checkpoint, or copy this one again from its source"
    return UnreadableError(f"its index is refused: {what}", hint=hint)
