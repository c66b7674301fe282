"""The weights job: a checkpoint's weights as a Hugging Face folder, by one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fourfold.cost import params
from fourfold.engine import checkpoint, compat
from fourfold.engine.compat import DTYPES
from fourfold.engine.held import WEIGHTS, Held
from fourfold.engine.hf_export import Export, export
from fourfold.engine.planners import DamagedError
from fourfold.engine.task import Task
from fourfold.errors import UserError
from fourfold.result import checkpoints
from fourfold.result.checkpoints import Checkpoint


def perform(task: Task) -> None:
    """Options: `checkpoint` and `out` (folders), `dtype` ('': as the checkpoint has them)."""
    compat.quiet()
    found = checkpoints.read(Path(task.job.option("checkpoint")))
    bad = checkpoints.damage(found, tick=lambda: task.heart.mark("load"))
    if bad:
        raise _damaged(found, bad)
    spec = found.state.spec
    stored = DTYPES[spec.policy.dtypes.param]
    dtype = DTYPES[task.job.option("dtype")] if task.job.option("dtype") else stored
    what = Export(model=spec.model, seq_len=spec.batch.seq_len, dtype=dtype)

    def source(names: Sequence[str]) -> dict[str, Tensor]:
        try:
            return whole_tensors(found, names, lambda: task.heart.mark("load"))
        except DamagedError as error:
            raise _damaged(found, str(error)) from error

    out = Path(task.job.option("out"))
    made = export(source, what, out, lambda _: task.heart.mark("save"))
    sizes = [(out / name).stat().st_size for name in made]
    task.answer({"files": made, "size_bytes": sum(sizes), "dtype": str(dtype)[6:]})


def _damaged(found: Checkpoint, reason: str) -> UserError:
    return UserError(
        f"is damaged: {reason}",
        field="checkpoint",
        value=str(found.folder),
        way_out="name an earlier one, or copy this one again",
    )


def whole_tensors(
    found: Checkpoint, names: Sequence[str], tick: Callable[[], None] | None = None
) -> dict[str, Tensor]:
    """Published tensors of a checkpoint, whole, in the format it has them in."""
    spec = found.state.spec
    shapes = {one.name: one.shape for one in params.tensors(spec.model, spec.batch.seq_len)}
    stored = DTYPES[spec.policy.dtypes.param]
    tensors = {name: torch.empty(shapes[name], dtype=stored) for name in names}
    items = [
        Held(f"{WEIGHTS}.{name}", shapes[name], (0,) * tensor.ndim, tensor)
        for name, tensor in tensors.items()
    ]
    checkpoint.read_into(items, found.folder, tick)
    return tensors
