"""Mistakes with Muon that a layout may hide, planted to prove that verify sees and names them.
Where a rank holds matrices whole the first and the last cannot act."""

from __future__ import annotations

from dataclasses import replace

from fourfold.engine.parallel.matrices import HeldPart, Matrices, Matrix
from fourfold.engine.training.muon import MuonMatrices
from fourfold.engine.training.trainer import Trainer
from fourfold.engine.verify.plain_muon import in_order, scale_of_other_side


class _Changed(Trainer):
    """Has to do with other matrices than it should."""

    def change(self, matrix: Matrix, own: int) -> Matrix:
        raise NotImplementedError

    def make_matrices(self) -> Matrices:
        right = super().make_matrices()
        rounds = (
            tuple(self.change(matrix, right.group.rank) for matrix in some) for some in right.rounds
        )
        return replace(right, rounds=tuple(rounds))


class _OwnBlocks(_Changed):
    """Every rank makes its own part of a matrix orthogonal, as if it were one."""

    def change(self, matrix: Matrix, own: int) -> Matrix:
        held = matrix.held_by(own)
        if held is None:
            return replace(matrix, held=(), owner=own)
        alone = held._replace(is_first=True)
        return replace(matrix, box=held.rect, held=(alone,), owner=own, cut="")


class _LeftOut(_Changed):
    """The last part of a matrix never reaches its owner."""

    def change(self, matrix: Matrix, own: int) -> Matrix:
        parts = in_order({held.rect for held in matrix.held})
        if len(parts) < 2:
            return matrix

        def marked(held: HeldPart) -> HeldPart:
            return held._replace(is_first=held.is_first and held.rect != parts[-1])

        return replace(matrix, held=tuple(map(marked, matrix.held)))


class _WrongScale(MuonMatrices):
    def scale_of(self, matrix: Matrix) -> float:
        return scale_of_other_side(self.muon, *matrix.shape)


class _Scale(Trainer):
    """Updates are scaled by the shape of transposed matrices, or by the shorter side."""

    muon_type = _WrongScale


MUON_FAULTS: dict[str, type[Trainer]] = {
    "muon-blocks": _OwnBlocks,
    "muon-scale": _Scale,
    "muon-shard": _LeftOut,
}
