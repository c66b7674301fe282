"""What one rank of our engine gets on a CPU while all ranks of a group do the same: products as
linear layers compute them, what lies between products, an update, a layer that is all overhead."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fourfold.engine import compat, compat_modes
from fourfold.engine.microbench.device import Rounds, Work, attention_passes, in_rounds
from fourfold.engine.model.decoder import Layer
from fourfold.engine.model.positions import make_tables
from fourfold.engine.observe.operators import moved_bytes
from fourfold.engine.parallel.groups import Group, all_gather
from fourfold.engine.process.task import CPU
from fourfold.engine.training.optimizer import Optimizer, OptimizerSettings
from fourfold.result import profile
from fourfold.spec import catalog

# A linear layer of few and of many weights, tokens first: what grows with weights shows apart from
# what grows with multiplications.
_LINEARS = (
    (256, 512, 512),
    (128, 1408, 512),
    (64, 2048, 1024),
    (512, 1024, 1024),
    (256, 4096, 512),
)
_TOKENS, _UPDATED = 256, 2**22
# More than caches hold: a step comes to a layer's weights when all others have been used since.
_WEIGHTS = 2**24
_LLAMA = catalog.model("llama-tiny")
_SHAPE = replace(_LLAMA, hidden=512, ffn=1408, heads=8, kv_heads=4)
_SMALL = replace(_LLAMA, hidden=16, ffn=32, heads=2, kv_heads=1)


def host_point(group: Group, seconds: float, cores: int) -> profile.HostPoint:
    works = HostWorks(group)
    return works.point(in_rounds(list(works.works.values()), group, seconds, cores))


class HostWorks:
    """What is timed, by name, and what the timings make."""

    def __init__(self, group: Group) -> None:
        self.ranks = group.size
        weights = torch.ones(_WEIGHTS)
        self.products = [
            _product(makes, weights, *linear)
            for linear in _LINEARS
            for makes in ("output", "input", "weight")
        ]
        between, self.moved = _between_products()
        sizes = (1, _SHAPE.heads, _TOKENS, _SHAPE.head_size)
        forward, backward = attention_passes(sizes, CPU, torch.float32)
        self.works: dict[str, Work] = {
            **{f"product {at}": work for at, (_, work) in enumerate(self.products)},
            "forward": forward,
            "backward": backward,
            "between": between,
            "update": _update(),
            "layer": _passes(_small_layer()),
        }
        if group.size > 1:
            self.works |= {
                "wrapped": _passes(_wrapped(group)),
                "called": _gather(group),
            }

    def point(self, rounds: Rounds) -> profile.HostPoint:
        took = dict(zip(self.works, rounds.seconds, strict=True))
        return profile.HostPoint(
            ranks=self.ranks,
            products=tuple(
                profile.GemmPoint(dtype="fp32", m=m, n=n, k=k, seconds=took[f"product {at}"])
                for at, ((m, n, k), _) in enumerate(self.products)
            ),
            attention=profile.AttentionPoint(
                kernel="flash",
                dtype="fp32",
                batch=1,
                heads=_SHAPE.heads,
                head_size=_SHAPE.head_size,
                seq_len=_TOKENS,
                forward_s=took["forward"],
                backward_s=took["backward"],
            ),
            element_bytes=self.moved,
            element_s=took["between"],
            update_params=_UPDATED,
            update_s=took["update"],
            layer_s=took["layer"],
            wrapped_s=took.get("wrapped", 0.0),
            called_s=took.get("called", 0.0),
            unsteady=rounds.unsteady,
        )


def _product(
    makes: str, weights: Tensor, tokens: int, outs: int, ins: int
) -> tuple[tuple[int, int, int], Work]:
    """((m, n, k), work) in the memory layouts of a linear layer: weights [outs, ins], another piece
    of `weights` in every call."""
    x, grad = torch.randn(tokens, ins), torch.randn(tokens, outs)
    each = outs * ins
    whole = weights[: weights.numel() // each * each].view(-1, outs, ins)
    pieces = itertools.cycle(whole.unbind())
    if makes == "output":
        return (tokens, outs, ins), lambda: x @ next(pieces).t()
    if makes == "input":
        return (tokens, ins, outs), lambda: grad @ next(pieces)
    return (outs, ins, tokens), lambda: torch.mm(grad.t(), x, out=next(pieces))


class _Free(torch.autograd.Function):
    """Stands for a product: hands out what is there already, both ways."""

    @staticmethod
    def forward(ctx: Any, ready: Tensor, grads: tuple[Tensor, ...], *given: Tensor) -> Tensor:
        ctx.grads = grads
        return ready.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.grads


class _Ready(nn.Module):
    def __init__(self, ready: Tensor, *grads: Tensor) -> None:
        super().__init__()
        self.ready, self.grads = ready, grads

    def forward(self, *given: Any) -> Tensor:
        tensors = [x for x in given if isinstance(x, Tensor)]
        return _Free.apply(self.ready, self.grads, *tensors)


def _between_products() -> tuple[Work, int]:
    """(one of our layers both ways without its products and attention, bytes that it moves)."""
    shape, tokens = _SHAPE, _TOKENS
    layer = Layer(shape, 0, fused=True)
    nn.init.ones_(layer.attention_norm.weight)
    nn.init.ones_(layer.mlp_norm.weight)

    def rows(width: int) -> Tensor:
        return torch.randn(1, tokens, width)

    def heads(count: int) -> Tensor:
        return torch.randn(1, tokens, count, shape.head_size).transpose(1, 2)

    hidden, width = shape.hidden, shape.attention_width
    layer.attention.qkv = _Ready(rows(width + 2 * shape.kv_width), rows(hidden))  # type: ignore[assignment]
    grads = (heads(shape.heads), heads(shape.kv_heads), heads(shape.kv_heads))
    layer.attention.core = _Ready(heads(shape.heads), *grads)
    layer.attention.out = _Ready(rows(hidden), rows(width))  # type: ignore[assignment]
    layer.mlp.gate_up = _Ready(rows(2 * shape.ffn), rows(hidden))  # type: ignore[assignment]
    layer.mlp.down = _Ready(rows(hidden), rows(shape.ffn))  # type: ignore[assignment]
    tables = make_tables(shape, torch.arange(tokens), range(shape.heads))
    x, grad = rows(hidden).requires_grad_(), rows(hidden)

    def work() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        layer(x, tables).backward(grad)

    with Moved() as moved:
        work()
    return work, moved.bytes


class Moved(compat_modes.TorchDispatchMode):
    """Counts bytes that operators read and write besides products, attention and traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, compat.distributed_tensors()) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.bytes += moved_bytes(func, args, kwargs or {}, out)
        return out


def _update() -> Work:
    weight = nn.Parameter(torch.randn(1024, _UPDATED // 1024))
    grad = torch.randn_like(weight)
    optimizer = Optimizer([weight], OptimizerSettings(), kind="adamw", dtype=torch.float32)
    factor = torch.ones(())

    def work() -> None:
        weight.grad = grad
        optimizer.step(factor=factor)

    return work


def _small_layer() -> Layer:
    layer = Layer(_SMALL, 0, fused=True)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


def _wrapped(group: Group) -> Layer:
    """As zero3 has it: weights are gathered for either pass, gradients scattered."""
    layer = _small_layer()
    mesh = DeviceMesh.from_group(group.handle, "cpu")
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return layer


def _passes(layer: Layer) -> Work:
    """Both passes, which take their operators' start and nothing else."""
    tables = make_tables(_SMALL, torch.arange(4), range(_SMALL.heads))
    x, grad = torch.randn(1, 4, 16, requires_grad=True), torch.randn(1, 4, 16)

    def work() -> None:
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x, tables).backward(grad)

    return work


def _gather(group: Group) -> Work:
    part = torch.ones(1, 16)
    return lambda: all_gather(part, group, 0)
