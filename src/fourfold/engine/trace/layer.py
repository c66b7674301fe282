"""The trace of a layer, the engine's own, on fake tensors or real ones: a middle layer of three, so
that there is no embedding and no head."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fourfold.engine import compat, compat_modes
from fourfold.engine.compat import DTYPES, activation_dtype
from fourfold.engine.model.decoder import Decoder
from fourfold.engine.model.positions import Tables
from fourfold.engine.observe.operators import gpu_kernels
from fourfold.engine.observe.phases import axes_of
from fourfold.engine.parallel.context import positions_of, rank_tables
from fourfold.engine.parallel.data import before_backward
from fourfold.engine.parallel.groups import World, fake_world
from fourfold.engine.parallel.order import ORDER
from fourfold.engine.process.task import CPU
from fourfold.engine.trace.step_ledger import WEIGHTS, WEIGHTS_AGAIN, StepLedger
from fourfold.result.trace import LayerTrace
from fourfold.spec.run import RunSpec

_MIDDLE = range(1, 2)
# Modules of a layer: their step, their output, and the step that goes on after them.
_STEPS = {
    "attention_norm": ("attention norm", "h1", ""),
    "attention.input_comm": ("attention input", "h1_all", ""),
    "attention.qkv": ("project", "qkv", "rotate"),
    "attention.q": ("project q", "q_flat", ""),
    "attention.k": ("project k", "k_flat", ""),
    "attention.v": ("project v", "v_flat", "rotate"),
    "attention.q_norm": ("norm q", "q_normed", ""),
    "attention.k_norm": ("norm k", "k_normed", "rotate"),
    "attention.core": ("attend", "out", "join heads"),
    "attention.core.inner": ("attend", "out_heads", "heads to tokens"),
    "attention.out": ("out projection", "o", "add o"),
    "mlp_norm": ("MLP norm", "h2", ""),
    "mlp.input_comm": ("MLP input", "h2_all", ""),
    "mlp.gate_up": ("up", "gate_up", "activate"),
    "mlp.gate": ("gate", "gate", "activate"),
    "mlp.up": ("up", "up", "activate"),
    "mlp.down": ("down", "m", "add m"),
    "attention.q_down": ("q down", "q_narrow", ""),
    "attention.kv_down": ("kv down", "kv_narrow", ""),
    "attention.kv_norm": ("norm kv", "kv_normed", ""),
    "attention.kv": ("kv up", "kv", "rotate"),
    "mlp.router": ("route", "scores", "rows by expert"),
    "mlp.dispatch.away": ("rows to experts", "arrived", "rows by expert, arrived"),
    "mlp.experts.gate_up": ("experts up", "rows_gate_up", "experts activate"),
    "mlp.experts.down": ("experts down", "rows_out", "rows by rank"),
    "mlp.dispatch.home": ("rows back", "came_home", "add up experts"),
    "mlp.shared.gate_up": ("shared up", "shared_gate_up", "shared activate"),
    "mlp.shared.gate": ("shared gate", "shared_gate", ""),
    "mlp.shared.up": ("shared up", "shared_up", "shared activate"),
    "mlp.shared.down": ("shared down", "shared", "add m"),
}
_INPUTS = {
    "attention.core": ("q", "k", "v"),
    "attention.out": ("mixed",),
    "mlp_norm": ("x1",),
    "mlp.down": ("act",),
}


def count_layer(spec: RunSpec, rank: int) -> LayerTrace:
    """The steps of one rank on fake tensors, as on a GPU, without hardware."""
    with fake_world(spec.layout, rank) as world:
        decoder = _decoder(spec, world)
        names = {"dp": "dpxcp"}
        axes = {g: names.get(axis, axis) for g, axis in axes_of(world, spec.model).items()}
        gc.collect()
        with gpu_kernels(), compat_modes.fake_mode(), StepLedger(axes) as watched:
            ledger = cast(StepLedger, watched)
            x, tables = _inputs(decoder, spec, world, CPU)
            for parameter, name in _weights(decoder):
                ledger.name(parameter, name)
            ledger.name(x, "x")
            for name, table in tables._asdict().items():
                if table is not None:
                    ledger.name(table, name)
            _follow(decoder, ledger)
            ledger.begin_step(WEIGHTS)
            _once(decoder, spec, x, tables, ledger)
            return LayerTrace(tuple(ledger.steps))


def _once(decoder: Decoder, spec: RunSpec, x: Tensor, tables: Tables, ledger: StepLedger) -> None:
    """One pass; freed tensors must be gone when they are freed, whatever the collector does."""
    gc.disable()
    try:
        y = decoder(x, tables)
        _assign(ledger, y)
        ledger.name(y, "y")
        ledger.nodes.clear()
        ledger.begin_step("gradient")
        d_y = torch.ones_like(y)
        ledger.name(d_y, "d_y")
        ledger.begin_step(WEIGHTS_AGAIN)
        _backward(decoder, spec, y, d_y)
        ledger.begin_step("")
    finally:
        gc.enable()


def _backward(decoder: Decoder, spec: RunSpec, y: Tensor, d_y: Tensor) -> None:
    if isinstance(decoder, FSDPModule):
        before_backward(decoder, spec.policy.zero, last=True)
    y.backward(d_y)


def _follow(decoder: Decoder, ledger: StepLedger) -> None:
    """Begin a step wherever a module of the layer begins and ends; backward, a node of autograd's
    graph belongs to the step that made it."""
    (layer,) = decoder.blocks.values()
    paths: dict[nn.Module, list[str]] = {}
    for path, module in layer.named_modules(remove_duplicate=False):
        if path in _STEPS:
            paths.setdefault(module, []).append(path)
    steps = dict(_STEPS)
    if hasattr(layer.attention.core, "inner"):
        steps["attention.core"] = ("tokens to heads", *_STEPS["attention.core"][1:])
    if layer.norms_after:
        steps["attention_norm"] = (*_STEPS["attention_norm"][:2], "add o")
        steps["mlp_norm"] = (*_STEPS["mlp_norm"][:2], "add m")
    for module, places in paths.items():
        _hook(module, places, steps, ledger)


def _hook(
    module: nn.Module, paths: list[str], steps: dict[str, tuple[str, str, str]], ledger: StepLedger
) -> None:
    """A module in several places is called from them in turn."""
    before_paths, behind_paths = itertools.cycle(paths), itertools.cycle(paths)

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        path = next(before_paths)
        inputs = [value for value in args if isinstance(value, Tensor)]
        _assign(ledger, *inputs)
        for value, name in zip(inputs, _INPUTS.get(path, ()), strict=False):
            ledger.name(value, name)
        ledger.begin_step(steps[path][0])
        for kind, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                ledger.name(parameter, _weight_name(path, kind))

    def behind(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        output, then = steps[next(behind_paths)][1:]
        out = out[-1] if isinstance(out, tuple) else out  # a router's choices have no gradient
        _assign(ledger, out)
        ledger.name(out, output)
        ledger.begin_step(then or ledger.step)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(behind)


def _assign(ledger: StepLedger, *tensors: Tensor) -> None:
    """Nodes of the graph that are new since the last call belong to the present step."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    step = f"{ledger.step}, back"
    while waiting:
        node = waiting.pop()
        if node in ledger.nodes or hasattr(node, "variable"):
            continue
        ledger.nodes.add(node)
        node.register_prehook(lambda *_: ledger.enter_step(step))
        waiting += [other for other, _ in node.next_functions if other is not None]


