"""Checkpoints of format 1 are read as data on every Python: no name in them is looked up, nothing
is called, and what is no checkpoint is refused. Needs no torch."""

from __future__ import annotations

import os
import pickle
import random
import zlib
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import UserError
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint import inert, old_index
from fourfold.result.checkpoint.inert import Call, Name
from fourfold.result.files.stored import UnreadableError

SAMPLE = Path(__file__).parents[1] / "samples" / "training-format-1"
FOLDER = SAMPLE / "checkpoints" / "step-00000004"
METADATA = {"3.11.7": FOLDER / ".metadata", "3.11.2": SAMPLE / "python-3.11.2" / ".metadata"}


def sizes() -> dict[str, int]:
    return {path.name: path.stat().st_size for path in FOLDER.iterdir()}


def test_enums_written_through_getattr_read_the_same() -> None:
    contents = {name: path.read_bytes() for name, path in METADATA.items()}
    assert b"getattr" in contents["3.11.2"]
    assert b"getattr" not in contents["3.11.7"]
    one, other = (old_index.loads(content, sizes()) for content in contents.values())
    assert one == other
    assert len(one.tensors) == 33
    assert one.tensors["model.embedding.weight"].shape == (48, 16)


def test_every_chunk_is_found_and_has_its_checksum() -> None:
    index = checkpoints.read_index(checkpoints.read(FOLDER))
    count = 0
    for stored in index.tensors.values():
        for chunk in stored.chunks:
            with open(FOLDER / chunk.file, "rb") as stream:
                found = old_index.locate(stream, chunk, stored.dtype)
                stream.seek(found.start)
                assert (zlib.crc32(stream.read(found.size)),) == found.sums
            count += 1
    assert count == 51


class _Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def _built_class() -> bytes:
    """BUILD on a class itself: what made PosixPath write elsewhere."""
    return b"\x80\x02cpathlib\nPosixPath\nq\x00}q\x01X\x06\x00\x00\x00_flavorK\x01sb."


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(_Evil(os.system, ("touch ran",))),
        pickle.dumps(_Evil(getattr, (Path, "home"))),
        pickle.dumps(_Evil(eval, ("1",))),
        pickle.dumps(_Evil(Path, ("/etc",))),
        pickle.dumps(OrderedDict(a=1)),
        pickle.dumps([1, 2]),
        pickle.dumps({1: 2}),
        _built_class(),
        b"",
        b"\x80\x04.",
        b"\x80\x04" + b"\x85" * 10 + b".",
        b"\x80\x04(" * 1000,
        b"\x80\x04)" + b"\x85" * 200_000 + b"}" + b".",
        b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.",
        b"\x80\x04h\x05.",
        b"\x80\x04\x8a\xff" + b"\x01" * 100,
    ],
)
def test_nothing_in_a_pickle_is_done(content: bytes, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnreadableError, match="its metadata cannot be read"):
        old_index.loads(content, sizes())
    assert not list(tmp_path.iterdir())


def test_calls_are_records() -> None:
    found = inert.loads(pickle.dumps(_Evil(os.system, ("touch ran",))))
    assert isinstance(found, Call)
    assert found.what == Name(os.system.__module__, "system")
    assert found.args == ("touch ran",)


def test_changed_metadata_is_refused_or_says_the_same() -> None:
    """With sizes and checksums that fit: no error but ours, no path outside, no other place."""
    chance, known = random.Random(11), sizes()
    for content in (path.read_bytes() for path in METADATA.values()):
        right = old_index.loads(content, known)
        for _ in range(120):
            changed = bytearray(content)
            for _ in range(chance.choice((1, 1, 2, 8))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            try:
                found = old_index.loads(bytes(changed), known)
            except UserError:
                continue
            for stored in found.tensors.values():
                assert all(chunk.file in known for chunk in stored.chunks)
            assert len(found.tensors) == len(right.tensors)


def test_changed_archives_are_refused_or_hold_the_same(tmp_path: Path) -> None:
    index = checkpoints.read_index(checkpoints.read(FOLDER))
    stored = index.tensors["model.embedding.weight"]
    chunk, chance = stored.chunks[0], random.Random(3)
    content = (FOLDER / chunk.file).read_bytes()[: chunk.size]
    path = tmp_path / chunk.file
    path.write_bytes(content)
    with open(path, "rb") as stream:
        right = old_index.locate(stream, chunk, "F32")
    for _ in range(400):
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            with open(path, "rb") as stream:
                found = old_index.locate(stream, chunk, "F32")
        except UserError:
            continue
        assert found.size == right.size
        assert 0 <= found.start <= len(content) - found.size
    for wrong in (replace(chunk, sizes=(16, 24)), replace(chunk, sizes=(25, 16))):
        path.write_bytes(content)
        with open(path, "rb") as stream, pytest.raises(UnreadableError):
            old_index.locate(stream, wrong, "F32")


def test_places_outside_the_folder_are_refused() -> None:
    content = METADATA["3.11.7"].read_bytes()
    for other in (b"../../passwd", b"/etc/passwdx", b"__0_0.distcq"):
        with pytest.raises(UnreadableError):
            old_index.loads(content.replace(b"__0_0.distcp", other), sizes())
    with pytest.raises(UnreadableError, match="lies outside of the folder's files"):
        old_index.loads(content, {**sizes(), "__0_0.distcp": 100})
