"""The trace of a layer, run: the engine's own layer, forward and backward, under its ledger.

A middle layer of a three-layer model, so that there is no embedding and no head; cut by the same
functions as in a real run. Its memory, FLOPs and messages are those of one rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.cost.trace.layer import layer
from fourfold.cost.trace.layer_ask import LayerAsk, check_layer
from fourfold.cost.trace.walk import payload_bytes
from fourfold.engine.compat import DTYPES
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import Tables, make_tables
from fourfold.engine.observe.clock import synchronize
from fourfold.engine.observe.ledger import Ledger
from fourfold.engine.parallel.context import apply_context, token_positions
from fourfold.engine.parallel.data import apply_data, before_backward
from fourfold.engine.parallel.groups import World
from fourfold.engine.parallel.tensor import apply_tensor
from fourfold.engine.process.heartbeat import Heartbeat
from fourfold.result.trace import StepMeasure
from fourfold.spec.policy import Policy

_WARM_UPS = 2


def walk_layer(
    ask: LayerAsk, device: torch.device, heartbeat: Heartbeat
) -> tuple[list[StepMeasure], list[str]]:
    """Forward and backward, counted once and timed once, after warm-up."""
    check_layer(ask)
    world = World.create(ask.layout, device.type)
    world.warm(device)
    before = _allocated(device)
    ledger = Ledger()
    with ledger:
        pass_once = _layer(ask, world, device)
    for _ in range(_WARM_UPS):
        heartbeat.enter("warm up")
        pass_once(lambda name: None)
        heartbeat.step_done()
    heartbeat.enter("count")
    with ledger:
        counted = _counted(pass_once, ledger, device, before)
    heartbeat.step_done()
    heartbeat.enter("time")
    seconds = _timed(pass_once, device)
    heartbeat.step_done()
    steps = [replace(step, seconds=s) for step, s in zip(counted, seconds, strict=True)]
    return steps, _wrong_messages(ask, steps)


def _wrong_messages(ask: LayerAsk, steps: list[StepMeasure]) -> list[str]:
    """Every byte that is sent, forward and backward, against the list."""
    program = layer(ask)
    names = [step.name for step in program.steps]
    turn = names.index("gradient")
    halves = (program.steps[:turn], program.steps[turn:])
    said = [sum(payload_bytes(step, program) for step in half) for half in halves]
    return [
        f"{step.name}: payload bytes {step.payload_bytes}, not {count}"
        for step, count in zip(steps, said, strict=True)
        if step.payload_bytes != count
    ]


Pass = Callable[[Callable[[str], None]], None]


def _layer(ask: LayerAsk, world: World, device: torch.device) -> Pass:
    """One forward and backward; what it is handed is called after each of the two."""
    decoder, policy = _decoder(ask, world, device)
    positions = token_positions(ask.cp_kind, ask.tokens, world.cp, device)
    each = ask.model.heads // ask.tp
    heads = range(world.tp.rank * each, (world.tp.rank + 1) * each)
    tables: Tables = make_tables(ask.model, positions, heads)
    shape = (1, ask.tokens // ask.cp // ask.tp, ask.model.hidden)
    dtype = DTYPES[ask.dtype]
    x = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    parameters = list(decoder.parameters())

    def once(then: Callable[[str], None]) -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        y = decoder(x, tables)
        then("forward")
        if ask.shards > 1:
            before_backward(decoder, policy.zero, last=True)
        d_y: Tensor = torch.ones_like(y)
        y.backward(d_y)
        then("backward")

    return once


def _decoder(ask: LayerAsk, world: World, device: torch.device) -> tuple[Decoder, Policy]:
    """Cut over tp and cp, sharded over dp x cp where there is anything to shard over."""
    middle = replace(ask.model, layers=3)
    policy = Policy(
        precision="fp32",
        sharding=ask.sharding,
        param_dtype=ask.dtype,
        compute_dtype=ask.dtype,
        reduce_dtype=ask.dtype,
        grad_dtype=ask.dtype,
    )
    with torch.device("meta"):
        decoder = Decoder(middle, ask.tokens, range(1, 2)).to(DTYPES[ask.dtype])
    apply_tensor(decoder, middle, world.tp, seq_len=ask.tokens, sequence=True)
    apply_context(decoder, ask.cp_kind, world.cp)
    if ask.shards > 1:
        apply_data(decoder, world.data_mesh(policy.zero), policy)
    decoder.to_empty(device=device)
    with torch.no_grad():
        for parameter in decoder.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(0.0, 0.02)
    return decoder, policy


def _counted(
    pass_once: Pass, ledger: Ledger, device: torch.device, before: int
) -> list[StepMeasure]:
    steps: list[StepMeasure] = []

    def note(name: str) -> None:
        synchronize(device)
        on_gpu = device.type == "cuda"
        live, peak = ledger.live_bytes, ledger.peak_bytes
        if on_gpu:
            live = _allocated(device) - before
            peak = torch.cuda.max_memory_allocated(device) - before
        steps.append(
            StepMeasure(
                name=name,
                seconds=0.0,
                flops=ledger.flops,
                payload_bytes=sum(ledger.traffic.values()),
                live_bytes=live,
                peak_bytes=peak,
            )
        )
        ledger.begin()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)

    ledger.begin()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    pass_once(note)
    return steps


def _timed(pass_once: Pass, device: torch.device) -> list[float]:
    synchronize(device)
    instants = [time.perf_counter()]

    def note(name: str) -> None:
        synchronize(device)
        instants.append(time.perf_counter())

    pass_once(note)
    return [end - begin for begin, end in itertools.pairwise(instants)]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
