"""What a whole training takes: every size of a batch ramp-up, the rest of the tokens, and the time
beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fourfold.cost.calendar.assumptions import defaults
from fourfold.cost.calendar.training import Phase, Training, training
from fourfold.cost.columns import Floats
from fourfold.cost.count.params import model_params
from fourfold.cost.predict import predictions
from fourfold.search.plan_answer import PlanRow
from fourfold.search.ranking import Ranking

_STRAIGHT = 2e-4  # of a step's seconds


@dataclass(frozen=True, slots=True)
class Whole:
    """Per candidate: `ramp_s` over the ramp's stages, `work_s` over all steps, without the time
    beside them (0: not asked)."""

    ranking: Ranking
    ramp_s: Floats
    work_s: Floats
    steps: int
    stages: int

    def phase(self, i: int, power_w: float = 0.0) -> Phase:
        """One candidate's steps."""
        query, predicted = self.ranking.query, self.ranking.predicted
        step_s = float(predicted.step_s[i])
        return Phase(
            gpus=query.gpus,
            host_gpus=query.resolved.cluster.host_gpus,
            work_s=float(self.work_s[i]),
            params=model_params(query.model, query.batch.seq_len),
            low=float(predicted.low_s[i]) / step_s,
            high=float(predicted.high_s[i]) / step_s,
            power_w=power_w,
        )

    def of_row(self, i: int, power_w: float) -> dict[str, Any]:
        """Seconds of the whole training with their interval; nothing where no tokens were given. A
        share of lost time that the user names stands for all that is assumed."""
        if not self.work_s[i]:
            return {}
        one, lost = self.phase(i, power_w), self.ranking.query.lost
        if lost is not None:
            total_s = one.work_s / (1.0 - lost)
            low_s, high_s = total_s * one.low, total_s * one.high
        else:
            found: Training = training([one], defaults())
            total_s, low_s, high_s = found.total_s, found.within_s(0.1), found.within_s(0.9)
        return {"training_s": total_s, "training_s_low": low_s, "training_s_high": high_s}

    def facts(self, rows: Sequence[PlanRow]) -> dict[str, Any]:
        """`lost_share`: of the first candidate's time, what is not in its steps."""
        total_s = rows[0].training_s if rows else None
        lost = 1.0 - float(self.work_s[0]) / total_s if total_s else 0.0
        return {"ramp_stages": self.stages, "steps": self.steps, "lost_share": lost}


def whole_training(ranking: Ranking, *, top: int) -> Whole:
    """Steps of the best `top` candidates; a ramp longer than the tokens is cut where they end."""
    batch, tokens = ranking.query.batch, ranking.query.tokens
    count = min(top, len(ranking))
    left = None if tokens is None else tokens / batch.seq_len
    ramp_s, work_s = np.zeros(count), np.zeros(count)
    ramp_sequences, steps = 0.0, 0.0
    sizes = [stage for stage in batch.stages() if stage[1]]
    at_size = _at_sizes(ranking, [size for size, _ in sizes], count)
    for size, whole in sizes:
        sequences = float(size * whole)
        taken = sequences if left is None else min(sequences, max(0.0, left - ramp_sequences))
        ramp_s += at_size[size] * taken / size
        ramp_sequences += taken
        steps += taken / size
    if left is not None:
        rest = max(0.0, left - ramp_sequences) / batch.global_batch
        work_s = ramp_s + rest * ranking.step_s[:count]
        steps += rest
    return Whole(ranking, ramp_s, work_s, round(steps), len(sizes))


def _at_sizes(ranking: Ranking, sizes: Sequence[int], count: int) -> dict[int, Floats]:
    """By size. A pipeline's seconds grow by the same for every further micro batch once it is full:
    between two sizes whose middle lies on their line, all do."""
    found = {size: _at_size(ranking, size, count) for size in {*sizes[:1], *sizes[-1:]}}

    def fill(first: int, last: int) -> None:
        if last - first < 2:
            return
        low, middle, high = sizes[first], sizes[(first + last) // 2], sizes[last]

        def on_line(size: int) -> Floats:
            share = (size - low) / (high - low)
            return (1.0 - share) * found[low] + share * found[high]

        found[middle] = _at_size(ranking, middle, count)
        if np.allclose(found[middle], on_line(middle), rtol=_STRAIGHT, atol=0.0):
            found.update({one: on_line(one) for one in sizes[first:last] if one not in found})
            return
        fill(first, (first + last) // 2)
        fill((first + last) // 2, last)

    fill(0, len(sizes) - 1)
    return found


def _at_size(ranking: Ranking, size: int, count: int) -> Floats:
    """Step seconds at another global batch; a rank with less than a micro batch runs that."""
    points = {name: column[:count] for name, column in ranking.points.items()}
    share = -(-size // (points["replicate"] * points["shard"]))
    points = points | {
        "micro_batch": np.minimum(points["micro_batch"], share),
        "global_batch": size,
    }
    return predictions(ranking.query.columns(points), ranking.query.resolved.entry).step_s
