"""The weights job: a checkpoint's weights as a Hugging Face folder, or all of it in torch's own
format, by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fourfold.cost.count import params
from fourfold.engine import compat
from fourfold.engine.checkpoint import checkpoint, tensor_file
from fourfold.engine.checkpoint.checkpoint import WEIGHTS
from fourfold.engine.checkpoint.export import Export, export_dcp, export_hf
from fourfold.engine.checkpoint.tensor_file import StateShard
from fourfold.engine.compat import DTYPES
from fourfold.engine.process.task import Task
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint
from fourfold.result.checkpoint.index import Index, StoredTensor
from fourfold.spec import check


def perform(task: Task) -> None:
    """Options: `checkpoint` and `out` (folders), `dtype` ('': as the checkpoint has them), `format`
    (hf or dcp)."""
    compat.quiet()
    saved = checkpoints.read(Path(task.job.option("checkpoint")))
    tick = lambda: task.heartbeat.enter("load")  # noqa: E731
    index = checkpoints.read_index(saved)
    asked = task.job.option("dtype")
    out, dtype = Path(task.job.option("out")), DTYPES[asked] if asked else None
    if task.job.option("format", "hf") == "dcp":
        made, named = _to_dcp(saved, index, dtype, out, tick), ""
    else:
        dtype = dtype or DTYPES[saved.state.spec.policy.dtypes.param]
        made, named = _to_hf(saved, index, dtype, out, task), str(dtype)[6:]
    sizes = [(out / name).stat().st_size for name in made]
    kinds = {str(tensor_file.DTYPES[stored.dtype])[6:] for stored in index.tensors.values()}
    dtypes = named or ", ".join(sorted(kinds))
    task.answer({"files": made, "size_bytes": sum(sizes), "dtype": dtypes})


def _to_hf(saved: Checkpoint, index: Index, dtype: torch.dtype, out: Path, task: Task) -> list[str]:
    spec = saved.state.spec
    require_weights(saved, index)
    seq_len, eos = spec.batch.seq_len, task.job.option("eos", "")
    what = Export(model=spec.model, seq_len=seq_len, dtype=dtype, eos=int(eos) if eos else None)

    def source(names: Sequence[str]) -> dict[str, Tensor]:
        return whole_tensors(saved, index, names, lambda: task.heartbeat.enter("load"))

    return export_hf(source, what, out, lambda: task.heartbeat.enter("save"))


def _to_dcp(
    saved: Checkpoint, index: Index, dtype: torch.dtype | None, out: Path, tick: Callable[[], None]
) -> list[str]:
    """`dtype` is that of the weights; moments stay as they are."""

    def asked(name: str, stored: StoredTensor) -> torch.dtype:
        weight = name.startswith(f"{WEIGHTS}.")
        return dtype if dtype is not None and weight else tensor_file.DTYPES[stored.dtype]

    shapes = {name: (stored.shape, asked(name, stored)) for name, stored in index.tensors.items()}

    def source(name: str) -> Tensor:
        tick()
        return _read(saved, index, [name])[name].to(shapes[name][1])

    return export_dcp(shapes, source, out)


def require_weights(saved: Checkpoint, index: Index) -> None:
    """Whether the index has the weights of the model that the state names, before anything is
    made in a size that only the state says."""
    spec = saved.state.spec
    lacks, layers = "", spec.model.layers
    if layers > len(index.tensors):
        lacks = f"{len(index.tensors)} tensors for {layers} layers"
    for tensor in params.tensors(spec.model, spec.batch.seq_len) if not lacks else ():
        stored = index.tensors.get(f"{WEIGHTS}.{tensor.name}")
        if stored is None or stored.shape != tuple(tensor.shape):
            has = "no" if stored is None else f"another shape ({stored.shape}) of"
            lacks = f"{has} {tensor.name} {tuple(tensor.shape)}"
            break
    rule = f"does not belong to the model in its state: it has {lacks}"
    hint = "use another checkpoint, or copy this one again from its source"
    check.that(not lacks, "checkpoint", str(saved.folder), rule, hint)


def whole_tensors(
    saved: Checkpoint, index: Index, names: Sequence[str], tick: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """Published tensors of a checkpoint, whole, in the format it has them in."""
    read = _read(saved, index, [f"{WEIGHTS}.{name}" for name in names], tick)
    return {name.removeprefix(f"{WEIGHTS}."): tensor for name, tensor in read.items()}


def _read(
    saved: Checkpoint, index: Index, names: Sequence[str], tick: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """By name in the index, which has been checked against the files: sizes are real."""
    tensors = {
        name: torch.empty(stored.shape, dtype=tensor_file.DTYPES[stored.dtype])
        for name, stored in ((name, index.tensors[name]) for name in names)
    }
    items = [
        StateShard(name, index.tensors[name].shape, (0,) * tensor.ndim, tensor)
        for name, tensor in tensors.items()
    ]
    checkpoint.read_into(items, saved, tick, index=index)
    return tensors
