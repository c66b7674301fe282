"""The index of a checkpoint: read back as written; whatever does not fill files and tensors exactly
is refused, with or without a checksum that fits. Needs no torch."""

from __future__ import annotations

import json
import math
import random
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.result.checkpoint.index import (
    BLOCK_BYTES,
    VALUE_BYTES,
    Chunk,
    FileEntry,
    Index,
    StoredTensor,
    dumps,
    is_name,
    loads,
    must_fill,
)
from fourfold.result.files.stored import (
    NotWholeError,
    UnreadableError,
    combine,
    digits,
    is_sealed,
    seal,
    unseal,
)

HEADER = b"h" * 64


def laid_out(tensors: dict[str, tuple[str, tuple[int, ...], list[tuple]]]) -> tuple[Index, dict]:
    """Chunks one after the other in two files, and what the files hold."""
    content = {"a.safetensors": bytearray(HEADER), "b.safetensors": bytearray(HEADER)}
    chance, stored = random.Random(1), {}
    for number, (name, (dtype, shape, parts)) in enumerate(tensors.items()):
        chunks = []
        for place, (offsets, sizes) in enumerate(parts):
            file = list(content)[(number + place) % 2]
            values = chance.randbytes(VALUE_BYTES[dtype] * math.prod(sizes))
            start = len(content[file])
            content[file] += values
            blocks = range(0, len(values), BLOCK_BYTES)
            sums = tuple(digits(zlib.crc32(values[b : b + BLOCK_BYTES])) for b in blocks)
            chunks.append(Chunk(offsets, sizes, file, start, len(values), sums))
        stored[name] = StoredTensor(dtype, shape, tuple(chunks))
    entries = {
        name: FileEntry(
            len(held), digits(zlib.crc32(held)), len(HEADER), digits(zlib.crc32(HEADER))
        )
        for name, held in content.items()
    }
    return Index(BLOCK_BYTES, entries, stored), {name: len(held) for name, held in content.items()}


def example() -> tuple[Index, dict[str, int]]:
    return laid_out(
        {
            "model.a": ("F32", (4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]),
            "model.b": ("BF16", (5,), [((0,), (3,)), ((3,), (2,))]),
            "exp_avg.a": ("F64", (2, 2, 2), [((0, 0, 0), (2, 2, 2))]),
        }
    )


