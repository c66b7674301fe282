"""What a layout costs beside its seconds: the fastest layout for each amount of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fourfold.cost.memory.peak import fit_chance
from fourfold.cost.predict import predictions
from fourfold.search.fastest import fastest
from fourfold.search.ranking import Ranking

# Of the device: what two neighbours of a front differ by at least.
STEP = 0.02


def memory_front(ranking: Ranking, most: int) -> Ranking:
    """The ranked points that no other undercuts in both seconds (closed form) and bytes, fastest
    first, each smaller than the one before by 2% of the device or more."""
    space, mask = ranking.cells.space, ranking.ranked.copy()
    peak_bytes = np.full(mask.size, np.inf)
    members = np.flatnonzero(mask)
    peak_bytes[members] = space.peak_bytes(members)
    step = STEP * ranking.query.cluster.device.memory_bytes
    front: list[int] = []
    while mask.any() and len(front) < most:
        index, step_s = fastest(ranking.cells, mask, keep=1, variants=1)
        best = int(index[np.lexsort((peak_bytes[index], step_s))[0]])
        front.append(best)
        mask &= (peak_bytes < peak_bytes[best] - step).reshape(mask.shape)
    points = space.points(np.array(front, dtype=np.intp))
    points["peak_bytes"] = peak_bytes[front]
    predicted = predictions(ranking.query.columns(points), ranking.query.entry)
    fits = fit_chance(predicted.columns, ranking.query.entry)
    return replace(ranking, points=points, predicted=predicted, fits=fits, fastest={})
