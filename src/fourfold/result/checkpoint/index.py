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
from typing import Any

from fourfold.result.files.stored import UnreadableError, combine, seal, unseal
from fourfold.spec import texts

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes `start` to `start + size` of `file` hold the part at `offsets` with `sizes`; `sums`:
    crc32 of each block."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    size: int
    sums: tuple[int, ...] = ()


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
    crc32: int
    header_size: int
    header_crc32: int


@dataclass(frozen=True, slots=True)
class Index:
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, StoredTensor]
    block_bytes: int = BLOCK_BYTES


def is_name(name: str) -> bool:
    """A plain name of a file in the folder: no path, no '..', nothing odd to print."""
    return len(name) <= 100 and _FILE_NAME.fullmatch(name) is not None


def dumps(index: Index) -> bytes:
    """The sealed file; a tensor on a line."""
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(_plain(stored))}"
        for name, stored in index.tensors.items()
    )
    known = {
        name: {
            "size": entry.size, "crc32": f"{entry.crc32:08x}",
            "header_size": entry.header_size, "header_crc32": f"{entry.header_crc32:08x}",
        }
        for name, entry in index.files.items()
    }  # fmt: skip
    text = (
        f'{{"type": "CheckpointIndex",\n"version": {VERSION},\n'
        f'"block_bytes": {index.block_bytes},\n'
        f'"files": {json.dumps(known)},\n"tensors": {{\n{lines}}}}}'
    )
    return seal(text)


def _plain(stored: StoredTensor) -> dict[str, Any]:
    names = ("offsets", "sizes", "file", "start", "size")
    chunks = [
        {name: getattr(chunk, name) for name in names}
        | {"crc32": [f"{crc32:08x}" for crc32 in chunk.sums]}
        for chunk in stored.chunks
    ]
    return {"dtype": stored.dtype, "shape": stored.shape, "chunks": chunks}


def loads(content: bytes, real_sizes: Mapping[str, int]) -> Index:
    """Read and check; `real_sizes` are those that the files of the folder have."""
    plain = texts.parse_json(unseal(content, INDEX_FILE))
    if not isinstance(plain, dict) or plain.get("type") != "CheckpointIndex":
        raise refused("it is not a checkpoint index")
    if _whole(plain.get("version"), "version") != VERSION:
        rule = f"its {INDEX_FILE} has a version that this fourfold does not read"
        rule, version = f"{rule} (it reads {VERSION})", plain["version"]
        raise UnreadableError(rule, field="version", value=version, hint="update fourfold")
    block_bytes = _whole(plain.get("block_bytes"), "block_bytes", least=1)
    entries = {name: _entry(table, name) for name, table in _table(plain, "files").items()}
    tensors = {name: _stored(table, name) for name, table in _table(plain, "tensors").items()}
    index = Index(entries, tensors, block_bytes)
    check(index, real_sizes)
    return index


