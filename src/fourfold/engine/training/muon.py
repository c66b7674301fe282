"""Muon: a matrix's update is its momentum with singular values near 1 (recipe: spec/muon.py).

Every published matrix is one: queries, keys and values apart, gates apart from the matrices beside
them, and each expert by itself, however layers hold them fused. (Published recipes keep queries,
keys and values apart; Megatron takes a gate and its neighbour as one matrix.)

An update needs all of a matrix. Ranks send their parts of what follows from the momentum to its
owner, which iterates and sends parts of the update back; or tensor ranks iterate on their blocks
and add up the one small product that all of them need (parallel/matrices.py). The momentum stays
where the weight is, in the format of moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.engine.compat import DTYPES
from fourfold.engine.parallel.experts import exchange
from fourfold.engine.parallel.groups import Group
from fourfold.engine.parallel.matrices import HeldPart, Matrices, Matrix, Round
from fourfold.spec.muon import SMALLEST_NORM, Muon, Polynomial

MOMENT = "momentum"
# A product of tensor ranks' blocks -> the same of the whole matrix.
Summed = Callable[[Tensor], Tensor]


def orthogonal(
    matrices: Tensor, polynomials: Sequence[Polynomial], summed: Summed | None = None
) -> Tensor:
    """Return matrices [B, short, long] with the singular vectors of these and singular values near
    1, by Newton-Schulz steps in their format. `summed`: these are blocks, cut along `long`."""
    x = matrices / _norms(matrices, summed).clamp(min=SMALLEST_NORM)
    for a, b, c in polynomials:
        gram = x @ x.mT
        gram = gram if summed is None else summed(gram)
        both = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, both, x, beta=a)
    return x


def _norms(matrices: Tensor, summed: Summed | None) -> Tensor:
    if summed is None:
        return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    return summed(wide.square().sum((-2, -1), keepdim=True)).sqrt().to(matrices.dtype)


class _Parcel(NamedTuple):
    """A part of a matrix on its way between the rank that holds it and the owner."""

    rank: int
    matrix: Matrix
    held: HeldPart


class MuonMatrices:
    """The matrices of this rank and their momentum. `leaves`: local shards by parameter; those that
    have no values here are missing. `copies`, by leaf, follow it in their own format."""

    def __init__(
        self,
        muon: Muon,
        matrices: Matrices,
        leaves: Mapping[nn.Parameter, Tensor],
        *,
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        self.muon, self.matrices, self.lr, self.weight_decay = muon, matrices, lr, weight_decay
        self.dtype, self.copies = dtype, copies
        own = [param for param in matrices.params if param in leaves]
        self.leaves = {param: leaves[param] for param in own}
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.count: Tensor | None = None

    def restore(self, updates: int) -> None:
        """As after so many updates, with momentum of 0 for the caller to fill."""
        self.state.clear()
        if updates:
            self.begin(updates)

    def begin(self, updates: int = 0) -> None:
        """State before the first update; the count is everybody's."""
        for leaf in self.leaves.values():
            if self.count is None:
                self.count = torch.zeros((), dtype=torch.float64, device=leaf.device)
            momentum = torch.zeros_like(leaf, dtype=self.dtype, requires_grad=False)
            self.state[leaf] = {"step": self.count, MOMENT: momentum}
        if self.count is not None:
            self.count.fill_(updates)

    @torch.no_grad()
    def step(self, overflow: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Update by gradients times `factor`; where `overflow` is 1 nothing changes."""
        if not self.state:
            self.begin()
        if self.count is not None:
            self.count += 1.0 if overflow is None else 1.0 - overflow
        for some in self.matrices.rounds:
            params = list(dict.fromkeys(matrix.param for matrix in some))
            directions = {
                param: self._direction(self.leaves[param], overflow, factor)
                for param in params
                if param in self.leaves
            }
            arrived = self._gathered(some, directions)
            del directions
            updates = self._scattered(some, self._updates(some, arrived))
            for parcel, update in updates:
                self._change(parcel, update, overflow)
            for param in params:
                leaf = self.leaves.get(param)
                if leaf is not None and leaf in self.copies:
                    self.copies[leaf].copy_(leaf)

    def _direction(self, leaf: Tensor, overflow: Tensor | None, factor: Tensor | None) -> Tensor:
        """Take up a gradient (0 where there is none); return what is made orthogonal."""
        momentum = self.state[leaf][MOMENT]
        wide = torch.promote_types(torch.promote_types(leaf.dtype, self.dtype), torch.float32)
        grad = torch.zeros_like(leaf, dtype=wide) if leaf.grad is None else leaf.grad.to(wide)
        if factor is not None:
            grad = grad * factor.to(wide)
        old, beta = momentum.to(wide), self.muon.momentum
        new = old.lerp(grad, 1.0 - beta)
        momentum.copy_(new if overflow is None else torch.where(overflow > 0, old, new))
        direction = grad.lerp(new, beta) if self.muon.nesterov else new
        return direction.to(DTYPES[self.muon.dtype])

    def _there(self, some: Round, *, leaves: bool) -> list[_Parcel]:
        """Parts that leave for owners, by owner; or that arrive here, by holder. Of values that
        several ranks hold the first one sends its own."""
        return self._parcels(some, is_holder=leaves, all_copies=False)

    def _back(self, some: Round, *, leaves: bool) -> list[_Parcel]:
        """Parts of updates that leave for all who hold them, or that arrive here."""
        return self._parcels(some, is_holder=not leaves, all_copies=True)

    def _parcels(self, some: Round, *, is_holder: bool, all_copies: bool) -> list[_Parcel]:
        own, parcels = self.matrices.group.rank, []
        for matrix in some:
            for held in matrix.held:
                if not (all_copies or held.is_first):
                    continue
                if is_holder and held.rank == own:
                    parcels.append(_Parcel(matrix.owner, matrix, held))
                elif not is_holder and matrix.owner == own:
                    parcels.append(_Parcel(held.rank, matrix, held))
        return sorted(parcels, key=lambda parcel: parcel.rank)

    def _exchanged(
        self, parts: Sequence[Tensor], leaving: list[_Parcel], arriving: list[_Parcel]
    ) -> Iterator[tuple[_Parcel, Tensor]]:
        """Send parts of matrices; yield those that arrive."""
        group = self.matrices.group
        device, dtype = self.matrices.rounds[0][0].param.device, DTYPES[self.muon.dtype]
        nothing = torch.empty(0, dtype=dtype, device=device)
        sent = torch.cat([nothing, *(part.reshape(-1) for part in parts)])
        if group.size > 1:
            sent = exchange(sent, group, _totals(leaving, group), _totals(arriving, group))
        sizes = [_size(parcel) for parcel in arriving]
        for parcel, values in zip(arriving, sent.split(sizes), strict=True):
            (top, bottom), (left, right) = parcel.held.rect.rows, parcel.held.rect.columns
            yield parcel, values.view(bottom - top, right - left)

    def _gathered(
        self, some: Round, directions: Mapping[nn.Parameter, Tensor]
    ) -> dict[Matrix, Tensor]:
        """The matrices, or blocks, that this rank owns."""
        leaving = self._there(some, leaves=True)
        parts = [directions[p.matrix.param][slice(*p.held.rows)] for p in leaving]
        found: dict[Matrix, Tensor] = {}
        for parcel, part in self._exchanged(parts, leaving, self._there(some, leaves=False)):
            matrix = parcel.matrix
            if matrix not in found:
                (top, bottom), (left, right) = matrix.box.rows, matrix.box.columns
                found[matrix] = part.new_zeros(bottom - top, right - left)
            _inside(found[matrix], matrix, parcel.held).copy_(part)
        return found

    def _updates(self, some: Round, arrived: Mapping[Matrix, Tensor]) -> dict[Matrix, Tensor]:
        """Those of one shape together; blocks in the same order on all ranks that share them."""
        batches: dict[tuple[Any, ...], list[Matrix]] = {}
        for matrix in (matrix for matrix in some if matrix in arrived):
            batches.setdefault((matrix.shape, matrix.cut), []).append(matrix)
        updates: dict[Matrix, Tensor] = {}
        for (shape, cut), alike in batches.items():
            turned = cut == "rows" or (not cut and shape[0] > shape[1])
            stack = torch.stack([arrived[matrix] for matrix in alike])
            stack = stack.mT if turned else stack
            summed = self._summed if cut else None
            made = orthogonal(stack, self.muon.polynomials, summed)
            made = made.mT if turned else made
            updates |= dict(zip(alike, made.unbind(), strict=True))
        return updates

    def _summed(self, product: Tensor) -> Tensor:
        """Over tensor ranks, in no less than fp32."""
        wide = product.to(torch.promote_types(product.dtype, torch.float32)).contiguous()
        dist.all_reduce(wide, group=self.matrices.blocks.handle)
        return wide.to(product.dtype)

    def _scattered(
        self, some: Round, updates: Mapping[Matrix, Tensor]
    ) -> Iterator[tuple[_Parcel, Tensor]]:
        leaving = self._back(some, leaves=True)
        parts = [_inside(updates[p.matrix], p.matrix, p.held) for p in leaving]
        return self._exchanged(parts, leaving, self._back(some, leaves=False))

    def scale_of(self, matrix: Matrix) -> float:
        """By the shape of the whole matrix, whatever part of it lies here."""
        return self.muon.scale_of(*matrix.shape)

    def _change(self, parcel: _Parcel, update: Tensor, overflow: Tensor | None) -> None:
        weight = self.leaves[parcel.matrix.param].detach()[slice(*parcel.held.rows)]
        wide = torch.promote_types(weight.dtype, torch.float32)
        old = weight.to(wide)
        rate = self.lr * self.scale_of(parcel.matrix)
        new = old * (1.0 - self.lr * self.weight_decay) - update.to(wide) * rate
        weight.copy_(new if overflow is None else torch.where(overflow > 0, old, new))


def _size(parcel: _Parcel) -> int:
    (top, bottom), (left, right) = parcel.held.rect.rows, parcel.held.rect.columns
    return (bottom - top) * (right - left)


def _totals(parcels: Sequence[_Parcel], group: Group) -> list[int]:
    totals = [0] * group.size
    for parcel in parcels:
        totals[parcel.rank] += _size(parcel)
    return totals


def _inside(whole: Tensor, matrix: Matrix, held: HeldPart) -> Tensor:
    """The part of a gathered matrix, or block, that a rank holds."""
    (top, left), rect = (matrix.box.rows[0], matrix.box.columns[0]), held.rect
    rows = whole[rect.rows[0] - top : rect.rows[1] - top]
    return rows[:, rect.columns[0] - left : rect.columns[1] - left]
