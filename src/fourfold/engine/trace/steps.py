"""The steps of a trace with real tensors: every formula of its list, by the engine's exchanges and
attention.

N tokens of a rank, H heads, K key/value heads, C head size, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.cost.trace.operations import (
    AttentionCore,
    Communication,
    Copy,
    Gemm,
    Given,
    InPlace,
    Operation,
    StartSums,
    TensorInput,
    View,
)
from fourfold.cost.trace.steps import Ask, Program, Step
from fourfold.cost.trace.symbols import shape
from fourfold.engine.parallel import blocks
from fourfold.engine.parallel.blocks import JoinedBlocks
from fourfold.engine.parallel.context import in_order, span_of, spans_of, start_rotate
from fourfold.engine.parallel.groups import (
    Group,
    all_gather,
    all_reduce,
    reduce_scatter,
    start_exchange,
    wait,
)
from fourfold.result.trace import StepCount

# Made and dropped inside the engine's joining of blocks: counted in peaks, never seen by name.
INSIDE = ("block_fp32",)


@dataclass
class TraceRank:
    """What the steps work on: tensors by name, and the group they talk to."""

    program: Program
    ask: Ask
    group: Group
    device: torch.device
    dtype: torch.dtype
    t: dict[str, Tensor] = field(default_factory=dict)
    sums: Sequence[JoinedBlocks] = ()
    round: int = 0
    wrong: list[str] = field(default_factory=list)
    sizes: dict[Operation, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        """Sizes take longer than a small step, in which nobody is to wait for them."""
        self.sizes = {
            operation: shape(operation.outputs[0].dims, self.program.sizes)
            for step in self.program.steps
            for operation in step.operations
            if operation.outputs
        }

    @property
    def tokens(self) -> int:
        return self.ask.tokens // self.group.size

    def do(self, step: Step, expected: StepCount) -> None:
        for left in reversed(range(step.times)):
            for operation in step.operations:
                self._run(operation)
            for operation in step.operations:
                if isinstance(operation, Communication) and operation.op == "send":
                    name = operation.outputs[0].name  # it was sent while the others ran
                    self.t[name] = wait(self.t[name])
            if not left:
                self.wrong += self._differences(expected)
            for name in step.frees:
                self.t.pop(name, None)
            for source, target in step.moves:
                self.t[target] = self.t.pop(source)

    def _run(self, operation: Operation) -> None:
        made = run(
            self, operation, self.sizes.get(operation, ()), *map(self._read, operation.inputs)
        )
        made = made if isinstance(made, tuple) else (made,)
        names = (output.name for output in operation.outputs)
        self.t.update(zip(names, made, strict=False))

    def _read(self, tensor: TensorInput) -> Tensor:
        """A half of a tensor is cut by the kernel that takes it."""
        return self.t[tensor.name] if tensor.index is None else self.t[tensor.name][tensor.index]

    def _differences(self, expected: StepCount) -> list[str]:
        """Shape and bytes of every tensor the step has written."""
        wrong = []
        for tensor in expected.tensors:
            if tensor.name not in INSIDE:
                real = self.t[tensor.name]
                seen = tuple(real.shape), real.numel() * real.element_size()
                if seen != (tensor.shape, tensor.bytes):
                    what = f"{seen[0]} of {seen[1]} bytes, not {tensor.shape} of {tensor.bytes}"
                    wrong.append(f"{expected.name}: {tensor.name} is {what}")
        return wrong


def given(s: TraceRank, sizes: tuple[int, ...]) -> Tensor:
    """Small random values: products of them stay finite in any format."""
    return torch.randn(sizes, device=s.device, dtype=s.dtype).mul_(sizes[-1] ** -0.5)


def gemm(_: TraceRank, sizes: tuple[int, ...], x: Tensor, y: Tensor) -> Tensor:
    """Of scores with values, or of tokens with a weight, of which a list may hold all layers'."""
    if x.ndim == 3:
        return _by_heads(x, y.transpose(0, 1))
    return (x @ (y[0] if y.ndim == 3 else y)).view(sizes)


def scores(_: TraceRank, sizes: tuple[int, ...], q_NHC: Tensor, k_NKC: Tensor) -> Tensor:
    return _by_heads(q_NHC.transpose(0, 1), k_NKC.permute(1, 2, 0))