def check(index: Index, real_sizes: Mapping[str, int]) -> None:
    """Files are there, tensors filled exactly, and every byte belongs to one chunk."""
    chunks: dict[str, list[Chunk]] = {name: [] for name in index.files}
    for name, entry in index.files.items():
        if not is_name(name) or real_sizes.get(name) != entry.size:
            raise refused(f"it names a file {name!r} that is not in the folder as it says")
    for name, stored in index.tensors.items():
        must_fill(name, stored)
        for chunk in stored.chunks:
            if chunk.file not in chunks:
                raise refused(f"{name} lies in {chunk.file!r}, which is not one of its files")
            if chunk.size != value_bytes(stored.dtype, chunk.sizes):
                raise refused(f"a chunk of {name} has another size than its values")
            if len(chunk.sums) != -(-chunk.size // index.block_bytes):
                raise refused(f"a chunk of {name} has not one checksum for each block")
            chunks[chunk.file].append(chunk)
    for name, entry in index.files.items():
        _must_fill_file(name, entry, chunks[name], index.block_bytes)


def must_fill(name: str, stored: StoredTensor) -> None:
    """Chunks cover every value once. A corner inside belongs to an even number of chunks, and only
    the tensor's own corners are left over, where each value is covered an odd number of times; and
    volumes add up to the tensor's, so that number is one."""
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
    at, total = entry.header_size, entry.header_crc32
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if chunk.start != at:
            raise refused(f"chunks in {name} overlap or leave room between them")
        at += chunk.size
        for number, crc32 in enumerate(chunk.sums):
            total = combine(total, crc32, min(block_bytes, chunk.size - number * block_bytes))
    if at != entry.size:
        raise refused(f"chunks in {name} end at byte {at:,}, the file at {entry.size:,}")
    if total != entry.crc32:
        raise refused(f"the checksum of {name} is not that of its parts")


def value_bytes(dtype: str, sizes: Sequence[int]) -> int:
    return VALUE_BYTES[dtype] * math.prod(sizes)


def refused(what: str) -> UnreadableError:
    """The bytes are those that were written, but do not make sense."""
    hint = "use another checkpoint, or copy this one again from its source"
    return UnreadableError(f"its index is refused: {what}", hint=hint)


def _table(plain: dict[str, Any], name: str) -> dict[str, Any]:
    table = plain.get(name)
    if not isinstance(table, dict):
        raise refused(f"its {name} are no table")
    return table


def _entry(plain: object, name: str) -> FileEntry:
    if not isinstance(plain, dict):
        raise refused(f"its entry for the file {name!r} is no table")
    return FileEntry(
        size=_whole(plain.get("size"), "size"),
        crc32=_sum(plain.get("crc32")),
        header_size=_whole(plain.get("header_size"), "header_size"),
        header_crc32=_sum(plain.get("header_crc32")),
    )


def _stored(plain: object, name: str) -> StoredTensor:
    if not isinstance(plain, dict) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise refused("a tensor has no proper name or entry")
    dtype, chunks = plain.get("dtype"), plain.get("chunks")
    if not isinstance(dtype, str) or dtype not in VALUE_BYTES:
        rule = f"its tensor {name} has a format that this fourfold does not read"
        hint = f"read are {', '.join(VALUE_BYTES)}; update fourfold"
        raise UnreadableError(rule, field="dtype", value=dtype, hint=hint)
    if not isinstance(chunks, list):
        raise refused(f"the chunks of {name} are no list")
    shape = sizes_of(plain.get("shape"), name)
    return StoredTensor(dtype, shape, tuple(_chunk(chunk, name) for chunk in chunks))


def _chunk(plain: object, name: str) -> Chunk:
    if not isinstance(plain, dict):
        raise refused(f"a chunk of {name} is no table")
    file, sums = plain.get("file"), plain.get("crc32")
    if not isinstance(file, str) or not isinstance(sums, list):
        raise refused(f"a chunk of {name} has no file or no checksums")
    return Chunk(
        offsets=sizes_of(plain.get("offsets"), name),
        sizes=sizes_of(plain.get("sizes"), name),
        file=file,
        start=_whole(plain.get("start"), "start"),
        size=_whole(plain.get("size"), "size"),
        sums=tuple(map(_sum, sums)),
    )


def sizes_of(plain: object, name: str) -> tuple[int, ...]:
    if not isinstance(plain, list | tuple) or not 0 < len(plain) <= _MAX_DIMS:
        raise refused(f"the sizes of {name} are no list of 1 to {_MAX_DIMS} numbers")
    return tuple(_whole(size, name) for size in plain)


def _whole(value: object, name: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_SIZE:
        raise refused(f"a number of {name} is none from {least} to 2^48")
    return value


def _sum(value: object) -> int:
    if not isinstance(value, str) or _SUM.fullmatch(value) is None:
        raise refused("a checksum is not eight digits of a crc32")
    return int(value, 16)
