"""What does a whole training take, and what does a ranked layout's pipeline look like?

Seconds over a batch ramp-up and the rest of the tokens; a step played with the planner's seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.cost.predict import chunk_times
from fourfold.cost.schedule.simulate import Timeline, play
from fourfold.cost.step.estimate import estimate
from fourfold.errors import UserError
from fourfold.search.ranking import Ranking
from fourfold.spec.words import SCHEDULES


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


# More cannot be read, and a page of them is tens of megabytes.
MOST_ACTIONS = 20_000


def timeline(ranking: Ranking, place: int = 0) -> Timeline:
    """Of the layout at `place`. Gradient reduction and optimizer come after and are not shown."""
    index = np.array([place])
    predicted = ranking.predicted.take(index)
    c = predicted.columns
    stages, virtual, micros = int(c.pp[0]), int(c.vpp[0]), int(c.micros[0])
    actions = 3 * stages * virtual * micros
    if actions > MOST_ACTIONS:
        raise UserError(
            f"has {actions:,} actions, too many for a picture (at most {MOST_ACTIONS:,})",
            field="timeline",
            value=str(ranking.layout(place)),
            hint="use a smaller --global-batch; the order is the same",
        )
    times, _ = chunk_times(
        c, {n: part[index] for n, part in ranking.predicted.times.parts.items()}, micros
    )
    return play(
        f"{ranking.query.model.name}, {ranking.layout(place)}",
        SCHEDULES[int(c.schedule[0])],
        times,
        stages=stages,
        virtual_stages=virtual,
        micros=micros,
    )
