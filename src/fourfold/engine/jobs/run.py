"""The run job: build the trainer of a spec, run warm-up and timed steps, keep the raw facts."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.engine import compat
from fourfold.engine.data.source import data_facts
from fourfold.engine.jobs.build import with_trainer
from fourfold.engine.microbench.device import axis_rates, rates
from fourfold.engine.observe.clock import Ticks, WarmupTicks, by_count, synchronize, until_steady
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.memory import PeakMemory, allocator_peak, retries
from fourfold.engine.observe.phases import count_of, mark_phases
from fourfold.engine.observe.recording import record_steps
from fourfold.engine.process.health import NonFiniteError, check_finite, inject_fault
from fourfold.engine.process.task import Task, environment, uuid_of
from fourfold.engine.training.step import StepOutcome
from fourfold.engine.training.trainer import Trainer
from fourfold.result.job import RankFacts
from fourfold.result.machine import Sampler
from fourfold.result.report import DeviceSample, LinkRate, ProbeReport, RankSteps, StepReport
from fourfold.result.trace import trace_files

# The optimizer's state exists from the second step on; from then on every step holds the same.
_COUNTED_STEPS = 2


def perform(task: Task) -> RankFacts:
    task.spec.batch.without_ramp()
    return with_trainer(task, lambda trainer, ledger: _measured(Steps(task, trainer, ledger)))


class Steps:
    """The trainer's steps; results stay unread on the device. On CPU the ledger counts the first
    two: later ones hold the same, and it slows them."""

    def __init__(self, task: Task, trainer: Trainer, ledger: Ledger | None) -> None:
        self.task, self.trainer, self.ledger = task, trainer, ledger
        self.results: list[StepOutcome] = []
        self.scales: list[Tensor] = []
        self.data_s: list[float] = []
        self.peak_bytes = 0
        self.peak = PeakMemory(trainer.device)
        mark_phases(trainer, self._mark, self._check if trainer.device.type == "cpu" else None)

    def run(self, count: int) -> Ticks:
        ticks = Ticks(self.trainer.device)
        ticks.tick()
        for _ in range(count):
            self._one()
            ticks.tick()
            self.task.heartbeat.step_done()
        return ticks

    def _one(self) -> None:
        index, spec = len(self.results), self.task.spec
        ledger = self.ledger if index < _COUNTED_STEPS else None
        with ledger or contextlib.nullcontext():
            if ledger is not None:
                self.peak_bytes = max(self.peak_bytes, ledger.peak_bytes)
                ledger.begin()
            leaves = self.trainer.optimizer.leaves
            inject_fault(spec.fault, rank=self.task.rank, step=index, tensors=leaves)
            if self.trainer.scaler is not None:
                self.scales.append(self.trainer.scaler.scale.clone())
            waited_s = self.trainer.source.waited_s
            self.results.append(self._counted(index))
            self.data_s.append(self.trainer.source.waited_s - waited_s)
        if index < _COUNTED_STEPS:
            self.peak.end_update()
        if ledger is not None:
            ledger.mark("end")
            self.peak_bytes = max(self.peak_bytes, ledger.peak_bytes)
            self.peak.update_bytes = ledger.phase_bytes.get("optimizer", 0)

    def _counted(self, index: int) -> StepOutcome:
        """Compiled steps on a CPU hide from the ledger; of the second one the allocator tells."""
        hidden = self.ledger is None and self.trainer.device.type == "cpu"
        if not hidden or index != _COUNTED_STEPS - 1:
            return self.trainer.step(index)
        with allocator_peak(self.trainer) as peaks:
            done = self.trainer.step(index)
        self.peak_bytes = max(self.peak_bytes, *peaks)
        return done

    def _mark(self, phase: str) -> None:
        self.task.heartbeat.enter(phase)
        if len(self.results) >= _COUNTED_STEPS:
            return
        if self.ledger is not None:
            self.ledger.mark(phase)
        if phase == "optimizer":
            self.peak.begin_update()

    def _check(self, norm: Tensor) -> None:
        leaves = self.trainer.optimizer.leaves
        check_finite(norm, leaves, len(self.results), forgiven=self.trainer.may_overflow)

    def read(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of every step; waits for the device. A norm that is not finite is
        no failure where the loss was scaled and could still be scaled by less; no scale helps a
        loss."""
        numbers = [(float(done.loss), float(done.grad_norm)) for done in self.results]
        forgiven = self.trainer.may_overflow
        for step, (loss, norm) in enumerate(numbers):
            if not (math.isfinite(loss) and (forgiven or math.isfinite(norm))):
                raise NonFiniteError(f"loss {loss}, gradient norm {norm} in step {step}")
        return numbers


@dataclass(slots=True)
class Window:
    """The timed steps: their readings, and what else happened meanwhile."""

    ticks: Ticks
    seconds: float
    samples: tuple[DeviceSample, ...]
    recompiles: int
    retries: int


