"""What one rank of our engine gets on a CPU while all ranks of a group do the same: products as
linear layers compute them, what lies between products, an update, a layer that is all overhead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fourfold.engine import compat
from fourfold.engine.model.layers import Layer
from fourfold.engine.model.positions import make_tables
from fourfold.engine.observe.clock import lower_quartile, reading
from fourfold.engine.observe.operators import moved_bytes
from fourfold.engine.parallel.groups import Group, all_gather
from fourfold.engine.process.task import CPU
from fourfold.engine.training.optimizer import Optimizer, OptimizerSettings
from fourfold.result import profile
from fourfold.spec import catalog

Work = Callable[[], object]
# A linear layer of few and of many weights, tokens first: what grows with weights shows apart from
# what grows with multiplications.
_LINEARS = ((256, 512, 512), (128, 1408, 512), (512, 1024, 1024), (256, 4096, 512))
_TOKENS, _UPDATED = 256, 2**22
_LLAMA = catalog.model("llama-tiny")
_SHAPE = replace(_LLAMA, hidden=512, ffn=1408, heads=8, kv_heads=4)
_SMALL = replace(_LLAMA, hidden=16, ffn=32, heads=2, kv_heads=1)
# Longer than a turn that the system gives to one of more ranks than cores: in a turn a rank is
# as fast as if it were alone.
_READING_S = 0.03
_READINGS = 3


def host_point(group: Group, seconds: float) -> profile.HostPoint:
    products = [
        _product(makes, *linear) for linear in _LINEARS for makes in ("output", "input", "weight")
    ]
    between, moved = _between_products()
    share_s = seconds / (len(products) + 9)

    def timed(work: Work, parts: int = 1) -> float:
        return together_s(work, group, parts * share_s)

    return profile.HostPoint(
        ranks=group.size,
        products=tuple(
            profile.GemmPoint(dtype="fp32", m=m, n=n, k=k, seconds=timed(work))
            for (m, n, k), work in products
        ),
        attention=_attention(timed),
        element_bytes=moved,
        element_s=timed(between, 2),
        update_params=_UPDATED,
        update_s=timed(_update(), 2),
        layer_s=timed(_passes(_small_layer())),
        wrapped_s=timed(_passes(_wrapped(group))) if group.size > 1 else 0.0,
        called_s=timed(_gather(group)) if group.size > 1 else 0.0,
    )


def together_s(work: Work, group: Group, budget_s: float) -> float:
    """Seconds of a call while all ranks of the group do the same, preemption included: readings
    span more than a turn, and everybody makes as many calls."""
    work()
    once_s = reading(work, CPU, 2)
    wanted = max(1.0, max(budget_s / _READINGS, _READING_S) / max(once_s, 1e-7))
    calls = torch.tensor([min(wanted, 1e5)])
    dist.broadcast(calls, group.ranks[0], group=group.handle)
    readings = []
    for _ in range(_READINGS):
        dist.barrier(group=group.handle)
        readings.append(reading(work, CPU, int(calls.item())))
    return lower_quartile(readings)


def _product(makes: str, tokens: int, outs: int, ins: int) -> tuple[tuple[int, int, int], Work]:
    """((m, n, k), work) in the memory layouts of a linear layer: weights [outs, ins]."""
    x, grad, weight = torch.randn(tokens, ins), torch.randn(tokens, outs), torch.randn(outs, ins)
    if makes == "output":
        return (tokens, outs, ins), lambda: x @ weight.t()
    if makes == "input":
        return (tokens, ins, outs), lambda: grad @ weight
    return (outs, ins, tokens), lambda: grad.t() @ x


def _attention(timed: Callable[[Work], float]) -> profile.AttentionPoint:
    sizes = {"batch": 1, "heads": _SHAPE.heads, "seq_len": _TOKENS, "head_size": _SHAPE.head_size}
    q, k, v = (torch.randn(*sizes.values(), requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.randn_like(out)
    return profile.AttentionPoint(
        kernel="flash",
        dtype="fp32",
        forward_s=timed(forward),
        backward_s=timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)),
        **sizes,
    )


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
    layer = Layer(shape, fused=True)
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


class Moved(compat.TorchDispatchMode):
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
    layer = Layer(_SMALL, fused=True)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


def _wrapped(group: Group) -> Layer:
    """As zero3 has it: weights are gathered for either pass, gradients scattered."""
    layer = _small_layer()
    fully_shard(layer, mesh=DeviceMesh.from_group(group.handle, "cpu"), reshard_after_forward=True)
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
