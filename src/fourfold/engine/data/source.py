"""What tokens does a step see? Those of a file, or synthetic ones, fresh each step: f(seed,
sequence, position). And which sequences does a data-parallel rank take, in which micro batches?

Any rank can make exactly the sequences and positions it needs, with no host synchronisation; ranks
that share data (tensor and pipeline peers) make the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fourfold.engine.data import rng
from fourfold.engine.data.token_file import TokenFile
from fourfold.engine.model.decoder import IGNORE
from fourfold.spec.batch import Batch
from fourfold.spec.run import RunSpec
from fourfold.spec.tokens import read_info


class Source(Protocol):
    """`sequences` count from 0 within the step; -1 is padding, whose targets do not count."""

    @property
    def waited_s(self) -> float:
        """Seconds that `batch` has waited for tokens so far. Not the time of a call: on CUDA that
        is mostly the queue of the device, full of the step before."""
        ...

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, targets), both [len(sequences), len(positions)]; `first` is the number of
        sequences of all steps before this one."""
        ...

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Batches that will be asked for next; one that comes without warning is right too."""
        ...


def source_of(spec: RunSpec) -> Source:
    """What a run reads."""
    vocab, seq_len, seed = spec.model.vocab, spec.batch.seq_len, spec.seed
    if spec.data:
        return TokenFile(spec.data, vocab=vocab, seq_len=seq_len, seed=seed)
    return Synthetic(vocab=vocab, seq_len=seq_len, seed=seed)


def data_facts(spec: RunSpec) -> dict[str, str]:
    """Which tokens a run saw, for its report."""
    if not spec.data:
        return {}
    info = read_info(spec.data)
    return {
        "data.sha256": info.sha256,
        "data.tokens": str(info.tokens),
        "data.tokenizer": info.tokenizer,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """`masked` is the share of targets that do not count; the share differs between sequences."""

    vocab: int
    seq_len: int
    seed: int = 0
    masked: float = 0.0

    @property
    def waited_s(self) -> float:
        """They are computed where they are needed, like everything else in a step."""
        return 0.0

    def batch(self, first: int, sequences: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        stream = rng.key(self.seed, "tokens")
        number = (sequences + first)[:, None]
        index = number * (self.seq_len + 1) + positions
        tokens = rng.below(stream, index, self.vocab)
        targets = rng.below(stream, index + 1, self.vocab)
        drop = (sequences < 0)[:, None].expand_as(targets)
        if self.masked > 0.0:
            drop = drop | self._masked(number, index)
        return tokens, torch.where(drop, IGNORE, targets)

    def ahead(self, first: int, sequences: Sequence[Tensor], positions: Tensor) -> None:
        """Made on the device in no time when they are asked for."""

    def _masked(self, number: Tensor, index: Tensor) -> Tensor:
        """Sequence i drops between none and twice the share of its targets."""
        scale = 1 << 16
        most = max(1, int(2 * self.masked * scale))
        share = rng.below(rng.key(self.seed, "share"), number, most)
        return rng.below(rng.key(self.seed, "mask"), index, scale) < share


def micro_sizes(batch: Batch, dp: int, rank: int) -> tuple[int, ...]:
    """Sequences of each micro batch of data-parallel rank `rank`.

    Ranks meet in collectives with every micro batch, so all run as many as the busiest; a rank with
    fewer sequences adds micro batches of one padding sequence, which counts nothing.
    """
    sizes = batch.micro_sizes(batch.shares(dp)[rank])
    return sizes + (1,) * (batch.micro_count(dp) - len(sizes))


def micro_sequences(batch: Batch, dp: int, rank: int, device: torch.device) -> list[Tensor]:
    """Numbers, within a step, of the sequences of each micro batch; -1 is padding."""
    shares = batch.shares(dp)
    start, stop = sum(shares[:rank]), sum(shares[: rank + 1])
    made = []
    for size in micro_sizes(batch, dp, rank):
        real = torch.arange(start, min(start + size, stop), device=device)
        padding = torch.full((size - real.numel(),), -1, device=device)
        made.append(torch.cat([real, padding]))
        start = min(start + size, stop)
    return made
