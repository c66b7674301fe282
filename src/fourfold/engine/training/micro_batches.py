"""Which sequences of a step does a data-parallel rank take, in which micro batches?"""

from __future__ import annotations

import torch
from torch import Tensor

from fourfold.spec.batch import Batch


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