def _weight_name(path: str, kind: str) -> str:
    return f"{'W' if kind == 'weight' else 'b'}_{path.rpartition('.')[2]}"


def _weights(decoder: Decoder) -> list[tuple[nn.Parameter, str]]:
    (layer,) = decoder.blocks.values()
    split = ((name.rpartition("."), parameter) for name, parameter in layer.named_parameters())
    return [(parameter, _weight_name(path, kind)) for (path, _, kind), parameter in split]


def _decoder(spec: RunSpec, world: World) -> Decoder:
    """One layer without storage, every axis applied in the engine's order. It is not its model's
    last layer, so that zero3 lets go of its weights between the passes."""
    with torch.device("meta"):
        decoder = Decoder(
            spec.model, spec.batch.seq_len, _MIDDLE, fused=spec.policy.fused_projections
        ).to(DTYPES[spec.policy.dtypes.param])
    for apply in ORDER:
        apply(decoder, spec, world)
    (layer,) = decoder.blocks.values()
    if isinstance(layer, FSDPModule):
        layer.set_reshard_after_forward(spec.policy.zero == 3)
    return decoder


def _inputs(
    decoder: Decoder, spec: RunSpec, world: World, device: torch.device
) -> tuple[Tensor, Tables]:
    """What a rank has before the pass: its weights, the tables of positions, its part of x."""
    decoder.to_empty(device=device)
    seq_len, cp = spec.batch.seq_len, world.cp
    positions = positions_of(spec.policy.cp_kind, seq_len, cp.size, cp.rank, device)
    tables = rank_tables(spec, world, positions)
    shape = (1, positions.shape[0] // world.tp.size, spec.model.hidden)
    dtype = activation_dtype(spec.policy.dtypes.compute)
    return torch.empty(shape, device=device, dtype=dtype, requires_grad=True), tables


# What is measured one after the other, by name.
Actions = Sequence[tuple[str, Callable[[], None]]]


def layer_pass(spec: RunSpec, world: World, device: torch.device) -> Callable[[], Actions]:
    """The same layer with real tensors: one forward and backward, as often as it is begun."""
    decoder = _decoder(spec, world)
    x, tables = _inputs(decoder, spec, world, device)
    parameters = list(decoder.parameters())
    with torch.no_grad():
        x.normal_()
        for parameter in parameters:
            compat.local(parameter).normal_(0.0, 0.02)

    def begin() -> Actions:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        held: list[Tensor] = []  # with the gradient, as where steps are counted

        def forward() -> None:
            held.append(decoder(x, tables))

        def backward() -> None:
            held.append(torch.ones_like(held[0]))
            _backward(decoder, spec, *held)

        return (("forward", forward), ("backward", backward))

    return begin