def _timed(steps: Steps) -> Window:
    device = steps.trainer.device
    gc.collect()
    sampler = Sampler(uuid_of(device)) if steps.task.rank == 0 else None
    graphs, failed = compat.graphs(), retries(device)
    dist.barrier()  # nobody's first step waits for another's preparations
    synchronize(device)
    began = time.perf_counter()
    ticks = steps.run(steps.task.spec.steps)
    synchronize(device)
    window_s = time.perf_counter() - began
    samples = sampler.stop() if sampler is not None else ()
    return Window(ticks, window_s, samples, compat.graphs() - graphs, retries(device) - failed)


def _measured(steps: Steps) -> RankFacts:
    task, device, peak = steps.task, steps.trainer.device, steps.peak
    start_s = time.time() - task.began_at
    warm = _warm(steps)
    synchronize(device)
    peak.note()
    before = _probe("before", task, device)
    peak.forget()
    steps.trainer.balance.forget()
    window = _timed(steps)
    peak.note()
    probes = (before, _probe("after", task, device))
    _answer(steps)
    _trace(steps)
    seconds = [*warm.step_s(), *window.ticks.step_s()]
    place: dict[str, int] = {"rank": task.rank, "stage": task.heartbeat.stage}
    return RankFacts(
        memory=peak.memory(**place, counted_bytes=steps.peak_bytes, retries=window.retries),
        times=RankSteps(
            rank=task.rank,
            host=task.place.host,
            step_s=tuple(seconds),
            busy_s=(*warm.busy_s(), *window.ticks.busy_s()),
            recompiles=window.recompiles,
            data_s=tuple(steps.data_s),
            compile_s=compat.compile_s(),
        ),
        steps=_step_reports(steps, seconds, warm.warmup.steps),
        start_s=start_s,
        window_s=window.seconds,
        samples=window.samples,
        probes=tuple(probed for probed in probes if probed is not None),
        links=_links(steps),
        experts=steps.trainer.balance.loads(),
        warmup=warm.warmup,
        environment=_environment(task, device) if task.rank == 0 else (),
    )


def _answer(steps: Steps) -> None:
    """Options `count` and `actions`: what the ledger counted; what this rank's pipeline did in the
    last step, in order: kind, chunk, micro batch."""
    task, trainer = steps.task, steps.trainer
    if steps.ledger is not None and task.job.option("count") == "true":
        task.answer(count_of(steps.ledger, trainer), part=task.rank)
    if task.job.option("actions") == "true":
        actions = [list(action) for action in trainer.executed]
        task.answer({"stage": trainer.world.stage, "actions": actions}, part=task.rank)


def _trace(steps: Steps) -> None:
    """Option `trace`: a file for further steps under the profiler, of each rank its own."""
    if not (name := steps.task.job.option("trace")):
        return
    steps.task.heartbeat.enter("trace")
    place = steps.task.place
    path = trace_files(Path(name), place.world)[place.rank]
    record_steps(steps.trainer, path, len(steps.results))


def _environment(task: Task, device: torch.device) -> tuple[tuple[str, str], ...]:
    facts = dict(environment(device, task.place)) | data_facts(task.spec)
    return tuple(sorted(facts.items()))


def _warm(steps: Steps) -> WarmupTicks:
    """A fixed number of steps, or (`settle`) until they no longer drift."""
    spec, task = steps.task.spec, steps.task
    if not spec.settle:
        return by_count(steps.run, spec.warmup)
    device = steps.trainer.device
    return until_steady(steps.run, least=spec.warmup, device=device, rank=task.rank)


def _step_reports(steps: Steps, seconds: list[float], warm_steps: int) -> tuple[StepReport, ...]:
    return tuple(
        StepReport(
            step=i,
            seconds=seconds[i],
            loss=loss,
            grad_norm=norm if math.isfinite(norm) else None,
            warmup=i < warm_steps,
            skipped=not math.isfinite(norm),
            loss_scale=float(steps.scales[i]) if steps.scales else None,
        )
        for i, (loss, norm) in enumerate(steps.read())
    )


def _links(steps: Steps) -> tuple[LinkRate, ...]:
    """With probes: a quarter of their time for the groups of the layout, after everything."""
    seconds = float(steps.task.job.option("probe_s", "0")) / 4
    if seconds == 0 or steps.trainer.world.all_ranks.size == 1:
        return ()
    steps.task.heartbeat.enter("links")
    host = steps.task.place.host
    return axis_rates(steps.trainer.world, steps.trainer.device, min(1.0, seconds), host)


def _probe(
    when: Literal["before", "after"], task: Task, device: torch.device
) -> ProbeReport | None:
    """Option `probe_s`: that many seconds of products and copies, on all ranks at once."""
    seconds = float(task.job.option("probe_s", "0"))
    if seconds == 0:
        return None
    task.heartbeat.enter(f"probe {when}")
    side, count_bytes = (8192, 2**28) if device.type == "cuda" else (512, 2**26)
    _, flops_per_s, bytes_per_s = rates(device, side, count_bytes, seconds)
    return ProbeReport(when=when, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