def test_it_is_read_back_as_written() -> None:
    index, sizes = example()
    assert loads(dumps(index), sizes) == index
    json.loads(dumps(index))  # plain JSON


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple, tuple]]]:
    """A shape and rectangles that fill it, by cutting again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    parts = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, sizes = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if sizes[dim] < 2:
            parts.append((offsets, sizes))
            continue
        at = draw(st.integers(1, sizes[dim] - 1))
        first = tuple(at if d == dim else n for d, n in enumerate(sizes))
        rest = tuple(n - at if d == dim else n for d, n in enumerate(sizes))
        moved = tuple(o + at if d == dim else o for d, o in enumerate(offsets))
        parts += [(offsets, first), (moved, rest)]
    return shape, parts


@given(cut_up(), st.data())
def test_rectangles_fill_a_tensor_or_are_refused(made: Any, data: st.DataObject) -> None:
    shape, parts = made
    index, sizes = laid_out({"x": ("F16", shape, parts)})
    assert loads(dumps(index), sizes) == index
    chunks = list(index.tensors["x"].chunks)
    number = data.draw(st.integers(0, len(chunks) - 1))
    kind = data.draw(st.sampled_from(["twice", "missing", "moved", "grown", "shape"]))
    one = chunks[number]
    if kind == "twice":
        chunks.append(one)
    elif kind == "missing":
        del chunks[number]
    elif kind == "moved":
        chunks[number] = replace(one, offsets=(one.offsets[0] + 1, *one.offsets[1:]))
    elif kind == "grown":
        chunks[number] = replace(one, sizes=(one.sizes[0] + 1, *one.sizes[1:]))
    else:
        shape = (shape[0] + 1, *shape[1:])
    wrong = Index(BLOCK_BYTES, index.files, {"x": StoredTensor("F16", shape, tuple(chunks))})
    with pytest.raises(UnreadableError):
        loads(dumps(wrong), sizes)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    parts = zlib.crc32(first), zlib.crc32(second)
    assert combine(*parts, len(second)) == zlib.crc32(first + second)


def test_every_changed_bit_is_seen() -> None:
    index, sizes = example()
    content = dumps(index)
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            with pytest.raises(UserError):
                loads(bytes(changed), sizes)
    for length in range(0, len(content), 7):
        with pytest.raises(NotWholeError):
            loads(content[:length], sizes)


def test_a_seal_is_of_everything_before_it() -> None:
    sealed = seal('{"a": 1}\n')
    assert is_sealed(sealed)
    assert json.loads(sealed)["a"] == 1
    assert unseal(sealed, "x") == '{"a": 1}'
    with pytest.raises(NotWholeError, match="x has changed"):
        unseal(sealed.replace(b"1", b"2", 1), "x")
    assert not is_sealed(b'{"a": 1}')


def changed_by(path: tuple, value: object) -> bytes:
    """The example with one thing changed, sealed anew."""
    index, _ = example()
    plain = json.loads(dumps(index))
    del plain["crc32"]
    at = plain
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return seal(json.dumps(plain))


ODD = [None, True, -1, 2**60, 1.5, "x", "..", "/dev/zero", "../a", [], [[]], {}, [1, 2, 3, 4, 5]]
CHUNK = ("tensors", "model.a", "chunks", 0)
PLACES = [
    ("type",), ("version",), ("block_bytes",), ("files",), ("tensors",),
    ("files", "a.safetensors"), ("files", "a.safetensors", "size"),
    ("files", "a.safetensors", "crc32"), ("files", "a.safetensors", "header_size"),
    ("files", "a.safetensors", "header_crc32"), ("tensors", "model.a"),
    ("tensors", "model.a", "dtype"), ("tensors", "model.a", "shape"),
    ("tensors", "model.a", "chunks"), CHUNK, (*CHUNK, "offsets"), (*CHUNK, "sizes"),
    (*CHUNK, "file"), (*CHUNK, "start"), (*CHUNK, "size"), (*CHUNK, "crc32"), (*CHUNK, "crc32", 0),
]  # fmt: skip


@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_odd_values_are_refused_though_the_checksum_fits(path: tuple) -> None:
    _, sizes = example()
    for value in ODD:
        with pytest.raises(UnreadableError):
            loads(changed_by(path, value), sizes)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("tensors-00000.safetensors", True), ("__0_0.distcp", True), (".metadata", True),
        ("", False), (".", False), ("..", False), ("a/b", False), ("/etc/passwd", False),
        ("../a", False), ("a\n", False), ("a\0b", False), ("-" * 101, False), ("a" * 101, False),
        ("a..b", False), ("~", False), ("\x1b[2J", False),
    ],
)  # fmt: skip
def test_names_are_single_and_plain(name: str, good: bool) -> None:
    assert is_name(name) is good


def test_files_must_be_there_as_they_are_listed() -> None:
    index, sizes = example()
    for other in ({}, {**sizes, "a.safetensors": 3}, {"a.safetensors": sizes["a.safetensors"]}):
        with pytest.raises(UnreadableError, match="is not in the folder as it says"):
            loads(dumps(index), other)


def test_no_chunks_and_huge_shapes_cost_nothing() -> None:
    for shape in ((2**48,) * 4, (2**48,), (3,)):
        with pytest.raises(UnreadableError, match="do not fill it"):
            must_fill("x", StoredTensor("F32", shape, ()))


def test_deep_and_wide_json_is_refused() -> None:
    for text in ("[" * 100_000, '{"a":' * 50_000, "9" * 100_000, '"\ud800"'):
        content = seal('{"type": "CheckpointIndex", "version": 1, "x": ' + text.encode(
            errors="replace").decode() + "}")  # fmt: skip
        with pytest.raises(UserError):
            loads(content, {})
