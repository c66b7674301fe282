"""Files of a checkpoint: read by the safetensors library of a stranger, and by torch's own reader
after an export; rectangles of any kind come back bit for bit; whatever has changed is seen."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fourfold.engine.checkpoint import checkpoint, tensor_file
from fourfold.engine.checkpoint.checkpoint import CheckpointError, read_into
from fourfold.engine.checkpoint.tensor_file import (
    StateShard,
    index_of,
    key_of,
    read_all,
    reads_of,
    write_file,
)
from fourfold.errors import UserError
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint import index
from fourfold.result.checkpoint.folder import CheckpointState
from fourfold.result.files.stored import NotWholeError
from tests.specs import run_spec

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def whole(name: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> StateShard:
    values = torch.randn(shape, generator=torch.manual_seed(seed), dtype=torch.float64).to(dtype)
    return StateShard(name, shape, (0,) * len(shape), values)


def part(item: StateShard, *ends: tuple[int, int]) -> StateShard:
    tensor = item.tensor[tuple(slice(*one) for one in ends)]
    return StateShard(item.name, item.shape, tuple(first for first, _ in ends), tensor)


def state(step: int) -> CheckpointState:
    spec = run_spec("llama-tiny", seq_len=8, precision="fp32")
    return CheckpointState(step=step, updates=step, sequences=step, spec=spec)


def nothing() -> None:
    pass


def test_a_stranger_reads_the_files_with_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    items = [whole(f"model.{n}", 5, 3 + n, dtype=dtype, seed=n) for n, dtype in enumerate(DTYPES)]
    cut = whole("exp_avg.a", 6, 4, seed=9)
    items += [part(cut, (0, 3), (0, 4)), part(cut, (3, 6), (0, 4))]
    checkpoint.save(items, tmp_path, state(3))
    path = tmp_path / "step-00000003" / "tensors-00000.safetensors"
    found = library.load_file(path)
    assert found.keys() == {key_of(item) for item in items}
    assert "exp_avg.a[3:6, 0:4]" in found
    assert all(torch.equal(found[key_of(item)], item.tensor) for item in items)
    # Where values lie is also in the index: no library is needed.
    plain = json.loads((tmp_path / "step-00000003" / "index.json").read_text())
    chunk = plain["tensors"]["exp_avg.a"]["chunks"][1]
    content = path.read_bytes()[chunk["start"] : chunk["start"] + chunk["size"]]
    values = torch.frombuffer(bytearray(content), dtype=torch.float32).view(chunk["sizes"])
    assert torch.equal(values, cut.tensor[3:6])
    assert chunk["start"] % 4 == plain["files"][path.name]["header_size"] % 64 == 0


@pytest.mark.parametrize("block_bytes", [7, 64, 1000, 2**22])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rectangles_come_back_bit_for_bit(tmp_path, monkeypatch, block_bytes, dtype) -> None:
    """Blocks that cut rows and values, chunks and targets that cut each other anyhow."""
    for module in (tensor_file, index):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    matrix, vector = whole("m", 13, 11, dtype=dtype), whole("v", 29, dtype=dtype, seed=1)
    turned = StateShard("t", (11, 13), (0, 0), matrix.tensor.T)  # not contiguous
    items = [part(matrix, (0, 5), (0, 11)), part(matrix, (5, 13), (0, 4)),
             part(matrix, (5, 13), (4, 11)), part(vector, (0, 1)), part(vector, (1, 29)),
             turned]  # fmt: skip
    files = [write_file(tmp_path / f"{n}.safetensors", items[n::2], nothing) for n in (0, 1)]
    made = replace(index_of(files), block_bytes=block_bytes)
    sizes = {file.file: (tmp_path / file.file).stat().st_size for file in files}
    assert index.loads(index.dumps(made), sizes) == made
    chance = random.Random(block_bytes)
    for source in (matrix, vector, turned):
        for _ in range(6):
            ends = [tuple(sorted(chance.sample(range(n + 1), 2))) for n in source.shape]
            right = part(source, *ends)
            item = StateShard(
                right.name, right.shape, right.offsets, torch.zeros_like(right.tensor)
            )
            read_all(reads_of([item], made), tmp_path, made)
            assert torch.equal(item.tensor, right.tensor)


def test_formats_that_lose_digits_and_other_shapes_are_refused(tmp_path: Path) -> None:
    checkpoint.save([whole("model.a", 4, 4, dtype=torch.float32)], tmp_path, state(1))
    found = checkpoints.read(tmp_path / "step-00000001")
    wider = StateShard("model.a", (4, 4), (0, 0), torch.zeros(4, 4, dtype=torch.float64))
    read_into([wider], found)
    assert wider.tensor.abs().sum() > 0
    for name, shape, dtype, words in (
        ("model.a", (4, 4), torch.bfloat16, "would lose digits as torch.bfloat16"),
        ("model.a", (4, 5), torch.float32, r"of shape \(4, 4\), but the model needs \(4, 5\)"),
        ("model.b", (4, 4), torch.float32, "has no tensor model.b"),
    ):
        with pytest.raises(UserError, match=words):
            read_into([StateShard(name, shape, (0, 0), torch.zeros(shape, dtype=dtype))], found)


def test_every_changed_byte_of_a_file_is_seen(tmp_path: Path) -> None:
    right = whole("model.a", 6, 5)
    checkpoint.save([right], tmp_path, state(1))
    found = checkpoints.read(tmp_path / "step-00000001")
    path = found.folder / "tensors-00000.safetensors"
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        item = StateShard("model.a", (6, 5), (0, 0), torch.zeros(6, 5))
        with pytest.raises(NotWholeError, match="has changed since it was written"):
            read_into([item], found)


def test_a_file_that_is_there_already_is_not_written_over(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "x.safetensors").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        write_file(tmp_path / "x.safetensors", [whole("a", 2)], nothing)
    assert victim.read_text() == "mine"


def test_a_failed_save_leaves_no_folder_and_says_why(tmp_path: Path, monkeypatch) -> None:
    checkpoint.save([whole("model.a", 2)], tmp_path, state(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "write_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device; the last good one is st"):
        checkpoint.save([whole("model.a", 2)], tmp_path, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
