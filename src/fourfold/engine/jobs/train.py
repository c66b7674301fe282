"""The train job: steps with data, a learning-rate schedule, a stored curve and checkpoints."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.cost.count.flops import CONVENTIONS, DEFAULT, FlopsQuery, utilisation_pct
from fourfold.engine.checkpoint import checkpoint
from fourfold.engine.checkpoint.background import Saver
from fourfold.engine.checkpoint.checkpoint import state_of
from fourfold.engine.checkpoint.hf_read import begin_from
from fourfold.engine.jobs.build import with_trainer
from fourfold.engine.observe.clock import Ticks, synchronize
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.memory import PeakMemory
from fourfold.engine.observe.phases import mark_phases
from fourfold.engine.observe.recording import WindowRecording
from fourfold.engine.parallel.host_group import cpu_group
from fourfold.engine.process.health import NonFiniteError, check_finite, inject_fault
from fourfold.engine.process.task import Task, environment
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.step import StepOutcome
from fourfold.engine.training.trackers import Tracker, trackers
from fourfold.engine.training.trainer import Trainer
from fourfold.result.checkpoint import folder as checkpoints
from fourfold.result.files import curve, stored
from fourfold.result.files.curve import Point
from fourfold.result.job import STOP_FILE, RankFacts
from fourfold.result.report import RankSteps
from fourfold.spec import catalog
from fourfold.spec.run import RunSpec
from fourfold.spec.train import lr_at


def perform(task: Task) -> RankFacts:
    settings = task.job.train
    assert settings is not None
    stop = StopRequest(task.folder, task.rank)

    def train(trainer: Trainer, _: Ledger | None) -> RankFacts:
        stop.connect()
        out = Path(task.job.option("out"))
        saver = Saver(
            trainer, out / "checkpoints", keep=settings.keep, background=settings.async_save
        )
        TrainingLoop(task, trainer, saver, stop, _load(task, trainer, out)).run()
        peak = PeakMemory(trainer.device)
        peak.note()
        return RankFacts(
            memory=peak.memory(rank=task.rank, stage=task.heartbeat.stage),
            times=RankSteps(rank=task.rank, host=task.place.host),
            environment=environment(trainer.device, task.place) if task.rank == 0 else (),
        )

    return with_trainer(task, train, settings=OptimizerSettings.of(settings), counted=False)


def _load(task: Task, trainer: Trainer, out: Path) -> int:
    """Steps already done: those of the checkpoint the command has chosen, or of a sound one before
    it, to which the curve then goes back. Started over by a batch system, the newest is chosen."""
    name, settings = task.job.option("load"), task.job.train
    newest = checkpoints.newest(out / "checkpoints") if task.place.start else None
    name = newest.folder.name if newest else name
    task.heartbeat.enter("load")
    tick = lambda: task.heartbeat.enter("load")  # noqa: E731
    if not name:
        if settings is not None and settings.weights:
            begin_from(trainer, settings.weights, tick)
        return 0
    loaded = checkpoint.load_intact(trainer, out / "checkpoints", name, tick)
    if task.rank == 0:
        curve.cut(out / curve.METRICS_FILE, loaded.step)
    return loaded.step


class TrainingLoop:
    """The steps of a training, in order, from `first` on. Loss and norm stay on the device until a
    window of `log_every` steps is read at once; all of a window is checked before anything is
    saved, so a checkpoint never holds a NaN."""

    def __init__(
        self, task: Task, trainer: Trainer, saver: Saver, stop: StopRequest, first: int
    ) -> None:
        assert task.job.train is not None
        self.task, self.trainer, self.saver, self.stop = task, trainer, saver, stop
        self.settings, self.spec = task.job.train, task.spec
        self.done, self.saved = first, first
        self.ticks = Ticks(trainer.device)
        self.window: list[StepOutcome] = []
        on_host = trainer.device.type == "cpu"
        mark_phases(trainer, task.heartbeat.enter, self._check if on_host else None)
        self._log = _Log(task, first) if task.rank == 0 else None
        self.recording = WindowRecording(task, trainer)

    def run(self) -> None:
        stopped = False
        while self.done < self.settings.steps and not stopped:
            self._one()
            stopped = self.stop.agreed()
            last = stopped or self.done == self.settings.steps
            every = self.settings.save_every
            save = last or bool(every and self.done % every == 0)
            if save or self.done % self.settings.log_every == 0:
                self._read()
            if save:
                self._save()
            self.saver.look(self._tick)
        self.recording.end()
        self._tick()
        self.saver.wait(self._tick)
        self.stop.leave()
        if self._log is not None:
            self._log.close()
            early = stopped and self.done < self.settings.steps
            self.task.answer({"step": self.done, "stopped": early})

    def _one(self) -> None:
        with self.recording.of(self.done + 1, before_change=self._read):
            self._step()

    def _step(self) -> None:
        if not self.window:
            self.ticks = Ticks(self.trainer.device)
            self.ticks.tick()
        index, optimizer = self.done, self.trainer.optimizer
        optimizer.set_lr(lr_at(self.settings, index))
        fault, leaves = self.spec.fault, optimizer.leaves
        inject_fault(fault, rank=self.task.rank, step=index, tensors=leaves)
        self.window.append(self.trainer.step(index))
        self.ticks.tick()
        self.done += 1
        self.task.heartbeat.step_done()

    def _check(self, norm: Tensor) -> None:
        leaves, forgiven = self.trainer.optimizer.leaves, self.trainer.may_overflow
        try:
            check_finite(norm, leaves, self.done + 1, forgiven=forgiven)
        except NonFiniteError:
            self._read()  # the curve shows what led there
            raise

    def _read(self) -> None:
        """Take the window off the device, keep it, and go on only if all of it is finite."""
        if not self.window:
            return
        synchronize(self.trainer.device)
        numbers = torch.stack([torch.stack([n.double() for n in done]) for done in self.window])
        first, seconds = self.done - len(self.window), self.ticks.step_s()
        points, bad, forgiven = [], "", self.trainer.may_overflow
        for offset, (loss, norm, router_loss) in enumerate(numbers.tolist()):
            if not (math.isfinite(loss) and (forgiven or math.isfinite(norm))):
                bad = f"loss {loss}, gradient norm {norm} in step {first + offset + 1}"
                break
            points.append(self._point(first + offset, loss, norm, router_loss, seconds[offset]))
        self.window = []
        if self._log is not None:
            self._log.add(points)
        if bad:
            raise NonFiniteError(bad)

    def _point(
        self, index: int, loss: float, norm: float, router_loss: float, step_s: float
    ) -> Point:
        batch = self.spec.batch
        sequences = batch.sequences_before(index + 1)
        speed = batch.global_batch_at(index) * batch.seq_len / step_s
        return Point(
            step=index + 1,
            loss=loss,
            router_loss=router_loss if self.spec.model.moe is not None else None,
            grad_norm=norm if math.isfinite(norm) else None,
            lr=lr_at(self.settings, index),
            tokens=sequences * batch.seq_len,
            sequences=sequences,
            step_s=step_s,
            tokens_per_s=speed,
            mfu_pct=self._log.mfu_pct(speed / self.spec.gpus) if self._log else None,
        )

    def _save(self) -> None:
        if self.saved == self.done:
            return
        self._tick()
        if self._log is not None:
            self._log.sync()
        self.saver.save(state_of(self.trainer, self.done, self.settings), self._tick)
        self.saved = self.done

    def _tick(self) -> None:
        self.task.heartbeat.enter("save")


class _Log:
    """Rank 0's files: the curve, and whatever else was asked for."""

    def __init__(self, task: Task, first: int) -> None:
        assert task.job.train is not None
        out = Path(task.job.option("out"))
        self._stream = stored.appending(out / curve.METRICS_FILE)
        self._others: list[Tracker] = trackers(task.job.train, task.spec, out, first)
        self.mfu_pct = utilisation_of(task.spec, task.device(task.spec.device))

    def add(self, points: list[Point]) -> None:
        self._stream.write(curve.lines(points).encode())
        self._stream.flush()
        for other in self._others:
            other.add(points)

    def sync(self) -> None:
        """A checkpoint must not be on the disk before the curve that leads to it."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()
        for other in self._others:
            other.close()


def utilisation_of(spec: RunSpec, device: torch.device) -> Callable[[float], float | None]:
    """Tokens/s/GPU -> MFU by the default convention; None on a device whose peak is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = catalog.peak_of(name, spec.policy.precision_name)
    ask = FlopsQuery.of_spec(spec)
    flops = CONVENTIONS[DEFAULT].count(ask).model
    return lambda speed: None if peak is None else utilisation_pct(flops, speed, peak)


class StopRequest:
    """Asked by a signal to any rank or by the launcher's file; all ranks agree on the step, without
    waiting for the device. Made before ranks join, so that a signal in between is not lost."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / STOP_FILE if rank == 0 else None
        self._signalled = False
        self._group: dist.ProcessGroup | None = None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._answer: dist.Work | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._on_stop_signal)

    def _on_stop_signal(self, *_: object) -> None:
        self._signalled = True

    def connect(self) -> None:
        """A CPU group of its own, whose only collectives are these questions. Collective."""
        if dist.get_world_size() > 1:
            self._group = cpu_group()

    @property
    def wanted(self) -> bool:
        return self._signalled or (self._file is not None and self._file.exists())

    def agreed(self) -> bool:
        """Once a step on all ranks: what the step before asked, answered while this one ran."""
        if self._group is None:
            return self.wanted
        answer = False
        if self._answer is not None:
            self._answer.wait()
            answer = bool(self._flag.item())
        self._flag = torch.tensor([int(self.wanted)], dtype=torch.int32)
        self._answer = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return answer

    def leave(self) -> None:
        """No question may be open when the group goes away."""
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
