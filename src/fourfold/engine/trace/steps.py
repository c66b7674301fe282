"""The steps of a trace with real tensors: the function of every operation, by the engine's
exchanges and attention.

N tokens of a rank, H heads, K key/value heads, C head size, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.cost.ops.op import Op, Part
from fourfold.cost.trace.steps import Ask, Program, Step
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

Shape = tuple[int, ...]
Tensors = Tensor | tuple[Tensor, ...]
_NONE: Shape = ()


@dataclass
class TraceRank:
    """What the steps work on: tensors by name, and the group they talk to."""

    program: Program
    ask: Ask
    group: Group
    device: torch.device
    dtype: torch.dtype
    t: dict[str, Tensor] = field(default_factory=dict)
    sums: JoinedBlocks | None = None
    round: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.ask.tokens // self.group.size

    def do(self, step: Step, expected: StepCount) -> None:
        for left in reversed(range(step.times)):
            shapes = iter(expected.tensors)
            for op in step.operations:
                self._run(op, [next(shapes).shape for _ in op.writes])
            for op in step.operations:
                if op.kind == "send":
                    name = op.writes[0].name  # it was sent while the others ran
                    self.t[name] = wait(self.t[name])
            if not left:
                self.wrong += self._differences(expected)
            for name in step.frees:
                self.t.pop(name, None)
            for source, target in step.moves:
                self.t[target] = self.t.pop(source)

    def _run(self, op: Op, shapes: list[Shape]) -> None:
        inputs = [self._read(tensor) for tensor in op.reads]
        if op.function == "hold":
            made: Tensors = tuple(self._random(shape) for shape in shapes)
        elif op.kind == "product":
            tokens, weight = inputs  # of which a list may hold all layers'
            made = (tokens @ (weight[0] if weight.ndim == 3 else weight)).view(shapes[0])
            made = made.relu_() if op.function == "act" else made
        elif op.kind == "grouped product":
            left, right = inputs
            # Queries are token-major, as keys and values; scores are not.
            made = by_heads(left if op.reads[0] == "scores" else left.transpose(0, 1), right)
        else:
            made = FUNCTIONS[op.function](self, shapes[0] if shapes else _NONE, *inputs)
        made = made if isinstance(made, tuple) else (made,)
        names = (output.name for output in op.writes)
        self.t.update(zip(names, made, strict=False))

    def _read(self, tensor: str | Part) -> Tensor:
        """A half of a tensor is cut by the kernel that takes it."""
        if isinstance(tensor, str):
            return self.t[tensor]
        read = self.t[tensor.name] if tensor.index is None else self.t[tensor.name][tensor.index]
        return read.transpose(0, 2) if tensor.transposed else read

    def _random(self, shape: Shape) -> Tensor:
        """Small values: products of them stay finite in any format."""
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(shape[-1] ** -0.5)

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


def by_heads(heads_HNC: Tensor, keys_CKM: Tensor) -> Tensor:
    """[H, N, M]; written group by group, so that keys are never repeated in memory."""
    keys_KCM = keys_CKM.transpose(0, 1)
    heads, kv = heads_HNC.shape[0], keys_KCM.shape[0]
    if heads == kv:
        return torch.bmm(heads_HNC, keys_KCM)
    out = heads_HNC.new_empty(heads, heads_HNC.shape[1], keys_KCM.shape[2])
    each = heads // kv
    for i in range(heads):
        torch.mm(heads_HNC[i], keys_KCM[i // each], out=out[i])
    return out


def by_owner(s: TraceRank, shape: Shape, x_NHC: Tensor) -> Tensor:
    """[P, N, H copies / P, C]; a repeated head is written once per owner, never in between."""
    ranks, _, each, _ = shape
    copies = ranks * each // x_NHC.shape[1]
    if copies == 1:
        return torch.stack(x_NHC.chunk(ranks, dim=1))
    out = x_NHC.new_empty(shape)
    for owner in range(ranks):
        owned = torch.arange(owner * each, (owner + 1) * each, device=s.device) // copies
        torch.index_select(x_NHC, 1, owned, out=out[owner])
    return out


def all_to_all(s: TraceRank, shape: Shape, x: Tensor) -> Tensor:
    rows = [1] * s.group.size
    return wait(start_exchange(x, s.group, rows, rows)).view(shape)


def transposed(_: TraceRank, shape: Shape, x: Tensor) -> Tensor:
    """A copy in the new order."""
    return x.transpose(0, 1).reshape(shape).contiguous()


def ordered(s: TraceRank, shape: Shape, x_NKC: Tensor) -> Tensor:
    parts = x_NKC.unflatten(0, (s.group.size, -1)).transpose(1, 2)[:, None]
    return in_order(parts, s.tokens // 2)[0].transpose(0, 1)


# Attention kernels want [1, H, N, C]: a view of token-major tensors.


def batched(x_NHC: Tensor) -> Tensor:
    return x_NHC.transpose(0, 1)[None]


def attention(_: TraceRank, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = blocks.forward(batched(q), batched(k), batched(v), causal=True, bias=None)
    return out[0].transpose(0, 1), lse[0]


def start_sums(s: TraceRank, shape: Shape, q: Tensor) -> tuple[Tensor, Tensor]:
    s.sums = JoinedBlocks(batched(q))
    return s.sums.out[0], s.sums.lse[0]


def halves(s: TraceRank, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    assert s.sums is not None
    made: tuple[Tensor, ...] = ()
    for span in spans_of(s.group, s.tokens // 2):
        del made  # one block at a time
        made = s.sums.attend(batched(q), batched(k), batched(v), span)
    return tuple(tensor[0] for tensor in made)


def block(s: TraceRank, shape: Shape, q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
    assert s.sums is not None
    span = span_of(s.round, s.group.rank, s.group.size, s.tokens)
    s.round += 1
    made = s.sums.attend(batched(q), batched(kv[0]), batched(kv[1]), span)
    return tuple(tensor[0] for tensor in made)


def cast(s: TraceRank, shape: Shape, x: Tensor) -> Tensor:
    s.sums = None
    return x.to(s.dtype, copy=True)


def zeros(_: TraceRank, shape: Shape, q: Tensor) -> Tensor:
    return q.new_zeros(shape, dtype=torch.promote_types(q.dtype, torch.float32))


FUNCTIONS: dict[str, Callable[..., Tensors]] = {
    "by_owner": by_owner,
    "by_token": transposed,
    "by_head": transposed,
    "in_order": ordered,
    "stack": lambda s, shape, *parts: torch.stack(parts),
    "cast": cast,
    "parts": lambda s, shape, x: x.reshape(shape),
    "+=": lambda s, shape, target, operand: target.add_(operand),
    "*=": lambda s, shape, target, operand: target.mul_(operand),
    "zeros": zeros,
    "start_sums": start_sums,
    "attention": attention,
    "attention_of_halves": halves,
    "attention_of_block": block,
    "send": lambda s, shape, x: start_rotate(x, s.group),
    "all-to-all": all_to_all,
    "all-gather": lambda s, shape, x: all_gather(x, s.group, 0),
    "reduce-scatter": lambda s, shape, x: reduce_scatter(x, s.group, 0),
    "all-reduce": lambda s, shape, x: all_reduce(x, s.group),
}
