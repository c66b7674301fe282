"""What an engine must be able to do to stand in the matrix, and the case that it is given.

Faults that people have shipped, planted under any engine to prove that the lab names them.

The reference's decoder as a torch module, for engines that wrap a model of the user's own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.conformance.cell import Cell
from fourfold.conformance.ranks.reference import (
    STEPS,
    Elements,
    Part,
    Tiny,
    batch,
    block,
    gradient,
    local,
    rms_norm,
)

LARGE = 64  # elements: numbers that are no statistics


class NeverStarted:
    """A collective that was never started."""

    def wait(self, *a: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def plant(fault: str) -> None:
    if fault == "lost-sum":
        _skip(lambda tensor: tensor.numel() >= LARGE)
    elif fault == "norm-shard":
        _skip(lambda tensor: tensor.numel() == 1)
    elif fault == "doubled-loss":
        _doubled()
    else:
        raise ValueError(f"no fault is called {fault!r}")


def _skip(chosen: Any) -> None:
    """Sums of such tensors over ranks are left out; each rank goes on with its own part."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *a: Any, **k: Any) -> Any:
        summed = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and tensor.is_floating_point()
        if summed and tensor.dtype != torch.float64 and chosen(tensor):
            return NeverStarted() if k.get("async_op") else None
        return real(tensor, op, *a, **k)

    dist.all_reduce = all_reduce


def _doubled() -> None:
    """The loss is scaled once more before the backward pass."""
    real = torch.autograd.backward

    def backward(tensors: Any, grad_tensors: Any = None, *a: Any, **k: Any) -> Any:
        first = tensors[0] if isinstance(tensors, tuple | list) else tensors
        given = grad_tensors[0] if isinstance(grad_tensors, tuple | list) else grad_tensors
        if first.numel() == 1 and given is None:
            return real(2 * first, None, *a, **k)
        return real(tensors, grad_tensors, *a, **k)

    torch.autograd.backward = backward


Look = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One run of a cell as a rank sees it. Rows of the batch belong to data-parallel ranks in
    order, `micros` micro batches each."""

    cell: Cell
    tiny: Tiny
    seed: int
    rank: int
    device: torch.device

    @property
    def micros(self) -> int:
        return micro_batches(self.cell)

    @property
    def rows(self) -> int:
        return self.tiny.batch // self.cell.dp

    @property
    def micro_rows(self) -> int:
        return self.rows // self.micros

    def targets(self, step: int) -> float:
        return float(batch(self.tiny, step, self.seed)[2].sum())

    def micro(self, step: int, dp_rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(tokens, targets, which count) of each micro batch of a data-parallel rank."""
        first, n = dp_rank * self.rows, self.micro_rows
        whole = [z.to(self.device) for z in batch(self.tiny, step, self.seed)]
        starts = range(first, first + self.rows, n)
        return [(x, y, m) for x, y, m in ([z[at : at + n] for z in whole] for at in starts)]

    def ignored(self, step: int, dp_rank: int) -> list[tuple[Tensor, Tensor]]:
        """The same with targets that do not count as -100."""
        return [
            (x, torch.where(m > 0, y, torch.full_like(y, -100)))
            for x, y, m in self.micro(step, dp_rank)
        ]


def micro_batches(cell: Cell) -> int:
    return 2 * cell.pp if cell.pp > 1 else 2 if cell.has("accumulate") else 1


