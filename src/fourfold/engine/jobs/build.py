"""The trainer of a task's run, on a rank that has met its peers: what most jobs begin with."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from fourfold.engine import compat
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.observe.memory import oom_report
from fourfold.engine.observe.phases import watch
from fourfold.engine.parallel.groups import World
from fourfold.engine.process.health import OomError, outcome_of
from fourfold.engine.process.task import Task
from fourfold.engine.training.optimizer import OptimizerSettings
from fourfold.engine.training.trainer import Trainer
from fourfold.search.legal import require_legal
from fourfold.spec import check
from fourfold.spec.run import RunSpec

Result = TypeVar("Result")


def with_trainer(
    task: Task,
    use: Callable[[Trainer, Ledger | None], Result],
    *,
    join: Callable[[torch.device], None] | None = None,
    settings: OptimizerSettings | None = None,
    counted: bool = True,
) -> Result:
    """What `use` makes of the trainer, and of its ledger where one counts (`counted`). `join` meets
    the peers in another way than the task's. Afterwards nothing is left to the next task of the
    process; when memory runs out, the OomError says what this rank held."""
    spec, device = task.spec, task.device(task.spec.device)
    compat.quiet()
    require_runnable(spec, device)
    limit_memory(spec, device)
    (join or task.join)(device)
    task.heartbeat.enter("build")
    ledger = Ledger(limit_bytes=spec.memory_limit) if counted and counts(spec, device) else None
    trainer: Trainer | None = None
    try:
        with ledger or contextlib.nullcontext():
            world = World.create(spec.layout, device.type)
            task.heartbeat.stage = world.stage
            world.warm(device)
            trainer = Trainer(spec, world, device=device, settings=settings)
            if ledger is not None:
                watch(trainer, ledger)
        synchronize(device)
        result = use(trainer, ledger)
    except BaseException as error:
        if outcome_of(error) == "oom":  # here the exception still holds what was held
            raise OomError(oom_report(device, ledger, trainer, error)) from error
        raise
    if trainer.step_graph is not None:
        trainer.step_graph.forget()  # NCCL waits for graphs that hold its collectives
    task.leave()
    del trainer
    release(device, compiled=spec.policy.compile)
    return result


def require_runnable(spec: RunSpec, device: torch.device) -> None:
    """Before anything is built: a rank that starts an impossible layout hangs its peers."""
    rule, micro_batch = "must be a number here, not 'auto'", spec.batch.micro_batch
    check.that(micro_batch > 0, "batch.micro_batch", None, rule, "give a number")
    if spec.policy.cuda_graph:
        hint = "use cuda_graph = false"
        check.that(device.type == "cuda", "policy.cuda_graph", True, "needs a GPU", hint)
        alone = spec.policy.offload == "none"
        check.that(alone, "policy.cuda_graph", True, "does not allow offload", hint)
    require_legal(spec)


def counts(spec: RunSpec, device: torch.device) -> bool:
    """Whether a ledger runs. Compiled code hides from it, and it keeps steps from being compiled,
    so there it runs only when a limit must be held."""
    if device.type != "cpu":
        return False
    return not spec.policy.compile or spec.memory_limit is not None


def limit_memory(spec: RunSpec, device: torch.device) -> None:
    if spec.memory_limit is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, spec.memory_limit / total), device)


def release(device: torch.device, *, compiled: bool) -> None:
    """A task leaves nothing to the next one of its process: no tensors, no compiled code (torch
    counts versions of a function, however different their models), no peak."""
    if compiled:
        compat.forget_compiled()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
