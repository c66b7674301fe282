"""Weights to Hugging Face safetensors: a folder that transformers loads, written file by file, so
that one file's worth is in memory at a time.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fourfold import files
from fourfold.engine.checkpoint.hf_read import CONFIG, INDEX, WHOLE, safetensors, theirs
from fourfold.errors import UserError
from fourfold.spec.hf.tensors import Spot, export_type
from fourfold.spec.hf.write import config_of
from fourfold.spec.model import ModelShape

# transformers' own habit.
_FILE_BYTES = 5 * 10**9
# Published names -> whole tensors.
Source = Callable[[Sequence[str]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is written: a shape, the sequence length it was trained on, the format of the values."""

    model: ModelShape
    seq_len: int
    dtype: torch.dtype
    eos: int | None = None  # the token after each document
    file_bytes: int = _FILE_BYTES

    def files(self) -> list[dict[str, list[tuple[str, Spot]]]]:
        """File by file: their tensors, and which of ours each is made of."""
        parts_by_file: list[dict[str, list[tuple[str, Spot]]]] = [{}]
        filled = 0
        for name, size, ours in theirs(export_type(self.model), self.model, self.seq_len):
            count = self.dtype.itemsize * math.prod(size)
            if parts_by_file[-1] and filled + count > self.file_bytes:
                parts_by_file.append({})
                filled = 0
            parts_by_file[-1][name] = ours
            filled += count
        return parts_by_file


def export(source: Source, what: Export, out: Path, say: Callable[[str], None]) -> list[str]:
    """The names of the files; the folder `out` appears when all of them are on the disk."""
    save = safetensors().torch.save_file
    making = out.with_name(f".{out.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    plan = what.files()
    index: dict[str, str] = {}
    total = 0
    try:
        dtype = str(what.dtype).removeprefix("torch.")
        config = config_of(what.model, seq_len=what.seq_len, dtype=dtype)
        config["eos_token_id"] = what.eos
        files.write_text(making / CONFIG, json.dumps(config, indent=2) + "\n")
        for number, tensors in enumerate(plan):
            file = f"model-{number + 1:05d}-of-{len(plan):05d}.safetensors"
            file = file if len(plan) > 1 else WHOLE
            say(f"{file}, {number + 1} of {len(plan)}")
            made = _made(source, tensors, what.dtype)
            save(made, making / file, metadata={"format": "pt"})
            shutil.copymode(making / CONFIG, making / file)  # safetensors makes it ours alone
            files.sync(making / file)
            index |= dict.fromkeys(made, file)
            total += sum(tensor.nbytes for tensor in made.values())
        if len(plan) > 1:
            plain = {"metadata": {"total_size": total}, "weight_map": index}
            files.write_text(making / INDEX, json.dumps(plain, indent=2) + "\n")
        publish(making, out)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror or error})", field="out", value=str(out)
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return sorted(path.name for path in out.iterdir())


def _made(
    source: Source, tensors: dict[str, list[tuple[str, Spot]]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Ours joined along their outputs, turned where theirs are [in, out]."""
    ours = source([name for parts in tensors.values() for name, _ in parts])
    made = {}
    for theirs_name, parts in tensors.items():
        converted = [ours.pop(name).to(dtype) for name, _ in parts]
        joined = torch.cat(converted) if len(converted) > 1 else converted[0]
        made[theirs_name] = (joined.T if parts[0][1].transposed else joined).contiguous()
    return made


def publish(making: Path, out: Path) -> None:
    """Replace what an earlier export left; the caller has seen that it is nothing else."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        os.rename(out, old)
    os.rename(making, out)
    shutil.rmtree(old, ignore_errors=True)
