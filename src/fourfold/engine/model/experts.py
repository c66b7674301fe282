"""Experts on one device: a router chooses some for each token, grouped products compute them.

Shapes: T tokens, D hidden, E experts, K chosen of them, F an expert's width, R = T x K rows.
Parallelism replaces parts from outside: `dispatch` (how rows reach experts), which experts are held
here. Nothing waits for the device, but for products in formats that torch does not group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.engine import compat_modes
from fourfold.engine.model.layers import Mlp, Parts
from fourfold.engine.model.router import Router
from fourfold.engine.model.rows import order_rows, put_rows, scored_swiglu, take_rows
from fourfold.spec.experts import Moe
from fourfold.spec.model import ModelShape


def is_grouped(x: Tensor) -> bool:
    """Whether torch has one product for all groups of such rows; without memory, a GPU's."""
    few = x.is_cuda or compat_modes.is_fake(x)
    return x.dtype in ((torch.bfloat16,) if few else (torch.float32, torch.bfloat16, torch.float16))


def on_host(counts: Tensor, total: int) -> list[int]:
    """Numbers that add up to at most `total`; waits for the device. Tensors without memory have no
    values: there the total is shared out evenly."""
    return copied_to_host(counts, total)()


def copied_to_host(counts: Tensor, total: int) -> Callable[[], list[int]]:
    """The same as a call that waits: what is launched before it runs meanwhile."""
    if compat_modes.is_fake(counts):
        size = counts.numel()
        return lambda: [total // size + (i < total % size) for i in range(size)]
    if not counts.is_cuda:
        return counts.tolist
    host = torch.empty_like(counts, device="cpu", pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def values() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return values


def grouped_product(rows_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows of expert after expert, each by its own matrix. Rows after the last are undefined."""
    if is_grouped(rows_RI):
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    counts = on_host(sizes(ends_E), rows_RI.shape[0])
    parts = rows_RI.split([*counts, rows_RI.shape[0] - sum(counts)])
    done = [F.linear(part, weight) for part, weight in zip(parts, weight_EOI, strict=False)]
    rest = parts[-1]
    return torch.cat([*done, rest.new_zeros(rest.shape[0], weight_EOI.shape[1])])


class GroupedLinear(nn.Module):
    """One matrix of each of `experts`, one below the other: parts (("0.gate", F), ("0.up", F),
    ("1.gate", F), ...)."""

    def __init__(self, experts: range, ins: int, each: Parts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))
        self.resize(experts, ins, each)

    def resize(self, experts: range, ins: int, each: Parts) -> None:
        self.experts = len(experts)
        self.parts = tuple((f"{i}.{name}", rows) for i in experts for name, rows in each)
        outs = sum(rows for _, rows in self.parts)
        self.weight = nn.Parameter(self.weight.new_empty(outs, ins))

    def forward(self, rows_RI: Tensor, ends_E: Tensor) -> Tensor:
        weight = self.weight.view(self.experts, -1, self.weight.shape[1])
        return grouped_product(rows_RI, weight, ends_E)


class Experts(nn.Module):
    """MLPs with a gate, all at once. Scores are applied before the last product, so that its
    outputs need not be kept for their gradient: a row's is that of choice `source`. `activate` (of
    gate and up side by side, scores and sources) may be replaced. `drops`: choices may be
    nobody's."""

    def __init__(self, shape: ModelShape, moe: Moe) -> None:
        super().__init__()
        self.hidden, self.drops = shape.hidden, moe.capacity > 0
        everyone = range(shape.experts)
        self.gate_up = GroupedLinear(everyone, shape.hidden, (("gate", moe.ffn), ("up", moe.ffn)))
        self.down = GroupedLinear(everyone, moe.ffn, (("down", shape.hidden),))
        self.activate: Callable[[Tensor, Tensor, Tensor], Tensor] = scored_swiglu

    def cut(self, experts: range, ffn: int) -> None:
        """Keep these experts, and `ffn` of their width; still without values."""
        self.gate_up.resize(experts, self.hidden, (("gate", ffn), ("up", ffn)))
        self.down.resize(experts, ffn, (("down", self.hidden),))

    def forward(
        self, rows_RD: Tensor, scores_R: Tensor, source_R: Tensor, ends_E: Tensor
    ) -> Tensor:
        """`ends`: where each expert's rows end, as int32."""
        acted = self.activate(self.gate_up(rows_RD, ends_E), scores_R, source_R)
        return self.down(acted, ends_E)


class Spread(torch.autograd.Function):
    """A row for each of a token's experts, in the order of experts. `places` are where a token's
    rows have gone."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, places_R: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(places_R)
        return take_rows(x_TD, places_R, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return put_rows(grads[0], ctx.saved_tensors[0], ctx.top_k), None, None


class Join(torch.autograd.Function):
    """The sum of each token's rows: Spread's way back."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, places_R: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(places_R)
        return put_rows(y_RD, places_R, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return take_rows(grads[0], ctx.saved_tensors[0], ctx.top_k), None, None


class Reorder(torch.autograd.Function):
    """Rows in another order; `back` is the order that undoes it."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor, back_R: Tensor) -> Tensor:
        ctx.save_for_backward(back_R)
        return x_RD[order_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


# (tokens [T, D], chosen [T, K], scores [T, K], experts) -> what experts add up to [T, D]
Dispatch = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]


def dispatch_local(x_TD: Tensor, chosen_TK: Tensor, scores_TK: Tensor, experts: Experts) -> Tensor:
    """All experts are at hand. Choices of nobody come last: what products make of their rows is
    undefined, and must reach no sum in either direction."""
    count, top_k = experts.down.experts, chosen_TK.shape[1]
    source, places, ends = order_rows(chosen_TK.to(torch.int32), count + 1)
    rows = Spread.apply(x_TD, places, top_k)
    if not experts.drops:
        y = experts(rows, scores_TK.flatten(), source, ends[:count])
        return Join.apply(y, places, top_k)
    nobody = chosen_TK.flatten() == count
    scores, row_of_nobody = scores_TK.flatten().masked_fill(nobody, 0), nobody[source.long(), None]
    y = experts(rows.masked_fill(row_of_nobody, 0), scores, source, ends[:count])
    return Join.apply(y.masked_fill(row_of_nobody, 0), places, top_k)


def sizes(ends_E: Tensor) -> Tensor:
    return ends_E.diff(prepend=ends_E.new_zeros(1))


class MoeMlp(nn.Module):
    """What a layer with experts has in place of one MLP."""

    def __init__(self, shape: ModelShape, moe: Moe, *, fused: bool) -> None:
        super().__init__()
        self.router = Router(shape, moe)
        self.experts = Experts(shape, moe)
        self.shared = Mlp(shape, fused=fused, ffn=moe.shared_ffn) if moe.shared_ffn else None
        self.shared_gate = _Gate(shape) if moe.shared_gate else None
        self.dispatch: Dispatch = dispatch_local

    def forward(self, x_BSD: Tensor) -> Tensor:
        chosen, scores = self.router(x_BSD)
        routed = self.dispatch(x_BSD.flatten(0, 1), chosen, scores, self.experts).view_as(x_BSD)
        if self.shared is None:
            return routed
        shared = self.shared(x_BSD)
        if self.shared_gate is not None:
            shared = self.shared_gate(x_BSD) * shared
        return routed + shared


class _Gate(nn.Module):
    """How much of the shared experts a token gets."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()