def tiny_of(cell: Cell, size: int, **shape: Any) -> Tiny:
    """The model of a cell, in one of two sizes; degrees divide what they cut. `shape`: what the
    engine's model fixes, up to a multiple."""
    tp, wanted = cell.tp, 32 + 16 * size
    heads = _rounded_up(4, tp)
    head_dim = _rounded_up(wanted // heads, 2)
    sizes: dict = {
        "layers": _rounded_up(2 + 2 * size, cell.pp * cell.virtual),
        "hidden": heads * head_dim,
        "vocab": _rounded_up(64 + 32 * size, tp),
        "heads": heads,
        "head_dim": head_dim,
        "kv_heads": _rounded_up(2, tp),
        "seq": _rounded_up(shape.pop("seq", 16 + 16 * size), 2 * cell.cp * tp),
        "batch": _rounded_up(4, cell.dp * micro_batches(cell)),
        "ffn": _rounded_up(shape.pop("ffn", 48 + 16 * size), math.lcm(tp, max(1, cell.etp))),
        "experts": _rounded_up(4, cell.ep) if cell.has("experts") else 0,
        "sinks": cell.has("sinks"),
        "tied": cell.has("tied"),
        "uneven": cell.has("uneven"),
    }
    return Tiny(**sizes | shape)


def _rounded_up(n: int, step: int) -> int:
    return step * math.ceil(n / step)


def known_fields(kind: Any, wanted: dict) -> dict:
    """What this release's configuration has; a field of another release is left out."""
    return {
        name: value for name, value in wanted.items() if name in inspect.signature(kind).parameters
    }


class Adapter:
    """One engine with a case. `standins`: kernels that this case could not take from the engine."""

    # What the host imports once, so that no rank has to.
    modules: tuple[str, ...] = ()

    def __init__(self, case: Case) -> None:
        self.case, self.cell, self.tiny = case, case.cell, case.tiny
        self.elements = Elements(case.tiny, case.seed)
        self.standins: set[str] = set()
        self.pieces: list[Part] = []

    def take(self, params: Iterable[Tensor]) -> None:
        """Parameters of an engine that was given numbers as weights: each shard says where it is,
        and gets its values."""
        for p in params:
            numbers = self.elements.numbers(local(p))
            self.elements.fill(local(p.detach()), numbers)
            self.pieces.append((numbers, p))

    @classmethod
    def prepare(cls, cell: Cell) -> None:
        """Before torch.distributed starts, in every rank."""

    @staticmethod
    def legal(cell: Cell) -> str:
        """Why the engine does not offer this cell; '' where it does."""
        raise NotImplementedError

    @classmethod
    def plant(cls, fault: str) -> None:
        plant(fault)

    @staticmethod
    def shape(cell: Cell) -> dict:
        """What the engine's model fixes."""
        return {}

    @staticmethod
    def decays(name: str) -> bool:
        return True

    def build(self) -> None:
        raise NotImplementedError

    def owned(self) -> list[Part]:
        """(numbers of the elements, local parameter) of every shard of this rank."""
        return [(numbers, local(p)) for numbers, p in self.pieces]

    def step(self, step: int, look: Look) -> tuple[float, float]:
        """One step of the engine: loss and norm. `look()` when gradients are done, not clipped."""
        raise NotImplementedError

    def train(self, look: Look) -> tuple[list[float], list[float]]:
        steps = [self.step(step, look if step == 0 else lambda: None) for step in range(STEPS)]
        return [loss for loss, _ in steps], [norm for _, norm in steps]

    def gradients(self) -> list[Part]:
        return [(numbers, gradient(p)) for numbers, p in self.pieces]

    def sum_over_ranks(self, value: Tensor | float, counts: bool = True) -> float:
        """Of what every rank that `counts` holds a part of."""
        total = torch.as_tensor(value, dtype=torch.float64).detach().cpu().clone() * counts
        total = total.to(self.case.device)
        dist.all_reduce(total)
        return float(total)


class Block(nn.Module):
    def __init__(self, t: Tiny, names: list[str], elements: Elements, layer: int) -> None:
        super().__init__()
        self.t = t
        for name in names:
            numbers = elements.start[f"{layer}.{name}"]
            self.register_parameter(name, nn.Parameter(numbers.float()))

    def forward(self, h: Tensor) -> Tensor:
        return block(h, dict(self.named_parameters()), "", self.t, [])


class Plain(nn.Module):
    """Weights start as the numbers of their elements; `forward` is the sum of the losses."""

    def __init__(self, t: Tiny, elements: Elements) -> None:
        super().__init__()
        self.t = t
        names = [name[2:] for name in elements.start if name.startswith("0.")]
        self.embed = nn.Parameter(elements.start["embed"].float())
        self.blocks = nn.ModuleList(Block(t, names, elements, i) for i in range(t.layers))
        self.norm = nn.Parameter(elements.start["norm"].float())
        if not t.tied:
            self.head = nn.Parameter(elements.start["head"].float())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed[x]
        for layer in self.blocks:
            h = layer(h)
        logits = rms_norm(h, self.norm, self.t.eps) @ (self.embed if self.t.tied else self.head).T
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
        )
