"""A checkpoint in torch.distributed.checkpoint's own format, for engines that read that: weights
and both moments under the names of the index, one tensor in memory at a time.
"""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fourfold.engine.checkpoint.hf_write import publish
from fourfold.errors import UserError

# Name -> (shape, format) of everything to write; and how to get one of them.
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Source = Callable[[str], Tensor]


class _Planner(SavePlanner):
    """Hands torch one whole tensor after the other."""

    def __init__(self, shapes: Shapes, source: Source) -> None:
        self._shapes, self._source = shapes, source

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(name, *what) for name, what in self._shapes.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._source(write_item.index.fqn)


def _item(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> WriteItem:
    size, corner = torch.Size(shape), torch.Size([0] * len(shape))
    return WriteItem(
        index=MetadataIndex(name, corner),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(corner, size),
            properties=TensorProperties(dtype=dtype),
            size=size,
        ),
    )


def export(shapes: Shapes, source: Source, out: Path) -> list[str]:
    """The names of the files; the folder `out` appears when all of them are on the disk."""
    making = out.with_name(f".{out.name}.part")
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        # torch copies ahead only for GPUs; 0 keeps one tensor at a time.
        writer = FileSystemWriter(str(making), sync_files=True, per_thread_copy_ahead=0)
        with warnings.catch_warnings():  # torch says that there are no ranks
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
            dcp.save({}, storage_writer=writer, planner=_Planner(shapes, source), no_dist=True)
        publish(making, out)
    except (OSError, CheckpointException) as error:
        raise _not_written(error, out) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return sorted(path.name for path in out.iterdir())


def _not_written(error: OSError | CheckpointException, out: Path) -> Exception:
    """torch collects what went wrong by rank, and says of a full disk where its stream stood."""
    cause: BaseException | None = error
    if isinstance(error, CheckpointException):
        failure = next(iter(error.failures.values()))
        cause = failure[0] if isinstance(failure, tuple) else failure
    while cause is not None and not isinstance(cause, OSError | UserError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, UserError):
        return cause
    reason = cause.strerror if isinstance(cause, OSError) else str(error)
    return UserError(f"cannot be written ({reason})", field="out", value=str(out))
