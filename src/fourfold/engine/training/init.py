"""Initial weights: value = f(seed, name, global index), the same under every layout; each rank
makes only its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.engine.data import rng
from fourfold.engine.parallel.shards import Shard

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
def fill(shards: Iterable[Shard], *, seed: int, layers: int, rule: InitRule) -> None:
    """Write every piece's initial values into the parameters."""
    for shard in shards:
        if len(shard.shape) == 1:
            base = 1.0 if shard.name.endswith("norm.weight") else 0.0
            _spread(shard, seed, rule.vector_std, base)
        else:
            _spread(shard, seed, std_of(shard.name, layers, rule), 0.0)


def _spread(shard: Shard, seed: int, std: float, base: float) -> None:
    values = shard.values
    if std == 0.0:
        values.fill_(base)
        return
    stream = rng.key(seed, "init", shard.name)
    (top, bottom), (left, right) = shard.rect.rows, shard.rect.columns
    rows_at_once = max(1, _CHUNK // max(1, right - left))
    for first in range(top, bottom, rows_at_once):
        last = min(bottom, first + rows_at_once)
        index = _indices(shard, first, last, values.device)
        made = rng.normal(stream, index, std) + base
        values[first - top : last - top].copy_(made.view_as(values[first - top : last - top]))


def _indices(shard: Shard, first: int, last: int, device: torch.device) -> Tensor:
    """Global flat indices of rows first..last of the piece's columns."""
    left, right = shard.rect.columns
    width = shard.shape[1] if len(shard.shape) > 1 else 1
    rows = torch.arange(first, last, dtype=torch.int64, device=device)
    columns = torch.arange(left, right, dtype=torch.int64, device=device)
    return rows[:, None] * width + columns
