"""Muon in one process, matrix by matrix as published; and as it would be by mistakes that a layout
may make with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fourfold.engine.compat import DTYPES
from fourfold.engine.parallel.shards import Rect, Shard
from fourfold.engine.training.optimizer import KINDS, OptimizerSettings, param_groups
from fourfold.spec.muon import SMALLEST_NORM, Muon


@dataclass(frozen=True, slots=True)
class MuonGuess:
    """A mistake: `parts` (of a matrix by its name, as ranks hold them) are made orthogonal apart,
    the last of them is left out, or the shape that sets the scale is another."""

    mistake: Literal["apart", "left out", "scale"]
    parts: Mapping[str, Sequence[Rect]] = field(default_factory=dict)


class PlainMuon(torch.optim.Optimizer):
    """Updates whole published matrices; torch's AdamW the rest."""

    def __init__(
        self,
        shards: Sequence[Shard],
        settings: OptimizerSettings,
        muon: Muon,
        guess: MuonGuess | None,
    ) -> None:
        learned = [shard for shard in shards if shard.param.requires_grad]
        self.matrices = [shard for shard in learned if muon.updates(shard.name, shard.shape)]
        of_muon = {id(shard.param) for shard in self.matrices}
        super().__init__([{"params": list({id(s.param): s.param for s in learned}.values())}], {})
        rest = [weight for weight in self.param_groups[0]["params"] if id(weight) not in of_muon]
        self.rest = KINDS["muon"].reference(param_groups(rest, settings), settings)
        self.settings, self.muon, self.guess = settings, muon, guess
        self.momentum = {s.name: torch.zeros_like(s.values) for s in self.matrices}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.rest.step()
        lr, decay, beta = self.settings.lr, self.settings.weight_decay, self.muon.momentum
        for shard in self.matrices:
            momentum, grad = self.momentum[shard.name], shard.grad
            if grad is None:
                grad = torch.zeros_like(momentum)
            momentum.mul_(beta).add_(grad * (1.0 - beta))
            direction = momentum * beta + grad * (1.0 - beta) if self.muon.nesterov else momentum
            update = self._guessed(shard.name, direction.to(DTYPES[self.muon.dtype]))
            scale = self._scale(*shard.shape)
            shard.values.copy_(shard.values * (1.0 - lr * decay) - update * (lr * scale))

    def _guessed(self, name: str, direction: Tensor) -> Tensor:
        parts = self.guess.parts.get(name, ()) if self.guess else ()
        if len(parts) < 2 or self.guess is None or self.guess.mistake == "scale":
            return plain_orthogonal(direction, self.muon)
        if self.guess.mistake == "left out":
            left = direction.clone()
            _part(left, parts[-1]).zero_()
            return plain_orthogonal(left, self.muon)
        update = torch.empty_like(direction)
        for rect in parts:
            _part(update, rect).copy_(plain_orthogonal(_part(direction, rect), self.muon))
        return update

    def _scale(self, outs: int, ins: int) -> float:
        is_wrong = self.guess is not None and self.guess.mistake == "scale"
        return (scale_of_other_side if is_wrong else Muon.scale_of)(self.muon, outs, ins)


def plain_orthogonal(matrix: Tensor, muon: Muon) -> Tensor:
    """Newton-Schulz steps by their formula, in the matrix' format."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for a, b, c in muon.polynomials:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def scale_of_other_side(muon: Muon, outs: int, ins: int) -> float:
    """The scale by the shape of the transposed matrix, or by the shorter of its sides."""
    if muon.scale == "original":
        return muon.scale_of(ins, outs)
    return muon.scale_of(outs, ins) * math.sqrt(min(outs, ins) / max(outs, ins))


def _part(matrix: Tensor, rect: Rect) -> Tensor:
    return matrix[slice(*rect.rows), slice(*rect.columns)]


def in_order(rects: set[Rect]) -> tuple[Rect, ...]:
    """Parts of a matrix from its first row and column on."""
    return tuple(sorted(rects, key=lambda rect: (rect.rows, rect.columns)))
