"""The index of a checkpoint of format 1, as torch.distributed.checkpoint wrote it: a pickled
`.metadata`, and files in which every chunk is an archive of torch.save. Both are read as plain data
(inert.py), so that no class is made and no name looked up, whatever the file asks for.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

from fourfold.errors import shorten
from fourfold.result.checkpoint import inert
from fourfold.result.checkpoint.index import (
    MAX_NAME,
    VALUE_BYTES,
    Chunk,
    Index,
    StoredTensor,
    is_name,
    must_fill,
    sizes_of,
    value_bytes,
)
from fourfold.result.checkpoint.inert import Call, Name, Outside, refused

# (tensor, offsets) -> (file, first byte, bytes)
Places = dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]
METADATA_FILE = ".metadata"
_MODULE = "torch.distributed.checkpoint"
_FORMATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_STORAGES = {"Double": "F64", "Float": "F32", "BFloat16": "BF16", "Half": "F16"}
_LOCAL_HEADER_BYTES, _SMALL_BYTES = 30, 2**16
# What the zipfile module says of a file that is none.
_ZIP_ERRORS = (
    zipfile.BadZipFile, struct.error, EOFError, KeyError, NotImplementedError, RuntimeError,
    ValueError, OverflowError, IndexError,
)  # fmt: skip


def loads(content: bytes, real_sizes: Mapping[str, int]) -> Index:
    """The index that such metadata amounts to, checked as far as it goes without the archives."""
    fields = _fields(inert.loads(content), f"{_MODULE}.metadata", "Metadata")
    places = _places(_dict(fields, "storage_data"), real_sizes)
    tensors = {}
    for name, plain in _dict(fields, "state_dict_metadata").items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise refused("a tensor has no proper name")
        tensors[name] = stored = _stored(name, plain, places)
        must_fill(name, stored)
    if places:
        raise refused("it places chunks of tensors that it does not have")
    return Index({}, tensors)


def _stored(name: str, plain: object, places: Places) -> StoredTensor:
    fields = _fields(plain, f"{_MODULE}.metadata", "TensorStorageMetadata")
    kind = fields.get("properties")
    _must_be(kind, f"{_MODULE}.metadata", "TensorProperties")
    assert isinstance(kind, Call)
    dtype = kind.state[0] if isinstance(kind.state, tuple) and kind.state else None
    if not isinstance(dtype, Name) or dtype.module != "torch" or dtype.name not in _FORMATS:
        raise refused(f"{name} has a format that is not read")
    listed = fields.get("chunks")
    if not isinstance(listed, list):
        raise refused(f"{name} has no list of chunks")
    chunks = []
    for chunk in listed:
        part = _fields(chunk, f"{_MODULE}.metadata", "ChunkStorageMetadata")
        offsets, sizes = (_size(part.get(key), name) for key in ("offsets", "sizes"))
        # Taken out, so that a chunk that is listed twice finds no place.
        place = places.pop((name, offsets), None)
        if place is None:
            raise refused(f"a chunk of {name} has no place of its own")
        chunks.append(Chunk(offsets, sizes, *place, archive=True))
    return StoredTensor(_FORMATS[dtype.name], _size(fields.get("size"), name), tuple(chunks))


def _places(storage: dict[Any, Any], real_sizes: Mapping[str, int]) -> Places:
    """Inside real files, none over another."""
    places: Places = {}
    for key, value in storage.items():
        index = _fields(key, f"{_MODULE}.metadata", "MetadataIndex")
        info = _fields(value, f"{_MODULE}.filesystem", "_StorageInfo")
        name, file = index.get("fqn"), info.get("relative_path")
        start, size = info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(file, str) or not is_name(file):
            raise refused("a file in it is no name in the folder")
        if type(start) is not int or type(size) is not int:
            raise refused(f"a chunk of {name} has no place in its file")
        if file not in real_sizes or not 0 <= start < start + size <= real_sizes[file]:
            raise refused(f"a chunk of {name} lies outside of the folder's files")
        if info.get("transform_descriptors"):
            raise refused(f"a chunk of {name} is compressed")
        place = (name, _size(index.get("offset"), name))
        if place in places:
            raise refused(f"a chunk of {name} is placed twice")
        places[place] = (file, start, size)
    end = ("", 0)
    for file, start, size in sorted(places.values()):
        if file == end[0] and start < end[1]:
            raise refused(f"chunks in {file} overlap")
        end = (file, start + size)
    return places


def _fields(record: object, module: str, name: str) -> dict[Any, Any]:
    _must_be(record, module, name)
    assert isinstance(record, Call)
    if not isinstance(record.state, dict):
        raise refused(f"a {name} in it has no fields")
    return record.state


def _must_be(record: object, module: str, name: str) -> None:
    if not isinstance(record, Call) or record.what != Name(module, name):
        other = record.what if isinstance(record, Call) else None
        asked = f", but {shorten(str(other))}" if isinstance(other, Name) else ""
        raise refused(f"it holds no {module}.{name} where one belongs{asked}")


def _dict(fields: dict[Any, Any], name: str) -> dict[Any, Any]:
    table = fields.get(name)
    if not isinstance(table, dict):
        raise refused(f"it has no {name}")
    return table


def _size(record: object, name: str) -> tuple[int, ...]:
    _must_be(record, "torch", "Size")
    assert isinstance(record, Call)
    return sizes_of(record.args[0] if len(record.args) == 1 else None, name)


def locate(stream: BinaryIO, chunk: Chunk, dtype: str) -> Chunk:
    """The plain bytes inside a chunk's archive, with the archive's own checksum of them."""
    window = _Window(stream, chunk.start, chunk.size)
    try:
        with zipfile.ZipFile(window) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            pickled = _small(archive, entries["data.pkl"])
            order = _small(archive, entries["byteorder"]) if "byteorder" in entries else b"little"
            data = entries[f"data/{_key(inert.loads(pickled), chunk, dtype)}"]
        window.seek(data.header_offset)
        names = struct.unpack("<HH", window.read(_LOCAL_HEADER_BYTES)[26:])
    except _ZIP_ERRORS as error:
        if isinstance(error, inert.UnreadableError):
            raise
        raise refused(f"an archive in {chunk.file} can't be read ({error})") from None
    at = data.header_offset + _LOCAL_HEADER_BYTES + sum(names)
    size = value_bytes(dtype, chunk.sizes)
    if data.compress_type != zipfile.ZIP_STORED or data.file_size != size or at + size > chunk.size:
        raise refused(f"an archive in {chunk.file} does not hold the values of its chunk")
    if order != b"little":
        raise refused(f"the values in {chunk.file} are big-endian")
    return Chunk(chunk.offsets, chunk.sizes, chunk.file, chunk.start + at, size, (data.CRC,))


def _small(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    if entry.file_size > _SMALL_BYTES or entry.compress_type != zipfile.ZIP_STORED:
        raise refused(f"an archive's {entry.filename[:40]!r} is too large")
    return archive.read(entry)


def _key(record: object, chunk: Chunk, dtype: str) -> str:
    """The storage's name, if the archive holds one tensor: this one, whole, row after row."""
    _must_be(record, "torch._utils", "_rebuild_tensor_v2")
    assert isinstance(record, Call)
    storage, offset, sizes, strides = (*record.args, None, None, None, None)[:4]
    named = storage.key if isinstance(storage, Outside) else None
    if not isinstance(named, tuple) or len(named) != 5 or not isinstance(named[2], str):
        raise refused("an archive holds no storage")
    kind = named[1]
    if not isinstance(kind, Name) or kind.module != "torch":
        raise refused("an archive holds no storage of torch's")
    if _STORAGES.get(kind.name.removesuffix("Storage")) != dtype:
        raise refused(f"an archive holds {kind.name}, where {dtype} belongs")
    whole = named[4] * VALUE_BYTES[dtype] if isinstance(named[4], int) else -1
    # Of rows in order; torch gives a size of 1 the stride that it would have.
    in_order = tuple(math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes)))
    if (offset, sizes, strides) != (0, chunk.sizes, in_order):
        raise refused("an archive holds a part of a tensor, or another one")
    if whole != value_bytes(dtype, chunk.sizes):
        raise refused("an archive's storage is not of its tensor's size")
    return named[2]


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, stream: BinaryIO, start: int, size: int) -> None:
        self._stream, self._start, self._size, self._at = stream, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._start + self._at)
        content = self._stream.read(wanted) or b""
        self._at += len(content)
        return content
