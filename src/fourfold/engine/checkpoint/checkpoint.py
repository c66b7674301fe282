"""Saves and loads a training: every rank writes rectangles of named tensors, any layout reads them;
an error of one rank is raised on all of them, in the same words."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold import files
from fourfold.engine.checkpoint import tensor_file
from fourfold.engine.checkpoint.tensor_file import StateShard, Written
from fourfold.engine.data.source import data_facts
from fourfold.engine.parallel.host_group import cpu_group
from fourfold.engine.training.trainer import Trainer
from fourfold.errors import UserError
from fourfold.installed import __version__
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.checkpoint.folder import Checkpoint, CheckpointState
from fourfold.result.checkpoint.index import INDEX_FILE, Index, dumps
from fourfold.result.files.stored import NotWholeError, UnreadableError
from fourfold.spec.train import TrainSettings

LOOK_S = 0.2
WEIGHTS = "model"
Tick = Callable[[], None]


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, or that another rank can't read."""


def state_of(trainer: Trainer, step: int, settings: TrainSettings | None = None) -> CheckpointState:
    """All but the tensors, after `step` steps; waits for the device."""
    updates = trainer.optimizer.updates
    return CheckpointState(
        step=step,
        updates=updates,
        skipped=step - updates,
        sequences=trainer.spec.batch.sequences_before(step),
        spec=trainer.spec,
        settings=settings,
        data=data_facts(trainer.spec).get("data.sha256", ""),
        scalars=tuple(sorted((name, repr(value)) for name, value in trainer.scalars().items())),
        versions=(("fourfold", __version__), ("torch", str(torch.__version__))),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def state_shards(trainer: Trainer) -> Iterator[StateShard]:
    """Views of the trainer's own memory, in the order of its pieces."""
    for shard in trainer.shards:
        corner = (shard.rect.rows[0], shard.rect.columns[0])
        weights = StateShard(
            f"{WEIGHTS}.{shard.name}", shard.shape, corner[: len(shard.shape)], shard.values
        )
        yield weights
        for name, moment in trainer.optimizer.moments(shard.param).items():
            part = moment[shard.rows[0] : shard.rows[1]]
            yield replace(weights, name=f"{name}.{shard.name}", tensor=part)


def load(trainer: Trainer, checkpoint: Checkpoint, tick: Tick | None = None) -> None:
    """Weights, moments, counts and scalars of a checkpoint of any layout. Collective."""
    state = checkpoint.state
    trainer.optimizer.restore(state.updates)
    read_into(list(state_shards(trainer)), checkpoint, tick)
    trainer.restore_scalars({name: float(value) for name, value in state.scalars})


def load_intact(trainer: Trainer, root: Path, name: str, tick: Tick | None = None) -> Checkpoint:
    """Load this checkpoint or, where its bytes have changed, the newest sound one before it; those
    are then kept apart. All ranks share the reading and agree. Collective."""
    group, first = cpu_group(), dist.get_rank() == 0
    before = [checkpoint.folder.name for checkpoint in checkpoints.whole(root)] if first else []
    names: list = [before]
    dist.broadcast_object_list(names, src=0, group=group)
    before, bad = names[0], dict[str, str]()
    try:
        for step in reversed(before[: before.index(name) + 1]):
            checkpoint = checkpoints.read(root / step)
            try:
                load(trainer, checkpoint, tick)
                break
            except NotWholeError as error:  # of all ranks alike
                bad[step] = error.rule
        else:
            rule = f"cannot be loaded, nor can an earlier one: {bad[name]}"
            hint = "copy one again from its source; nothing was changed"
            raise UserError(rule, field="checkpoint", value=name, hint=hint)
    finally:
        dist.destroy_process_group(group)
    for step, reason in bad.items() if first else ():
        checkpoints.move_apart(root / step, reason)
    return checkpoint


@torch.no_grad()
def read_into(
    items: Sequence[StateShard],
    checkpoint: Checkpoint,
    tick: Tick | None = None,
    index: Index | None = None,
) -> None:
    """Fill the rectangles from a checkpoint (`index`: its index, where that is read already).
    Collective where ranks have joined."""
    group = cpu_group() if dist.is_initialized() else None

    def work() -> None:
        where = index or checkpoints.read_index(checkpoint)
        try:
            reads = tensor_file.reads_of(items, where)
            tensor_file.read_all(reads, checkpoint.folder, where, tick)
        except UserError as error:
            raise checkpoints.of_checkpoint(error, checkpoint.folder) from None

    try:
        together(work, group)
    finally:
        if group is not None:
            dist.destroy_process_group(group)


def save(
    items: Sequence[StateShard],
    root: Path,
    state: CheckpointState,
    *,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
    tick: Tick = lambda: None,
) -> None:
    """Every rank writes a file, the first makes index and state and gives the folder its name.
    Collective in `group`; without one this process alone has all of every tensor."""
    folder = checkpoints.saving_folder(root, state.step)
    rank = 0 if group is None else dist.get_rank()

    def begin() -> None:
        if rank == 0:
            checkpoints.clear_leftovers(root)
            folder.mkdir(parents=True)

    def own() -> Written | None:
        path = folder / f"tensors-{rank:05d}.safetensors"
        return tensor_file.write_file(path, items, tick) if items else None

    def finish() -> None:
        if rank == 0:
            made = tensor_file.index_of([part for part in parts if part is not None])
            files.write_bytes(folder / INDEX_FILE, dumps(made), own=True)
            sums = {name: entry.crc32 for name, entry in made.files.items()}
            checkpoints.publish(root, state, keep=keep, sums=sums)

    try:
        together(begin, group)
        parts = together(own, group)
        together(finish, group)
    except BaseException as error:
        if rank == 0:
            # Gives the room back; every rank has left the folder by now.
            shutil.rmtree(folder, ignore_errors=True)
        raise _not_written(root, state.step, error) from error


def _not_written(root: Path, step: int, error: BaseException) -> CheckpointError:
    last = checkpoints.newest(root)
    earlier = f"the last good one is {last.folder.name}" if last else "there is no earlier one"
    what = f"the checkpoint of step {step} could not be written"
    return CheckpointError(f"{what}: {_words(error)}; {earlier}")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's result; or, when one fails, the same error on all. Collective in `group`."""
    if group is None:
        return [work()]
    failure = told = result = None
    try:
        result = work()
    except Exception as error:
        failure = error
        told = error if isinstance(error, UserError) else CheckpointError(_words(error))
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (told, result), group=group)
    failed = [(error, rank) for rank, (error, _) in enumerate(outcomes) if error is not None]
    if not failed:
        return [outcome for _, outcome in outcomes]
    first, rank = min(failed, key=lambda pair: _order(pair[0]))
    if failure is not None and _order(told) == _order(first):
        raise failure
    if not isinstance(first, UserError):
        raise CheckpointError(f"{first} (rank {rank})")
    first.rule = f"{first.rule} (rank {rank})"
    raise first


def _order(error: Exception | None) -> int:
    """The first counts: where this machine or this version is wrong, an earlier checkpoint is no
    help."""
    kinds = (UserError, UnreadableError, NotWholeError)
    return max((i for i, kind in enumerate(kinds, 1) if isinstance(error, kind)), default=0)
