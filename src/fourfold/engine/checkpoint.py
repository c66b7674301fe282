"""How is a training kept? Every rank writes rectangles of named tensors, any other layout reads
them; a folder gets its name when all of it is on the disk.

A background save blocks the steps only while tensors are copied to host memory. One is under way at
a time. Collectives of a save use a CPU group of their own: nothing else may be in its order.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

import fourfold
from fourfold.engine.clock import synchronize
from fourfold.engine.data import data_facts
from fourfold.engine.failure import NonFiniteError
from fourfold.engine.held import Held, divide, held
from fourfold.engine.planners import (
    CheckpointError,
    DamagedError,
    DataOnlyReader,
    HeldLoadPlanner,
    HeldSavePlanner,
    PublishingWriter,
)
from fourfold.engine.trainer import Trainer
from fourfold.errors import UserError
from fourfold.result import checkpoints
from fourfold.result.checkpoints import Checkpoint, CheckpointState
from fourfold.spec.train import TrainSettings

_LOOK_S = 0.2


def state_of(trainer: Trainer, step: int, settings: TrainSettings | None = None) -> CheckpointState:
    """All but the tensors, after `step` steps; waits for the device."""
    return CheckpointState(
        step=step,
        updates=trainer.optimizer.updates,
        sequences=trainer.spec.batch.sequences_before(step),
        spec=trainer.spec,
        settings=settings,
        data=data_facts(trainer.spec).get("data.sha256", ""),
        scalars=tuple(sorted((name, repr(value)) for name, value in trainer.scalars().items())),
        versions=(("fourfold", fourfold.__version__), ("torch", str(torch.__version__))),
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def load(trainer: Trainer, checkpoint: Checkpoint, tick: Callable[[], None] | None = None) -> None:
    """Weights, moments, counts and scalars of a checkpoint of any layout. Collective."""
    state = checkpoint.state
    trainer.optimizer.restore(state.updates)
    read_into(list(held(trainer)), checkpoint.folder, tick)
    trainer.restore_scalars({name: float(value) for name, value in state.scalars})


def load_sound(
    trainer: Trainer, root: Path, name: str, tick: Callable[[], None] | None = None
) -> Checkpoint:
    """Load this checkpoint or, where its files are damaged, the newest sound one before it; damaged
    ones are then kept apart. All ranks share the reading and agree. Collective."""
    group, first = _cpu_group(), dist.get_rank() == 0
    before = [found.folder.name for found in checkpoints.whole(root)] if first else []
    told: list = [before]
    dist.broadcast_object_list(told, src=0, group=group)
    before, bad = told[0], dict[str, str]()
    try:
        for one in reversed(before[: before.index(name) + 1]):
            found = checkpoints.read(root / one)
            bad[one] = _damage(found, group, tick)
            try:
                if not bad[one]:
                    load(trainer, found, tick)
                    del bad[one]
                    break
            except DamagedError as error:  # of all ranks alike
                bad[one] = str(error)
        else:
            raise UserError(
                f"is damaged, and so are those before: {bad[name]}",
                field="checkpoint",
                value=name,
                way_out="copy one again, or start over with --fresh",
            )
    finally:
        dist.destroy_process_group(group)
    for one, reason in bad.items() if first else ():
        checkpoints.keep_apart(root / one, reason)
    return found


def _damage(found: Checkpoint, group: dist.ProcessGroup, tick: Callable[[], None] | None) -> str:
    """Every rank reads a share of the files; the first complaint, the same on all. Collective."""
    share = dist.get_rank(), dist.get_world_size()
    said: list = [""] * dist.get_world_size()
    dist.all_gather_object(said, checkpoints.damage(found, share, tick), group=group)
    return next(filter(None, said), "")


@torch.no_grad()
def read_into(items: Sequence[Held], folder: Path, tick: Callable[[], None] | None = None) -> None:
    """Fill the rectangles from a checkpoint. Collective where ranks have joined."""
    planner = HeldLoadPlanner(items)
    alone = not dist.is_initialized()
    group = None if alone else _cpu_group()
    reader = DataOnlyReader(str(folder))
    with _watched(tick, lambda: planner.read), _quiet(alone):
        try:
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)
        except CheckpointException as error:
            kind = DamagedError if _is_damage(error) else CheckpointError
            raise kind(_reason(error, f"{folder} can't be loaded")) from error
        finally:
            if group is not None:
                dist.destroy_process_group(group)


def write(items: Sequence[Held], root: Path, state: CheckpointState, *, keep: int = 0) -> None:
    """A checkpoint by this process alone, of tensors it holds whole."""
    planner = HeldSavePlanner(items)
    _write(planner, root, state, keep=keep, group=None, staged=False)


@torch.no_grad()
def must_be_finite(items: Sequence[Held]) -> None:
    """A NaN in a weight that no token of late has used does not show in the loss."""
    if not items:
        return
    peaks = torch.stack(
        [
            peak.double()
            for peak in torch._foreach_norm([item.tensor for item in items], float("inf"))
        ]
    )
    if not bool(torch.isfinite(peaks).all()):
        bad = items[int((~torch.isfinite(peaks)).nonzero()[0])].name
        raise NonFiniteError(f"{bad} is not finite on this rank; nothing was saved")


class Saver:
    """Saves a trainer's state into `root`. Made on all ranks at once, on the main thread."""

    def __init__(
        self, trainer: Trainer, root: Path, *, keep: int = 0, background: bool = True
    ) -> None:
        self.trainer, self.root, self.keep, self.background = trainer, root, keep, background
        self._group = _cpu_group()
        self._mine: list[int] = []
        self._held = 0
        self._buffers: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._planner = HeldSavePlanner([])
        self._error: BaseException | None = None

    def save(self, state: CheckpointState, tick: Callable[[], None] | None = None) -> None:
        """In the background: returns when everything is copied, after the save before is done."""
        self.wait(tick)
        items = self._to_write()
        must_be_finite(items)
        if self.background:
            items = self._staged(items)
        self._planner = planner = HeldSavePlanner(items)

        def work() -> None:
            if self.trainer.device.type == "cuda":  # a thread starts on the first one
                torch.cuda.set_device(self.trainer.device)
            try:
                _write(
                    planner,
                    self.root,
                    state,
                    keep=self.keep,
                    group=self._group,
                    staged=self.background,
                )
            except BaseException as error:
                self._error = error

        # Also in the foreground, so that somebody is left to tell how far it is.
        self._thread = threading.Thread(target=work, name="save", daemon=True)
        self._thread.start()
        if not self.background:
            self.wait(tick)

    def look(self, tick: Callable[[], None]) -> None:
        """Raise what a background save has come to, without waiting for it."""
        if self._thread is not None and not self._thread.is_alive():
            tick()
            self.wait()

    def wait(self, tick: Callable[[], None] | None = None) -> None:
        """Until nothing is under way; `tick` is called whenever it got further."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        seen = -1
        while thread.is_alive():
            thread.join(_LOOK_S)
            if tick is not None and self._planner.written != seen:
                seen = self._planner.written
                tick()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _to_write(self) -> list[Held]:
        """The rectangles this rank writes; who writes what is agreed on once."""
        items = list(held(self.trainer))
        if len(items) != self._held:
            self._mine = _agreed(items, self._group)
            self._held, self._buffers = len(items), []
        return [items[number] for number in self._mine]

    @torch.no_grad()
    def _staged(self, items: list[Held]) -> list[Held]:
        """Copies in host memory that is kept for the next save."""
        device = self.trainer.device
        if not self._buffers:
            pin = device.type == "cuda"
            self._buffers = [
                torch.empty(item.tensor.shape, dtype=item.tensor.dtype, pin_memory=pin)
                for item in items
            ]
        for item, buffer in zip(items, self._buffers, strict=True):
            buffer.copy_(item.tensor, non_blocking=True)
        synchronize(device)
        return [
            Held(item.name, item.shape, item.offsets, buffer)
            for item, buffer in zip(items, self._buffers, strict=True)
        ]


def _agreed(items: Sequence[Held], group: dist.ProcessGroup) -> list[int]:
    """One rank hears what all hold and tells each what to write. Collective."""
    slots = [item.slot for item in items]
    first = dist.get_rank() == 0
    everyone: list | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(slots, everyone, group=group)
    mine: list = [None]
    dist.scatter_object_list(mine, divide(everyone) if everyone is not None else None, group=group)
    return mine[0]


def _write(
    planner: HeldSavePlanner,
    root: Path,
    state: CheckpointState,
    *,
    keep: int,
    group: dist.ProcessGroup | None,
    staged: bool,
) -> None:
    folder = checkpoints.saving_folder(root, state.step)
    writer = PublishingWriter(
        str(folder),
        lambda sums: checkpoints.publish(root, state, keep=keep, sums=sums),
        staged=staged,
    )
    try:
        with _quiet(group is None):
            dcp.save(
                {}, storage_writer=writer, planner=planner, process_group=group,
                no_dist=group is None,
            )  # fmt: skip
    except BaseException as error:
        if group is None or dist.get_rank() == 0:
            # Gives the room back; every rank has left the folder by now.
            shutil.rmtree(folder, ignore_errors=True)
        last = checkpoints.newest(root)
        kept = f"the last good one is {last.folder.name}" if last else "there is no earlier one"
        what = f"the checkpoint of step {state.step} could not be written"
        raise CheckpointError(f"{_reason(error, what)}; {kept}") from error


def _is_damage(error: CheckpointException) -> bool:
    """Not a request that the checkpoint can't serve, nor a lack of memory here."""
    causes = [one[0] if isinstance(one, tuple) else one for one in error.failures.values()]
    here = (CheckpointError, MemoryError, torch.OutOfMemoryError)
    return not any(isinstance(cause, here) for cause in causes)


def _reason(error: BaseException, what: str) -> str:
    """The first rank's own words, out of torch's collection of all ranks' tracebacks."""
    failures = getattr(error, "failures", {})
    for rank, wrapped in sorted(failures.items()):
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"{what}: {cause} (rank {rank})"
    return f"{what}: {error}"


def _cpu_group() -> dist.ProcessGroup:
    """All ranks, over gloo whatever the training uses. Collective."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextlib.contextmanager
def _quiet(alone: bool) -> Iterator[None]:
    """torch says at every call without ranks that there are none. Filters belong to the whole
    process, so a background thread leaves them alone."""
    if not alone:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
        yield


@contextlib.contextmanager
def _watched(tick: Callable[[], None] | None, count: Callable[[], int]) -> Iterator[None]:
    """Call `tick` now and then while `count` grows."""
    if tick is None:
        yield
        return
    leaving = threading.Event()

    def look() -> None:
        seen = -1
        while not leaving.wait(_LOOK_S):
            if count() != seen:
                seen = count()
                tick()

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leaving.set()
        thread.join()
