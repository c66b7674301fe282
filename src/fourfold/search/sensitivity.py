"""How much a ranking is worth: what would turn it over, and which runs would decide it."""

from __future__ import annotations

from math import sqrt

import numpy as np

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import FittedStack
from fourfold.cost.fit.coefficients import Coefficient
from fourfold.cost.fit.interval import TWO_SIDED_80, half_width
from fourfold.cost.memory.peak import moved_coefficients, moves
from fourfold.cost.step.estimate import estimate
from fourfold.search.plan_answer import Reversal
from fourfold.search.ranking import Ranking

LOOKED_AT = 24  # of the first layouts: which may be best
ONE_SIDED_80 = 0.8416  # 80% of a normal distribution lies below 0.84 sd
# Repeats of one run differ by about 1% (bloom, mpt and par4d tables).
REPEATS = 0.01
# What layouts of one stack that nobody measured err apart; the rest of its doubt moves all alike.
APART = 0.08


def tie_width(entry: FittedStack) -> float:
    """Log ratio of two predictions below which their order is right less than 4 times in 5."""
    sd = half_width(entry) / TWO_SIDED_80
    sd = max(REPEATS, sd if entry.rows_time else min(sd, APART))
    return ONE_SIDED_80 * sqrt(2.0) * sd


def _moved_s(c: Columns, entry: FittedStack, ends: list[tuple[Coefficient, float]]) -> Floats:
    """[moves, candidates] step seconds with one coefficient moved at a time."""
    step = estimate(c, moved_coefficients(entry, ends)).step_s
    return np.broadcast_to(step, (len(ends), len(c)))


def reversals(ranking: Ranking) -> tuple[Reversal, ...]:
    """Coefficients that, moved within what is not known of them, make a layout fastest that is
    slower than the first without; the largest gain first, one of each coefficient."""
    count = min(LOOKED_AT, len(ranking))
    if count < 2:
        return ()
    entry = ranking.query.entry
    ends = moves(entry, "time")
    # What simulation added to the closed form stays added.
    step = _moved_s(ranking.predicted.columns.take(slice(0, count)), entry, ends)
    step = step * (ranking.step_s[:count] / ranking.closed_s[:count])
    turned: list[Reversal] = []
    for (coefficient, other), row in zip(ends, step, strict=True):
        winner = int(np.argmin(row))
        gain = float(row[0] / row[winner])
        if ranking.step_s[winner] <= ranking.step_s[0]:
            continue  # the first is it, or stands before it for other reasons
        if gain > 1.0 + REPEATS and ranking.layout(winner) != ranking.layout(0):
            reversal = Reversal(
                knob=coefficient.name,
                about=coefficient.about,
                value=entry.coefficients[coefficient.name],
                other=other,
                winner=winner + 1,
                layout=ranking.layout(winner),
                gain=gain,
            )
            turned.append(reversal)
    best: dict[str, Reversal] = {}
    for one in sorted(turned, key=lambda one: -one.gain):
        best.setdefault(one.knob, one)
    return tuple(best.values())


def deciding(ranking: Ranking, runs: int = 3) -> list[int]:
    """The candidates to measure: the first, and those that may be best whose order to it is most
    open.

    Open = a small difference where the coefficients say little: difference over its own spread.
    """
    if not len(ranking):
        return []
    entry = ranking.query.entry
    apart = np.abs(np.log(ranking.step_s[:LOOKED_AT] / ranking.step_s[0]))
    tied = 1 + int(np.max(np.flatnonzero(apart <= 2.0 * tie_width(entry)), initial=0))
    if tied < 2:
        return []
    step = _moved_s(ranking.predicted.columns.take(slice(0, tied)), entry, moves(entry, "time"))
    ratio = np.log(step / step[:, :1]) - np.log(ranking.closed_s[:tied] / ranking.closed_s[0])
    spread = np.sqrt((ratio**2).sum(axis=0) / 2.0) / TWO_SIDED_80
    gap = np.log(ranking.step_s[:tied] / ranking.step_s[0])
    doubt = (spread + REPEATS) / (np.abs(gap) + REPEATS)
    chosen, layouts = [0], {ranking.layout(0)}
    for i in np.argsort(-doubt, kind="stable"):
        if len(chosen) < runs and ranking.layout(int(i)) not in layouts:
            chosen.append(int(i))
            layouts.add(ranking.layout(int(i)))
    return chosen if len(chosen) > 1 else []
