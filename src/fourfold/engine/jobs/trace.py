"""The trace job: does the steps of a list, or a layer forward and backward, with real tensors: once
under the ledger, which checks what is written, sent and held, and once under the clock alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fourfold.cost.trace.divided import PROGRAMS
from fourfold.cost.trace.steps import Ask
from fourfold.cost.trace.symbols import stretched_sizes
from fourfold.cost.trace.walk import walk
from fourfold.engine import compat
from fourfold.engine.compat import DTYPES
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.parallel.groups import World
from fourfold.engine.process.task import Task
from fourfold.engine.trace.layer import Actions, count_layer, layer_pass
from fourfold.engine.trace.steps import INSIDE, TraceRank
from fourfold.result.trace import StepMeasure, TraceMeasure
from fourfold.spec import codec

# A busy host may keep gloo's thread waiting; what is still held after this is held for good.
_LET_GO_S = 10.0
_QUIET_S = 0.3
_WARM_UPS = 2  # of a layer

# Of every action: what the ledger must count.
Expected = list[dict[str, int]]


def perform(task: Task) -> None:
    """Option `count`: a layer's rank, counted on fake tensors, and the same with other sizes."""
    compat.quiet()
    if task.job.option("count"):
        for part, spec in enumerate((task.spec, stretched_sizes(task.spec))):
            task.heartbeat.enter("counting")
            task.answer(count_layer(spec, int(task.job.option("count"))), part=part)
            task.heartbeat.step_done()
        return
    device = task.device(task.job.option("device", "auto"))
    task.join(device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    steps, wrong, checked = (_layer if task.job.option("kind") == "layer" else _list)(task, device)
    complaints: list[Any] = [None] * task.place.world
    dist.all_gather_object(complaints, wrong)
    if task.rank == 0:
        task.answer(
            TraceMeasure(
                device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
                torch=torch.__version__,
                ranks=task.place.world,
                peaks_from="allocator" if device.type == "cuda" else "ledger",
                steps=tuple(steps),
                checked=checked * task.place.world,
                wrong=tuple(
                    f"rank {r}: {text}" for r, texts in enumerate(complaints) for text in texts
                ),
            )
        )
    task.leave()


def _layer(task: Task, device: torch.device) -> tuple[list[StepMeasure], list[str], int]:
    """Forward and backward; every byte that is sent, against the dry run's."""
    world = World.create(task.spec.layout, device.type)
    world.warm(device)
    before, ledger = _allocated(device), Ledger()
    with ledger:
        begin = layer_pass(task.spec, world, device)
    for _ in range(_WARM_UPS):
        task.heartbeat.enter("warm up")
        _timed(begin(), device)
        task.heartbeat.step_done()
    sent = task.job.option("payload_bytes").split(",")
    expected = [{"payload bytes": int(count)} for count in sent]
    steps, wrong = _counted_and_timed(task, begin, expected, ledger, device, before)
    return steps, wrong, 0


def _list(task: Task, device: torch.device) -> tuple[list[StepMeasure], list[str], int]:
    """Every step: what it holds, computes and sends against the list, and each tensor."""
    kind: Any = task.job.option("kind")
    ask = replace(codec.from_json(Ask, task.job.option("ask")), rank=task.rank)
    program = PROGRAMS[kind](ask)
    world = World.create(ask.layout, device.type)
    world.warm(device)
    group = world.tp if kind.startswith("mlp") else world.all_ranks
    walked = walk(program)
    expected: Expected = []
    for step, row in zip(program.steps, walked, strict=True):
        expected.append({"live bytes": row.live_bytes})
        if group.size > 1:  # alone, the exchange is still called, but nothing leaves the rank
            expected[-1]["payload bytes"] = row.times * sum(m.bytes for m in row.messages)
        if not any(op.kind == "attention" for op in step.operations):
            # a masked kernel is counted as the whole square
            expected[-1]["FLOPs"] = row.times * row.flops
    wrong_tensors: list[str] = []

    def begin() -> Actions:
        rank = TraceRank(program, ask, group, device, DTYPES[ask.dtype], wrong=wrong_tensors)
        pairs = zip(program.steps, walked, strict=True)
        return [(step.name, partial(rank.do, step, row)) for step, row in pairs]

    before = _allocated(device)
    steps, wrong = _counted_and_timed(task, begin, expected, Ledger(), device, before)
    seen = [t for row in walked for t in row.tensors if t.name not in INSIDE]
    return steps, [*dict.fromkeys(wrong_tensors), *wrong], len(seen)


def _counted_and_timed(
    task: Task,
    begin: Callable[[], Actions],
    expected: Expected,
    ledger: Ledger,
    device: torch.device,
    before: int,
) -> tuple[list[StepMeasure], list[str]]:
    task.heartbeat.enter("count")
    with ledger:
        steps, wrong = _counted(begin(), expected, ledger, device, before)
    task.heartbeat.step_done()
    task.heartbeat.enter("time")
    seconds = _timed(begin(), device)
    task.heartbeat.step_done()
    return [replace(step, seconds=s) for step, s in zip(steps, seconds, strict=True)], wrong


def _counted(
    actions: Actions, expected: Expected, ledger: Ledger, device: torch.device, before: int
) -> tuple[list[StepMeasure], list[str]]:
    """What the ledger sees of every action; on a GPU the allocator tells memory."""
    steps: list[StepMeasure] = []
    wrong: list[str] = []
    for (name, do), must_be in zip(actions, expected, strict=True):
        ledger.begin()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        do()
        synchronize(device)
        _wait_for_gloo(ledger, must_be.get("live bytes"))
        sent = sum(ledger.traffic.values())
        seen = {"live bytes": ledger.live_bytes, "payload bytes": sent, "FLOPs": ledger.flops}
        wrong += [
            f"{name}: {what} {seen[what]}, not {count}"
            for what, count in must_be.items()
            if seen[what] != count
        ]
        live, peak = ledger.live_bytes, ledger.peak_bytes
        if device.type == "cuda":
            live = _allocated(device) - before
            peak = torch.cuda.max_memory_allocated(device) - before
        steps.append(
            StepMeasure(
                name=name,
                seconds=0.0,
                flops=ledger.flops,
                payload_bytes=sent,
                live_bytes=live,
                peak_bytes=peak,
            )
        )
    return steps, wrong


def _wait_for_gloo(ledger: Ledger, expected_bytes: int | None) -> None:
    """Gloo's own threads let go of a sent buffer a moment after the wait for it returns: until as
    much is live as expected or, where nobody knows, it falls no more."""
    until = time.monotonic() + _LET_GO_S
    seen, since = ledger.live_bytes, time.monotonic()
    while ledger.live_bytes != expected_bytes and time.monotonic() < until:
        if expected_bytes is None and time.monotonic() > since + _QUIET_S:
            return
        time.sleep(0.001)
        if ledger.live_bytes != seen:
            seen, since = ledger.live_bytes, time.monotonic()


def _timed(actions: Actions, device: torch.device) -> list[float]:
    """Seconds of each action; ranks start it together, so that nobody waits in it for a peer. But
    not the rounds of a ring: ranks fold them differently, and each is a meeting anyway."""
    seconds = []
    for name, do in actions:
        synchronize(device)
        if not name.startswith("round"):
            dist.barrier()
        began = time.perf_counter()
        do()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
