"""What tokens does a step see? Synthetic ones, fresh each step: f(seed, sequence, position).

Any rank can make exactly the sequences and positions it needs, on its own device, with no host
synchronisation; ranks that share data (tensor and pipeline peers) make the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fourfold.engine import counter
from fourfold.engine.model.decoder import IGNORE


class Source(Protocol):
    """`sequences` count from 0 within the step; -1 is padding, whose targets do not count."""

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both [len(sequences), len(positions)]; `first` is the number of
        sequences of all steps before this one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """`masked` is the share of targets that do not count; the share differs between sequences."""

    vocab: int
    seq_len: int
    seed: int = 0
    masked: float = 0.0

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        stream = counter.key(self.seed, "tokens")
        number = (sequences + first)[:, None]
        index = number * (self.seq_len + 1) + positions
        tokens = counter.below(stream, index, self.vocab)
        targets = counter.below(stream, index + 1, self.vocab)
        drop = (sequences < 0)[:, None].expand_as(targets)
        if self.masked > 0.0:
            drop = drop | self._masked(number, index)
        return tokens, torch.where(drop, IGNORE, targets)

    def _masked(self, number: Tensor, index: Tensor) -> Tensor:
        """Sequence i drops between none and twice the share of its targets."""
        scale = 1 << 16
        most = max(1, int(2 * self.masked * scale))
        share = counter.below(counter.key(self.seed, "share"), number, most)
        return counter.below(counter.key(self.seed, "mask"), index, scale) < share
