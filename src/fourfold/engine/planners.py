"""How does torch.distributed.checkpoint learn of rectangles? Planners that know only `Held`s.

What is read back is data, never code: tensors with weights_only, and the metadata, which torch
pickles, by an unpickler that makes nothing but the few types such a file is made of.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from fourfold.engine.held import Held
from fourfold.result.checkpoints import file_sum


class HeldSavePlanner(SavePlanner):
    """Writes what it is given: who writes what was decided before. `written` counts."""

    def __init__(self, items: Sequence[Held]) -> None:
        self.items = items
        self.written = 0
        self._tensors = {item.index: item.tensor for item in items}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(item) for item in self.items])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        self.written += 1
        return self._tensors[write_item.index]


def _write_item(item: Held) -> WriteItem:
    return WriteItem(
        index=item.index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=item.chunk,
            properties=TensorProperties(dtype=item.tensor.dtype),
            size=torch.Size(item.shape),
        ),
    )


class HeldLoadPlanner(LoadPlanner):
    """Fills every rectangle from whatever rectangles the checkpoint has. `read` counts."""

    def __init__(self, items: Sequence[Held]) -> None:
        self.items = items
        self.read = 0

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        reads: list[ReadItem] = []
        for number, item in enumerate(self.items):
            saved = self.metadata.state_dict_metadata.get(item.name)
            # By number: a rank may hold the same rectangle twice, in two of its chunks.
            where = MetadataIndex(str(number))
            reads += [replace(read, dest_index=where) for read in _reads(item, saved)]
        return LoadPlan(reads)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        self.read += 1
        part = self.items[int(read_item.dest_index.fqn)].tensor
        for dim, (first, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, first, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, or does not hold what is asked of it."""


class DamagedError(CheckpointError):
    """A checkpoint whose files can't be read."""


def _reads(item: Held, saved: object) -> list[ReadItem]:
    if not isinstance(saved, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint has no tensor {item.name}")
    if tuple(saved.size) != item.shape:
        raise CheckpointError(
            f"{item.name} is {tuple(saved.size)} in the checkpoint, {item.shape} here"
        )
    if not is_exact(saved.properties.dtype, item.tensor.dtype):
        raise CheckpointError(
            f"{item.name} is {saved.properties.dtype} in the checkpoint and would lose digits as "
            f"{item.tensor.dtype}"
        )
    reads = create_read_items_for_chunk_list(item.name, saved, [item.chunk])
    got = sum(math.prod(read.lengths) for read in reads)
    if got != item.tensor.numel():
        raise CheckpointError(f"the checkpoint holds only a part of {item.name}")
    return reads


def is_exact(saved: torch.dtype, here: torch.dtype) -> bool:
    """Whether every value of one format is a value of the other."""
    return torch.promote_types(saved, here) == here


@dataclass(frozen=True, slots=True)
class _Sums:
    """Travels to the coordinator behind a rank's results."""

    by_name: dict[str, str]


class PublishingWriter(FileSystemWriter):
    """Calls `publish` on the coordinator when all ranks' files and the metadata are on the disk,
    with the checksums that the ranks took of their files; its failure is every rank's failure."""

    def __init__(
        self, path: str, publish: Callable[[dict[str, str]], object], *, staged: bool
    ) -> None:
        # Tensors in host memory are written from where they are; others are copied on the way.
        ahead = 0 if staged else 10_000_000
        super().__init__(path, sync_files=True, per_thread_copy_ahead=ahead)
        self._publish = publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """torch's archive writer says where its stream stands, not what the system refused."""
        try:
            written = super().write_data(plan, planner).wait()
            names = {result.storage_data.relative_path for result in written}
            sums = {name: file_sum(Path(self.path) / name) for name in names}
            done: Future[list[Any]] = Future()
            done.set_result([*written, _Sums(sums)])
            return done
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if isinstance(cause, OSError):
                raise CheckpointError(f"{cause.strerror} in {self.path}") from error
            raise

    def finish(self, metadata: Metadata, results: Any) -> None:
        sums: dict[str, str] = {}
        for result in (one for some in results for one in some if isinstance(one, _Sums)):
            sums |= result.by_name
        plain = [[one for one in some if not isinstance(one, _Sums)] for some in results]
        super().finish(metadata, plain)
        self._publish(sums)


class DataOnlyReader(FileSystemReader):
    """torch reads tensors with weights_only, but unpickles `.metadata` as it stands: not here."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = f"{self.path}/.metadata"
        with open(path, "rb") as stream:
            found = _DataUnpickler(stream).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path} does not hold a checkpoint's metadata")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_TYPES = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch": {"Size", "bfloat16", "float16", "float32", "float64", "strided"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    # The metadata names its folder.
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
}  # fmt: skip


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_TYPES.get(module, ()):
            raise CheckpointError(
                f"the checkpoint's metadata asks for {module}.{name}, which is no data: not loaded"
            )
        return super().find_class(module, name)
