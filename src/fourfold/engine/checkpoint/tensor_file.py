"""Rectangles of tensors in files of safetensors' layout (length, JSON header, values), which any
safetensors library reads; here they are read by the checkpoint's index, and every block is
checked."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.result.checkpoint.index import BLOCK_BYTES, Chunk, FileEntry, Index, StoredTensor
from fourfold.result.files import stored

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Values begin at a multiple of this, and each chunk at a multiple of its own values' size.
_ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class StateShard:
    """`tensor` is the part at `offsets` of the tensor `name`, whose whole has `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written, to tell the one that makes the index."""

    file: str
    entry: FileEntry
    chunks: tuple[tuple[str, str, tuple[int, ...], Chunk], ...]


def key_of(item: StateShard) -> str:
    """A chunk's name in its file: the tensor's, and which part where it is not all of it."""
    if tuple(item.tensor.shape) == item.shape:
        return item.name
    ends = zip(item.offsets, item.tensor.shape, strict=True)
    return f"{item.name}[{', '.join(f'{first}:{first + size}' for first, size in ends)}]"


@torch.no_grad()
def write_file(path: Path, items: Sequence[StateShard], tick: Callable[[], None]) -> Written:
    """Values of wider formats first, so that all are aligned; no room is left between chunks."""
    ordered = sorted(items, key=lambda item: -item.tensor.element_size())
    header = _header(ordered)
    at, total, chunks = len(header), zlib.crc32(header), []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "wb") as stream:
        stream.write(header)
        for item in ordered:
            sums = []
            for block in _blocks(item.tensor):
                crc32 = zlib.crc32(block)
                sums.append(stored.digits(crc32))
                total = stored.combine(total, crc32, len(block))
                stream.write(block)
                tick()
            size = item.tensor.nbytes
            chunk = Chunk(item.offsets, tuple(item.tensor.shape), path.name, at, size, tuple(sums))
            chunks.append((item.name, NAMES[item.tensor.dtype], item.shape, chunk))
            at += size
        stream.flush()
        os.fsync(stream.fileno())
    sums = (stored.digits(total), stored.digits(zlib.crc32(header)))
    return Written(path.name, FileEntry(at, sums[0], len(header), sums[1]), tuple(chunks))


def _header(items: Sequence[StateShard]) -> bytes:
    plain: dict[str, Any] = {"__metadata__": {"format": "pt", "made_by": "fourfold"}}
    at = 0
    for item in items:
        end = at + item.tensor.nbytes
        plain[key_of(item)] = {
            "dtype": NAMES[item.tensor.dtype],
            "shape": list(item.tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    assert len(plain) == len(items) + 1, "a rank writes a rectangle once"
    text = json.dumps(plain, separators=(",", ":")).encode()
    padded = text.ljust(-(-(len(text) + 8) // _ALIGN_BYTES) * _ALIGN_BYTES - 8)
    return struct.pack("<Q", len(padded)) + padded


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, row after row, in blocks; from a GPU or out of order, copied in parts."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        content = memoryview(_bytes_of(tensor))
        for first in range(0, len(content), BLOCK_BYTES):
            yield content[first : first + BLOCK_BYTES]
        return
    row_bytes = max(1, tensor.nbytes // tensor.shape[0])
    rows, left = max(1, BLOCK_BYTES // row_bytes), bytearray()
    for first in range(0, tensor.shape[0], rows):
        left += memoryview(_bytes_of(tensor[first : first + rows].cpu().contiguous()))
        while len(left) >= BLOCK_BYTES:
            yield memoryview(bytes(left[:BLOCK_BYTES]))
            del left[:BLOCK_BYTES]
    if left:
        yield memoryview(left)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def index_of(parts: Sequence[Written]) -> Index:
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for name, dtype, shape, chunk in (chunk for part in parts for chunk in part.chunks):
        known = tensors.setdefault(name, (dtype, shape, []))
        assert known[:2] == (dtype, shape), f"ranks disagree on {name}"
        known[2].append(chunk)
    stored = {
        name: StoredTensor(dtype, shape, tuple(sorted(chunks, key=lambda chunk: chunk.offsets)))
        for name, (dtype, shape, chunks) in sorted(tensors.items())
    }
    return Index(BLOCK_BYTES, {part.file: part.entry for part in parts}, stored)


@dataclass(frozen=True, slots=True)
class Read:
    """A part of a chunk and where in a rectangle it goes; both as (first, last) by dimension."""

    chunk: Chunk
    dtype: str
    source: tuple[tuple[int, int], ...]
    target: tuple[tuple[int, int], ...]
    item: StateShard


def reads_of(items: Sequence[StateShard], index: Index) -> list[Read]:
    """What to read for these rectangles; refused where the checkpoint does not hold it exactly."""
    reads = []
    for item in items:
        stored = index.tensors.get(item.name)
        if stored is None:
            raise _lacks(f"has no tensor {item.name}")
        if stored.shape != item.shape:
            has = f"has {item.name} of shape {stored.shape}"
            raise _lacks(f"{has}, but the model needs {item.shape}")
        saved, wanted = DTYPES[stored.dtype], item.tensor.dtype
        if torch.promote_types(saved, wanted) != wanted:
            raise _lacks(f"has {item.name} as {saved}, which would lose digits as {wanted}")
        reads += [read for chunk in stored.chunks if (read := _overlap(chunk, stored.dtype, item))]
    return reads


def _lacks(what: str) -> UserError:
    hint = "resume with the model and dtypes it was saved with"
    return UserError(what, field="checkpoint", hint=hint)


def _overlap(chunk: Chunk, dtype: str, item: StateShard) -> Read | None:
    source, target = [], []
    for has, size, wants, length in zip(
        chunk.offsets, chunk.sizes, item.offsets, item.tensor.shape, strict=True
    ):
        first, last = max(has, wants), min(has + size, wants + length)
        if first >= last:
            return None
        source.append((first - has, last - has))
        target.append((first - wants, last - wants))
    return Read(chunk, dtype, tuple(source), tuple(target), item)


@torch.no_grad()
def read_all(
    reads: Sequence[Read], folder: Path, index: Index, tick: Callable[[], None] | None = None
) -> None:
    """Fill the rectangles, file by file, each from its beginning to its end."""
    by_file: dict[str, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.chunk.file, []).append(read)
    for name in sorted(by_file):
        with stored.opened(folder / name) as (stream, _):
            entry = index.files.get(name)
            if entry is not None:
                header = _exactly(stream, 0, entry.header_size, name)
                if stored.digits(zlib.crc32(header)) != entry.header_crc32:
                    raise stored.changed(name)
            for read in sorted(by_file[name], key=lambda read: read.chunk.start):
                _read_one(stream, read, index.block_bytes)
                if tick is not None:
                    tick()


def _read_one(stream: BinaryIO, read: Read, block_bytes: int) -> None:
    """By groups of rows of about a block, so that little more than that is in memory."""
    chunk = read.chunk
    part = read.item.tensor
    for dim, (first, last) in enumerate(read.target):
        part = part.narrow(dim, first, last - first)
    columns = tuple(slice(*ends) for ends in read.source[1:])
    row_bytes, blocks = chunk.size // chunk.sizes[0], _Blocks(stream, chunk, block_bytes)
    rows = max(1, block_bytes // row_bytes)
    top, bottom = read.source[0]
    for first in range(top, bottom, rows):
        last = min(bottom, first + rows)
        content = blocks.part(first * row_bytes, last * row_bytes)
        values = torch.frombuffer(content, dtype=DTYPES[read.dtype])
        values = values.view(last - first, *chunk.sizes[1:])[(slice(None), *columns)]
        part[first - top : last - top].copy_(values)


class _Blocks:
    """A chunk's bytes, checked block by block; the last block is kept for the next rows."""

    def __init__(self, stream: BinaryIO, chunk: Chunk, block_bytes: int) -> None:
        self._stream, self._chunk, self._block_bytes = stream, chunk, block_bytes
        self._number, self._content = -1, b""

    def part(self, first: int, last: int) -> bytearray:
        content_part = bytearray()
        for number in range(first // self._block_bytes, -(-last // self._block_bytes)):
            content, start = self._block(number), number * self._block_bytes
            content_part += memoryview(content)[max(0, first - start) : last - start]
        return content_part

    def _block(self, number: int) -> bytes:
        if number != self._number:
            start = number * self._block_bytes
            size = min(self._block_bytes, self._chunk.size - start)
            content = _exactly(self._stream, self._chunk.start + start, size, self._chunk.file)
            if stored.digits(zlib.crc32(content)) != self._chunk.crc32[number]:
                raise stored.changed(self._chunk.file)
            self._number, self._content = number, content
        return self._content


def _exactly(stream: BinaryIO, start: int, size: int, name: str) -> bytes:
    stream.seek(start)
    content = stored.take(stream, size)
    if len(content) != size:
        raise stored.changed(name)
    return content
