"""Checkpoints for others: Hugging Face folders and torch.distributed.checkpoint's format."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, metadata, planner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

from fourfold import files
from fourfold.cost.count import params
from fourfold.errors import UserError
from fourfold.spec.hf.folder import CONFIG, INDEX, WHOLE, safetensors, theirs
from fourfold.spec.hf.tensors import Location, export_type
from fourfold.spec.hf.written import config_of
from fourfold.spec.model import ModelShape

# transformers' own habit.
_FILE_BYTES = 5 * 10**9
# Published names -> whole tensors.
HfSource = Callable[[Sequence[str]], dict[str, Tensor]]
# Name -> (shape, format) of everything to write; and how to get one of them.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
DcpSource = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is written: a shape, the sequence length it was trained on, the format of the values."""

    model: ModelShape
    seq_len: int
    dtype: torch.dtype
    eos: int | None = None  # the token after each document
    file_bytes: int = _FILE_BYTES

    def files(self) -> list[dict[str, list[tuple[str, Location]]]]:
        """File by file: their tensors, and which of ours each is made of."""
        parts_by_file: list[dict[str, list[tuple[str, Location]]]] = [{}]
        filled = 0
        tensors = params.tensors(self.model, self.seq_len)
        for name, size, ours in theirs(export_type(self.model), self.model, tensors):
            count = self.dtype.itemsize * math.prod(size)
            if parts_by_file[-1] and filled + count > self.file_bytes:
                parts_by_file.append({})
                filled = 0
            parts_by_file[-1][name] = ours
            filled += count
        return parts_by_file


def export_hf(source: HfSource, what: Export, out: Path, tick: Callable[[], None]) -> list[str]:
    """The names of the files; one file's worth of tensors is in memory at a time."""
    safetensors()
    from safetensors.torch import save_file as save

    plan = what.files()
    index: dict[str, str] = {}
    total = 0
    with _published(out) as making:
        dtype = str(what.dtype).removeprefix("torch.")
        config = config_of(what.model, seq_len=what.seq_len, dtype=dtype)
        config["eos_token_id"] = what.eos
        files.write_text(making / CONFIG, json.dumps(config, indent=2) + "\n")
        for number, tensors in enumerate(plan):
            file = f"model-{number + 1:05d}-of-{len(plan):05d}.safetensors"
            file = file if len(plan) > 1 else WHOLE
            tick()
            made = _made(source, tensors, what.dtype)
            save(made, making / file, metadata={"format": "pt"})
            shutil.copymode(making / CONFIG, making / file)  # safetensors makes it ours alone
            files.sync(making / file)
            index |= dict.fromkeys(made, file)
            total += sum(tensor.nbytes for tensor in made.values())
        if len(plan) > 1:
            plain = {"metadata": {"total_size": total}, "weight_map": index}
            files.write_text(making / INDEX, json.dumps(plain, indent=2) + "\n")
    return sorted(path.name for path in out.iterdir())


def _made(
    source: HfSource, tensors: dict[str, list[tuple[str, Location]]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Ours joined along their outputs, turned where theirs are [in, out]."""
    ours = source([name for parts in tensors.values() for name, _ in parts])
    made = {}
    for theirs_name, parts in tensors.items():
        # What is added for the choice of experts stays as wide as it is kept.
        kept = theirs_name.endswith("e_score_correction_bias")
        converted = [t if kept else t.to(dtype) for t in (ours.pop(name) for name, _ in parts)]
        joined = torch.cat(converted) if len(converted) > 1 else converted[0]
        made[theirs_name] = (joined.T if parts[0][1].transposed else joined).contiguous()
    return made


@contextlib.contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `out` when all of it is on the disk. An `out` that exists
    is an earlier export: the caller has checked that."""
    making, old = out.with_name(f".{out.name}.part"), out.with_name(f".{out.name}.old")
    for left in (making, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        yield making
        if out.exists():
            os.rename(out, old)
        os.rename(making, out)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot be written ({reason})", field="out", value=str(out)) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


class _Planner(planner.SavePlanner):
    """Hands torch one whole tensor after the other."""

    def __init__(self, shapes: Shapes, source: DcpSource) -> None:
        self._shapes, self._source = shapes, source

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: metadata.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> planner.SavePlan:
        return planner.SavePlan([_item(name, *what) for name, what in self._shapes.items()])

    def create_global_plan(
        self, all_plans: list[planner.SavePlan]
    ) -> tuple[list[planner.SavePlan], metadata.Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: planner.SavePlan) -> planner.SavePlan:
        return new_plan

    def resolve_data(self, write_item: planner.WriteItem) -> Tensor | io.BytesIO:
        return self._source(write_item.index.fqn)


def _item(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> planner.WriteItem:
    size, corner = torch.Size(shape), torch.Size([0] * len(shape))
    return planner.WriteItem(
        index=metadata.MetadataIndex(name, corner),
        type=planner.WriteItemType.SHARD,
        tensor_data=planner.TensorWriteData(
            chunk=metadata.ChunkStorageMetadata(corner, size),
            properties=metadata.TensorProperties(dtype=dtype),
            size=size,
        ),
    )


def export_dcp(shapes: Shapes, source: DcpSource, out: Path) -> list[str]:
    """The names of the files; one tensor is in memory at a time."""
    with _published(out) as making:
        # torch copies ahead only for GPUs; 0 keeps one tensor at a time.
        writer = FileSystemWriter(str(making), sync_files=True, per_thread_copy_ahead=0)
        with warnings.catch_warnings():  # torch says that there are no ranks
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
            try:
                dcp.save({}, storage_writer=writer, planner=_Planner(shapes, source), no_dist=True)
            except CheckpointException as error:
                raise _cause(error) from error
    return sorted(path.name for path in out.iterdir())


def _cause(error: CheckpointException) -> Exception:
    """torch collects what went wrong by rank, and says of a full disk where its stream stood."""
    failure = next(iter(error.failures.values()))
    cause: BaseException | None = failure[0] if isinstance(failure, tuple) else failure
    while cause is not None and not isinstance(cause, OSError | UserError):
        cause = cause.__cause__ or cause.__context__
    return cause or OSError(str(error))
