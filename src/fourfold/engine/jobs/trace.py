"""The trace job: walks a list of steps with real tensors, once under the ledger, which checks every
shape and byte, and once under the clock alone."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fourfold.cost.trace.steps import Ask, Step, generic_cluster
from fourfold.cost.trace.symbols import stretched_sizes
from fourfold.cost.trace.walk import PROGRAMS, StepRow, payload_bytes, tensor_row, walk
from fourfold.engine import compat
from fourfold.engine.compat import DTYPES
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.parallel.groups import World
from fourfold.engine.process.health import Heartbeat
from fourfold.engine.process.task import Task
from fourfold.engine.trace.layer import Pass, count_layer, layer_pass
from fourfold.engine.trace.steps import TraceRank, action_of
from fourfold.result.trace import StepMeasure, TraceMeasure
from fourfold.spec import codec
from fourfold.spec.run import RunSpec
from fourfold.spec.words import CP_KINDS

# Made and dropped inside the engine's joining of blocks: counted in peaks, never seen by name.
_INSIDE = ("block_fp32",)
# A busy host may keep gloo's thread waiting; what is still held after this is held for good.
_LET_GO_S = 10.0
_QUIET_S = 0.3
_WARM_UPS = 2


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
    if task.job.option("kind") == "layer":
        steps, checked = _walk_layer(task.spec, device, task.heartbeat), 0
        wrong = _wrong_messages(steps, task.job.option("payload_bytes"))
    else:
        steps, wrong, checked = _walk_twice(task, device)
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


def _wrong_messages(steps: list[StepMeasure], counted: str) -> list[str]:
    """Every byte that is sent, forward and backward, against the dry run's."""
    return [
        f"{step.name}: payload bytes {step.payload_bytes}, not {count}"
        for step, count in zip(steps, map(int, counted.split(",")), strict=True)
        if step.payload_bytes != count
    ]


def _walk_layer(spec: RunSpec, device: torch.device, heartbeat: Heartbeat) -> list[StepMeasure]:
    """Forward and backward, counted once and timed once, after warm-up."""
    world = World.create(spec.layout, device.type)
    world.warm(device)
    before = _allocated(device)
    with Ledger() as ledger:
        pass_once = layer_pass(spec, world, device)
    passes = []
    for name in (*["warm up"] * _WARM_UPS, "count", "time"):
        heartbeat.enter(name)
        with ledger if name == "count" else contextlib.nullcontext():
            passes.append(_halves(pass_once, ledger, device, before))
        heartbeat.step_done()
    *_, counted, timed = passes
    return [replace(half, seconds=t.seconds) for half, t in zip(counted, timed, strict=True)]


def _halves(
    pass_once: Pass, ledger: Ledger, device: torch.device, before: int
) -> list[StepMeasure]:
    steps: list[StepMeasure] = []

    def begin() -> float:
        ledger.begin()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        return time.perf_counter()

    def note(name: str) -> None:
        synchronize(device)
        seconds = time.perf_counter() - instants[-1]
        if device.type == "cpu":
            _wait_for_gloo(ledger)
        measured = _measure(name, ledger, device, before, _peak(ledger, device, before))
        steps.append(replace(measured, seconds=seconds))
        instants.append(begin())

    instants = [begin()]
    pass_once(note)
    return steps


def _walk_twice(task: Task, device: torch.device) -> tuple[list[StepMeasure], list[str], int]:
    kind: Any = task.job.option("kind")
    ask = replace(codec.from_json(Ask, task.job.option("ask")), rank=task.rank)
    program = PROGRAMS[kind](ask)
    world = World.create(ask.layout, device.type)
    world.warm(device)
    group = world.tp if kind.startswith("mlp") else world.all_ranks

    def traced() -> TraceRank:
        return TraceRank(program, ask, group, device, DTYPES[ask.dtype])

    task.heartbeat.enter("check")
    steps, wrong = _counted(traced(), device)
    task.heartbeat.step_done()
    task.heartbeat.enter("time")
    seconds = _timed(traced(), device)
    task.heartbeat.step_done()
    timed = [replace(step, seconds=s) for step, s in zip(steps, seconds, strict=True)]
    seen = [t for step in program.steps for t in step.tensors if t.name not in _INSIDE]
    return timed, wrong, len(seen)


