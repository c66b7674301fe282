"""Kernels timed alone: warm inputs, the host well ahead, all kinds in turn, so that each is timed
at the clock the device sustains under the whole load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.engine.compat import DTYPES, activation_dtype, sleep_cycles
from fourfold.engine.microbench.device import product
from fourfold.engine.microbench.kernels import Attend, Kernel, Product
from fourfold.engine.model.grouped import grouped_mm
from fourfold.engine.model.layers import Core
from fourfold.engine.model.positions import Tables, alibi_bias, alibi_slope
from fourfold.engine.observe.clock import lower_quartile, reading, synchronize
from fourfold.engine.one_rank import fake_peers
from fourfold.engine.one_rank.fake_peers import Fill
from fourfold.engine.parallel import blocks
from fourfold.engine.parallel.order import attention_kernels
from fourfold.engine.training.optimizer import KINDS, OptimizerSettings, param_groups
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec

Work = Callable[[], object]
_ROUNDS = 5
_MOST_CALLS = 100  # the launch queue holds about a thousand kernels; the host must not wait for it
_HOST_CYCLES = 300_000  # cycles a GPU sleeps per queued call, so that its host is ahead: 0.15 ms
_WEIGHT_STD = 0.02
# The optimizer's update is memory-bound: so many elements are as many as any.
_MOST_ELEMENTS = 2**27


def time_kernels(
    kernels: Sequence[Kernel], spec: RunSpec, device: torch.device, budget_s: float
) -> list[float]:
    kinds = list(dict.fromkeys(map(_kind, kernels)))
    works = [_work(kernel, spec, device) for kernel in kinds]
    seconds = dict(zip(kinds, seconds_in_turn(works, device, budget_s), strict=True))
    return [seconds[_kind(kernel)] for kernel in kernels]


def hot_seconds(
    kernels: Sequence[Kernel],
    moved_bytes: float,
    spec: RunSpec,
    device: torch.device,
    budget_s: float,
) -> float:
    """Seconds of all calls of all kernels and of moving so many bytes, mixed as in a step, again
    and again: at the clock that the device keeps up under this load. The median of the second half
    of the budget."""
    works = {kind: _work(kind, spec, device) for kind in dict.fromkeys(map(_kind, kernels))}
    turns = [(works[_kind(kernel)], kernel.calls) for kernel in kernels]
    rounds = max(calls for _, calls in turns)
    elements = max(1, round(moved_bytes / rounds / 2))  # read and written
    source = torch.ones(min(elements, _MOST_ELEMENTS), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    turns.append((lambda: target.copy_(source), round(rounds * elements / source.numel())))

    def all_calls() -> None:
        for at in range(rounds):
            for work, calls in turns:
                for _ in range((at + 1) * calls // rounds - at * calls // rounds):
                    work()

    all_calls()
    began = time.perf_counter()
    readings: list[float] = []
    while not readings or time.perf_counter() - began < budget_s:
        readings.append(reading(all_calls, device, 1))
    return median(readings[len(readings) // 2 :])


def time_fills(fills: Sequence[Fill], device: torch.device, budget_s: float) -> list[float]:
    return seconds_in_turn([_fill(fill, device) for fill in fills], device, budget_s)


def time_update(elements: int, policy: Policy, device: torch.device, budget_s: float) -> float:
    """Seconds of a fused update of so many elements, the optimizer's state in the same format."""
    dtype = DTYPES[policy.dtypes.param]
    count = max(1, min(elements, _MOST_ELEMENTS))
    weight = torch.randn(count, device=device, dtype=dtype).mul_(_WEIGHT_STD).requires_grad_()
    weight.grad = torch.randn_like(weight).mul_(1e-3)
    settings = OptimizerSettings()
    groups = param_groups([weight], settings)
    optimizer = KINDS[policy.optimizer].reference(groups, settings, fused=True)
    return seconds_in_turn([optimizer.step], device, budget_s)[0] * elements / count


def _kind(kernel: Kernel) -> Kernel:
    """Equal for kernels that are the same work under another name."""
    if isinstance(kernel, Product):
        # The head is never in 8 bits.
        part = "head" if kernel.part == "head" else "mlp"
        return replace(kernel, part=part, name="", when="forward", calls=0)
    return replace(kernel, name="", when="forward", calls=0)


def seconds_in_turn(works: Sequence[Work], device: torch.device, budget_s: float) -> list[float]:
    """Lower quartile of a few rounds, in each of which every work has its turn."""
    if not works:
        return []
    once = []
    for work in works:
        work()
        once.append(max(1e-7, reading(work, device, 1)))
    share_s = budget_s / _ROUNDS / len(works)
    calls = [max(1, min(_MOST_CALLS, round(share_s / each))) for each in once]
    readings: list[list[float]] = [[] for _ in works]
    for _ in range(_ROUNDS):
        for work, count, times in zip(works, calls, readings, strict=True):
            if device.type == "cuda":
                sleep_cycles(_HOST_CYCLES * count)
            times.append(reading(work, device, count))
    synchronize(device)
    return [lower_quartile(times) for times in readings]


