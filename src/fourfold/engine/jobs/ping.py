"""The ping job: every rank answers a few timed all-reduces; no model."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from fourfold.engine.process.health import NonFiniteError, inject_fault
from fourfold.engine.process.task import Task
from fourfold.result.job import RankFacts
from fourfold.result.report import RankMemory, RankSteps, StepReport

_ELEMENTS = 4096


def perform(task: Task) -> RankFacts:
    spec = task.spec
    device = task.device(spec.device)
    task.join(device)
    ready_at = time.time()
    steps = []
    for step in range(spec.warmup + spec.steps):
        task.heartbeat.enter("prepare")
        ones = torch.ones(_ELEMENTS, device=device)
        inject_fault(spec.fault, rank=task.rank, step=step, tensors=[ones])
        task.heartbeat.enter("all-reduce")
        began = time.perf_counter()
        dist.all_reduce(ones)
        total = float(ones[0])
        steps.append(
            StepReport(step=step, seconds=time.perf_counter() - began, warmup=step < spec.warmup)
        )
        if not math.isfinite(total):
            raise NonFiniteError(f"the sum of ones over {task.place.world} ranks is {total}")
        assert total == task.place.world, f"sum {total} over {task.place.world} ranks"
        task.heartbeat.step_done()
    task.leave()
    return RankFacts(
        memory=RankMemory(rank=task.rank, stage=0, peak_bytes=0),
        times=RankSteps(
            rank=task.rank, host=task.place.host, step_s=tuple(step.seconds for step in steps)
        ),
        steps=tuple(steps),
        start_s=ready_at - task.began_at,
        window_s=sum(step.seconds for step in steps if not step.warmup),
    )