def _counted(traced: TraceRank, device: torch.device) -> tuple[list[StepMeasure], list[str]]:
    """Every step under the ledger: what it holds, computes and sends against the list."""
    program = traced.program
    steps: list[StepMeasure] = []
    wrong: list[str] = []
    before = _allocated(device)
    # Bytes held do not depend on links, so any cluster will do.
    rows = walk(program, generic_cluster(program.ranks), workspace_bytes=0)
    with Ledger() as ledger:
        for step, row in zip(program.steps, rows, strict=True):
            ledger.begin()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            _do(step, traced)
            wrong += _wrong_tensors(step, traced)
            peak = _peak(ledger, device, before)
            _end(step, traced)
            live = _live_after_messages(ledger, row.live_bytes)
            seen = _measure(step.name, ledger, device, before, peak)
            wrong += _wrong_counts(step, traced, replace(seen, live_bytes=live), row)
            steps.append(seen)
    return steps, wrong


def _peak(ledger: Ledger, device: torch.device, before: int) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    return ledger.peak_bytes


def _measure(
    name: str, ledger: Ledger, device: torch.device, before: int, peak: int
) -> StepMeasure:
    """What the ledger has seen since it began; on a GPU the allocator tells what is live."""
    return StepMeasure(
        name=name,
        seconds=0.0,
        flops=ledger.flops,
        payload_bytes=sum(ledger.traffic.values()),
        live_bytes=_allocated(device) - before if device.type == "cuda" else ledger.live_bytes,
        peak_bytes=peak,
    )


def _live_after_messages(ledger: Ledger, expected_bytes: int) -> int:
    """Live bytes once messages are over: gloo's own thread lets go of a sent buffer a moment after
    the wait for it returns."""
    until = time.monotonic() + _LET_GO_S
    while ledger.live_bytes > expected_bytes and time.monotonic() < until:
        time.sleep(0.001)
    return ledger.live_bytes


def _wait_for_gloo(ledger: Ledger) -> None:
    """Until gloo's threads have let go of what was sent: the live bytes fall no more."""
    until = time.monotonic() + _LET_GO_S
    seen, since = ledger.live_bytes, time.monotonic()
    while time.monotonic() < min(since + _QUIET_S, until):
        time.sleep(0.005)
        if ledger.live_bytes != seen:
            seen, since = ledger.live_bytes, time.monotonic()


def _timed(traced: TraceRank, device: torch.device) -> list[float]:
    """Seconds of each step; ranks start a step together, so that nobody waits in it for a peer. But
    not the rounds of a ring: ranks fold them differently, and each is a meeting anyway."""
    seconds = []
    for step in traced.program.steps:
        synchronize(device)
        if not step.name.startswith("round"):
            dist.barrier()
        began = time.perf_counter()
        _do(step, traced)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        _end(step, traced)
    return seconds


def _do(step: Step, traced: TraceRank) -> None:
    for left in reversed(range(step.times)):
        action_of(traced.program.kind, step.name)(traced)
        if left:
            _end(step, traced)


def _end(step: Step, traced: TraceRank) -> None:
    for name in step.frees:
        traced.t.pop(name, None)
    for source, target in step.moves:
        traced.t[target] = traced.t.pop(source)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _wrong_tensors(step: Step, traced: TraceRank) -> list[str]:
    """Shape and bytes of every tensor the step has written."""
    wrong = []
    for tensor in step.tensors:
        if tensor.name in _INSIDE:
            continue
        row = tensor_row(tensor, traced.program)
        real = traced.t[tensor.name]
        if tuple(real.shape) != row.shape:
            wrong.append(f"{step.name}: {row.name} is {tuple(real.shape)}, not {row.shape}")
        if real.numel() * real.element_size() != row.bytes:
            wrong.append(f"{step.name}: {row.name} has {real.nbytes} bytes, not {row.bytes}")
    return wrong


def _wrong_counts(step: Step, traced: TraceRank, seen: StepMeasure, row: StepRow) -> list[str]:
    """Held bytes, messages, and FLOPs where the kernel counts as the list does (no causal mask)."""
    expected = {"live bytes": (seen.live_bytes, row.live_bytes)}
    if traced.ranks > 1:  # alone, the exchange is still called, but nothing leaves the rank
        expected["payload bytes"] = (seen.payload_bytes, payload_bytes(step, traced.program))
    masked = traced.ask.attention == "flash" and traced.program.kind in CP_KINDS
    if not (masked and step.name.startswith(("attend", "round"))):
        expected["FLOPs"] = (seen.flops, row.flops_rank)
    return [
        f"{step.name}: {what} {real}, not {listed}"
        for what, (real, listed) in expected.items()
        if real != listed
    ]
