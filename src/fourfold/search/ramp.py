"""What does a whole training take? Seconds over a batch ramp-up and the rest of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.step.estimate import estimate
from fourfold.search.ranking import Ranking


@dataclass(frozen=True, slots=True)
class Training:
    """Per candidate: `ramp_s` over the ramp's stages, `total_s` over all tokens (0: not asked)."""

    ramp_s: Floats
    total_s: Floats
    ramp_sequences: int
    steps: int
    stages: int


def training(ranking: Ranking, *, tokens: float | None, top: int) -> Training:
    """Time of the best `top` candidates; a ramp longer than the tokens is cut where they end."""
    batch = ranking.query.batch
    count = min(top, len(ranking))
    left = None if tokens is None else tokens / batch.seq_len
    ramp_s = np.zeros(count)
    ramp_sequences = steps = 0
    sizes = [stage for stage in batch.stages() if stage[1]]
    for size, whole in sizes:
        sequences = size * whole
        taken = sequences if left is None else min(sequences, max(0.0, left - ramp_sequences))
        step_s = _at_size(ranking, size, count)
        ramp_s += step_s * taken / size
        ramp_sequences += int(taken)
        steps += round(taken / size)
    total_s = np.zeros(count)
    if left is not None:
        rest = max(0.0, left - ramp_sequences) / batch.global_batch
        total_s = ramp_s + rest * ranking.step_s[:count]
        steps += round(rest)
    return Training(ramp_s, total_s, ramp_sequences, steps, len(sizes))


def _at_size(ranking: Ranking, size: int, count: int) -> Floats:
    """Step seconds at another global batch; a rank with less than a micro batch runs that."""
    points = {name: column[:count] for name, column in ranking.points.items()}
    share = -(-size // (points["replicate"] * points["shard"]))
    points = points | {
        "micro_batch": np.minimum(points["micro_batch"], share),
        "global_batch": size,
    }
    columns = ranking.query.columns(points)
    return estimate(columns, ranking.query.entry.coefficients).step_s
