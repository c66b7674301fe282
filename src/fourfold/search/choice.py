"""Which ways to run are listed, and in which order: those that are sure to fit by their seconds,
one of each layout, then the few that are faster but riskier.

On 77 measured questions (same model, machine, GPUs and batch, runs that went out of memory counted)
the fastest that is 90% sure never went out of memory and was 5.3% slower than the best run on
average, 0.3% in the middle; weighing lost tries against seconds was 3.2% slower and went out of
memory in 10; the fastest by best estimate in 3, the fastest of all in 30.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats

RISK = 0.1  # of not fitting, that a first choice may have
MOST_RISK = 0.5  # above, our best estimate says that it does not fit
# Where nothing is as sure as asked, the fastest of what is nearly as sure as the surest is first.
NEARLY = 0.05
RISKY_ROWS = 3  # faster ones that are not sure to fit, listed below those that are


def sure_line(fits: Floats, risk: float) -> float:
    """The chance from which on a way to run counts as sure."""
    surest = float(fits.max(initial=0.0))
    return 1.0 - risk if surest >= 1.0 - risk else surest - NEARLY


def order(
    step_s: Floats, fits: Floats, layouts: NDArray[np.int64], *, risk: float, least: int
) -> NDArray[np.intp]:
    """Places in the order of the table. `layouts`: a number for the layout of each; `least`: rows
    to fill, with more ways to run a layout where there are fewer layouts."""
    by_time = np.lexsort((-fits, step_s))
    is_sure = fits[by_time] >= sure_line(fits, risk)
    sure, others = by_time[is_sure], by_time[~is_sure]
    if not len(sure):
        return by_time
    risky = _one_of_each(others[step_s[others] < step_s[sure[0]]], layouts)[:RISKY_ROWS]
    main = _one_of_each(sure, layouts)
    room = max(1, least - len(risky))
    table = np.concatenate([main[:room], risky, main[room:]])
    rest = np.concatenate([sure, others])
    spare = rest[~np.isin(rest, table)]
    return np.concatenate([table, spare[: max(0, least - len(table))]])


def _one_of_each(places: NDArray[np.intp], layouts: NDArray[np.int64]) -> NDArray[np.intp]:
    """The first of each layout, in their order."""
    return places[np.sort(np.unique(layouts[places], return_index=True)[1])]
