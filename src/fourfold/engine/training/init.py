"""What are the initial weights? value = f(seed, name, global index): the same under every layout,
each rank makes only the pieces it holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.engine.data import rng as counter
from fourfold.engine.parallel.shards import Piece

# Elements made at once: bounds the int64 scratch to 32 MiB a tensor.
_CHUNK = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRule:
    """Standard deviations. `vector_std` spreads norm weights around 1 and biases around 0.

    Training wants 0 there; a proof of equality does not, since a fault in adding zeros is unseen.
    """

    std: float = 0.02
    vector_std: float = 0.0


def std_of(name: str, layers: int, rule: InitRule) -> float:
    """GPT-2's rule: what writes to the residual stream is scaled by 1 / sqrt(2 x layers)."""
    if name.endswith(("attention.out.weight", "mlp.down.weight")):
        return rule.std / (2.0 * layers) ** 0.5
    return rule.std


@torch.no_grad()
def fill(pieces: Iterable[Piece], *, seed: int, layers: int, rule: InitRule) -> None:
    """Write every piece's initial values into the parameters."""
    for piece in pieces:
        if len(piece.shape) == 1:
            base = 1.0 if piece.name.endswith("norm.weight") else 0.0
            _spread(piece, seed, rule.vector_std, base)
        else:
            _spread(piece, seed, std_of(piece.name, layers, rule), 0.0)


def _spread(piece: Piece, seed: int, std: float, base: float) -> None:
    values = piece.values
    if std == 0.0:
        values.fill_(base)
        return
    stream = counter.key(seed, "init", piece.name)
    (top, bottom), (left, right) = piece.block.rows, piece.block.columns
    rows_at_once = max(1, _CHUNK // max(1, right - left))
    for first in range(top, bottom, rows_at_once):
        last = min(bottom, first + rows_at_once)
        index = _indices(piece, first, last, values.device)
        made = counter.normal(stream, index, std) + base
        values[first - top : last - top].copy_(made.view_as(values[first - top : last - top]))


def _indices(piece: Piece, first: int, last: int, device: torch.device) -> Tensor:
    """Global flat indices of rows first..last of the piece's columns."""
    left, right = piece.block.columns
    width = piece.shape[1] if len(piece.shape) > 1 else 1
    rows = torch.arange(first, last, dtype=torch.int64, device=device)
    columns = torch.arange(left, right, dtype=torch.int64, device=device)
    return rows[:, None] * width + columns