def _by_heads(heads_HNC: Tensor, keys_KCM: Tensor) -> Tensor:
    """[H, N, M]; written group by group, so that keys are never repeated in memory."""
    heads, kv = heads_HNC.shape[0], keys_KCM.shape[0]
    if heads == kv:
        return torch.bmm(heads_HNC, keys_KCM)
    out = heads_HNC.new_empty(heads, heads_HNC.shape[1], keys_KCM.shape[2])
    each = heads // kv
    for i in range(heads):
        torch.mm(heads_HNC[i], keys_KCM[i // each], out=out[i])
    return out


def by_owner(s: TraceRank, sizes: tuple[int, ...], x_NHC: Tensor) -> Tensor:
    """[P, N, H copies / P, C]; a repeated head is written once per owner, never in between."""
    ranks, _, each, _ = sizes
    copies = ranks * each // x_NHC.shape[1]
    if copies == 1:
        return torch.stack(x_NHC.chunk(ranks, dim=1))
    out = x_NHC.new_empty(sizes)
    for owner in range(ranks):
        owned = torch.arange(owner * each, (owner + 1) * each, device=s.device) // copies
        torch.index_select(x_NHC, 1, owned, out=out[owner])
    return out


def all_to_all(s: TraceRank, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    rows = [1] * s.group.size
    return wait(start_exchange(x, s.group, rows, rows)).view(sizes)


def transposed(_: TraceRank, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    """A copy in the new order."""
    return x.transpose(0, 1).reshape(sizes).contiguous()


def ordered(s: TraceRank, sizes: tuple[int, ...], x_NKC: Tensor) -> Tensor:
    parts = x_NKC.unflatten(0, (s.group.size, -1)).transpose(1, 2)[:, None]
    return in_order(parts, s.tokens // 2)[0].transpose(0, 1)


# AttentionCore kernels want [1, H, N, C]: a view of token-major tensors.


def batched(x_NHC: Tensor) -> Tensor:
    return x_NHC.transpose(0, 1)[None]


def attention(
    _: TraceRank, sizes: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    out, lse = blocks.forward(batched(q), batched(k), batched(v), causal=True, bias=None)
    return out[0].transpose(0, 1), lse[0]


def start_sums(s: TraceRank, sizes: tuple[int, ...], q: Tensor) -> tuple[Tensor, Tensor]:
    s.sums = (JoinedBlocks(batched(q)),)
    return s.sums[0].out[0], s.sums[0].lse[0]


def halves(
    s: TraceRank, sizes: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = ()
    for span in spans_of(s.group, s.tokens // 2):
        del made  # one block at a time
        made = s.sums[0].attend(batched(q), batched(k), batched(v), span)
    return tuple(tensor[0] for tensor in made)


def block(s: TraceRank, sizes: tuple[int, ...], q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    span = span_of(s.round, s.group.rank, s.group.size, s.tokens)
    s.round += 1
    made = s.sums[0].attend(batched(q), batched(kv[0]), batched(kv[1]), span)
    return tuple(tensor[0] for tensor in made)


def cast(s: TraceRank, sizes: tuple[int, ...], x: Tensor) -> Tensor:
    s.sums = ()
    return x.to(s.dtype, copy=True)


def zeros(_: TraceRank, sizes: tuple[int, ...], q: Tensor) -> Tensor:
    return q.new_zeros(sizes, dtype=torch.promote_types(q.dtype, torch.float32))


Tensors = Tensor | tuple[Tensor, ...]


def run(s: TraceRank, operation: Operation, sizes: tuple[int, ...], *inputs: Tensor) -> Tensors:
    """Run one operation. `sizes` is the shape of its first output."""
    match operation:
        case Given():
            return given(s, sizes)
        case Gemm(transposed=True):
            return scores(s, sizes, *inputs)
        case Gemm(activated=True):
            return gemm(s, sizes, *inputs).relu_()
        case Gemm():
            return gemm(s, sizes, *inputs)
        case InPlace(sign=sign):
            target, operand = inputs
            return target.add_(operand) if sign == "+" else target.mul_(operand)
        case Copy(function=function):
            return COPIES[function](s, sizes, *inputs)
        case View():
            return inputs[0].reshape(sizes)
        case StartSums(row_sums=row_sums):
            return start_sums(s, sizes, *inputs) if row_sums else zeros(s, sizes, *inputs)
        case AttentionCore(function=function):
            return KERNELS[function](s, sizes, *inputs)
        case Communication(op=op):
            return EXCHANGES[op](s, sizes, *inputs)
    raise AssertionError(operation)


Function = Callable[..., Tensors]
COPIES: dict[str, Function] = {
    "by_owner": by_owner,
    "by_token": transposed,
    "by_head": transposed,
    "in_order": ordered,
    "stack": lambda s, sizes, *parts: torch.stack(parts),
    "cast": cast,
}
KERNELS: dict[str, Function] = {
    "attention": attention,
    "attention_of_halves": halves,
    "attention_of_block": block,
}
EXCHANGES: dict[str, Function] = {
    "send": lambda s, sizes, x: start_rotate(x, s.group),
    "all-to-all": all_to_all,
    "all-gather": lambda s, sizes, x: all_gather(x, s.group, 0),
    "reduce-scatter": lambda s, sizes, x: reduce_scatter(x, s.group, 0),
    "all-reduce": lambda s, sizes, x: all_reduce(x, s.group),
}