def _work(kernel: Kernel, spec: RunSpec, device: torch.device) -> Work:
    dtype = activation_dtype(spec.policy.dtypes.compute)

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * std

    if isinstance(kernel, Product):
        eight = spec.policy.dtypes.compute == "fp8" and kernel.part != "head"
        if eight and device.type == "cuda":
            return product("fp8", (kernel.m, kernel.n, kernel.k), device)
        return _product(kernel, random)
    return _attend(kernel, spec, random)


def _product(kernel: Product, random: Callable[..., Tensor]) -> Work:
    """In the memory layouts of a linear layer: weights [outputs, inputs], tokens first; all groups
    have as many rows."""
    m, n, k, groups = kernel.m, kernel.n, kernel.k, kernel.groups
    each = (groups,) if groups > 1 else ()
    if kernel.makes == "output":
        left, right = random(m, k), random(*each, n, k, std=_WEIGHT_STD).transpose(-2, -1)
    elif kernel.makes == "input gradient":
        left, right = random(m, k), random(*each, k, n, std=_WEIGHT_STD)
    else:
        left, right = random(k, m).t(), random(k, n)
    if groups == 1:
        return lambda: left @ right
    rows = k if kernel.makes == "weight gradient" else m
    ends = torch.arange(1, groups + 1, device=left.device) * rows // groups
    offsets = ends.to(torch.int32)
    return lambda: grouped_mm(left, right, offsets)


def _attend(kernel: Attend, spec: RunSpec, random: Callable[..., Tensor]) -> Work:
    def heads(count: int, tokens: int, size: int = kernel.head_size) -> Tensor:
        """[B, H, S, C] as projections leave it: tokens before heads in memory."""
        return random(kernel.batch, tokens, count, size).transpose(1, 2)

    q, k, v = (
        heads(kernel.heads, kernel.queries),
        heads(kernel.kv_heads, kernel.keys),
        heads(kernel.kv_heads, kernel.keys, kernel.value_size),
    )
    bias = _bias(kernel, spec, q.device)
    if kernel.block:
        return _block(kernel, (q, k, v), bias)
    return _whole(kernel, spec, (q, k, v), bias)


def _bias(kernel: Attend, spec: RunSpec, device: torch.device) -> Tensor | None:
    if spec.model.positions.kind != "alibi":
        return None
    slopes = torch.tensor(
        [alibi_slope(head, spec.model.heads) for head in range(kernel.heads)], device=device
    )
    keys = torch.arange(kernel.keys, device=device)
    # Blocks off the diagonal look back: their queries come after all their keys.
    first = 0 if kernel.causal else kernel.keys
    return alibi_bias(slopes, first + torch.arange(kernel.queries, device=device), keys)


def _block(kernel: Attend, qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None) -> Work:
    forward: Any = lambda: blocks.forward(*qkv, causal=kernel.causal, bias=bias)  # noqa: E731
    if not kernel.backward:
        return forward
    out, lse = forward()
    grad = torch.randn_like(out)
    return lambda: blocks.backward(grad, qkv, out, lse, causal=kernel.causal, bias=bias)


def _whole(
    kernel: Attend, spec: RunSpec, qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None
) -> Work:
    core = Core()
    core.backends = attention_kernels(spec.policy.attention, qkv[0].device.type)
    tables = Tables(torch.arange(kernel.queries, device=qkv[0].device))
    if bias is not None:
        mask = bias.to(qkv[0].dtype)
        grouped = kernel.heads != kernel.kv_heads
        attend: Any = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
            q, k, v, attn_mask=mask, enable_gqa=grouped
        )
    else:
        attend = lambda q, k, v: core(q, k, v, tables)  # noqa: E731
    if not kernel.backward:
        return lambda: attend(*qkv)
    leaves = tuple(x.detach().requires_grad_() for x in qkv)
    out = attend(*leaves)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def _fill(fill: Fill, device: torch.device) -> Work:
    if fill.kind == "noise":
        target = torch.empty(fill.elements, dtype=fill.dtype, device=device)
        return lambda: fake_peers.receive(target, 1.0)
    own = torch.ones(fill.elements, dtype=fill.dtype, device=device)
    whole = torch.empty(fill.parts * fill.elements, dtype=fill.dtype, device=device)
    return lambda: fake_peers.gather(whole, own, fill.parts)
