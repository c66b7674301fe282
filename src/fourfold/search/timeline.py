"""What would the pipeline of one ranked layout look like? Its step, played with the planner's
seconds."""

from __future__ import annotations

import numpy as np

from fourfold.cost.schedule.timeline import Timeline, play
from fourfold.cost.step.played import chunk_times
from fourfold.errors import UserError
from fourfold.search.ranking import Ranking
from fourfold.spec.words import SCHEDULES

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
