"""Which ways to run are listed, and in which order. A candidate is eligible if it is 90% likely to
fit and --export writes it for the engine whose seconds it has. The fastest eligible one sets the
pace: eligible ones within 2% of it are a tie, of which the one with the fewest model-parallel
ranks, then the one that is likelier to fit, comes first. Then come the others by seconds, one of
each layout. Faster ones that are not eligible stand below, with what keeps them back.

On 77 measured questions (same model, machine, GPUs and batch, runs that went out of memory counted)
the fastest that is 90% likely to fit never went out of memory and was 5.3% slower than the best run
on average, 0.3% in the middle; weighing lost tries against seconds was 3.2% slower and went out of
memory in 10; the fastest by best estimate in 3, the fastest of all in 30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats

RISK = 0.1  # of not fitting, that a first choice may have
MOST_RISK = 0.5  # above, our best estimate says that it does not fit
# Where nothing is as likely to fit as asked, the fastest of what is nearly as likely as the most
# likely is first.
NEARLY = 0.05
HELD_BACK_ROWS = 3  # faster ones that are not eligible, listed below those that are
OWN_ROWS = 3  # of the user's own runs, listed though they are slower than what fills the table
TIE = 0.02  # repeats of one run differ by 1%: a prediction cannot order what is closer than this
LOOKED_AT = 100  # for one that --export writes; then one way to run each layout


class Order(NamedTuple):
    """`index`: candidates in the order of the table; `tied`: which of these tie for its first row,
    that row among them; `pace_s`: seconds of the fastest eligible candidate; `min_fit_chance`: of
    an eligible one; `held_back`: the fastest of those that are faster than the first row and not
    eligible, one index or none."""

    index: NDArray[np.intp]
    tied: NDArray[np.bool_]
    pace_s: float
    min_fit_chance: float
    held_back: NDArray[np.intp]


def min_fit_chance(fits: Floats, risk: float) -> float:
    """Return the chance to fit from which on a candidate is eligible."""
    surest = float(fits.max(initial=0.0))
    return 1.0 - risk if surest >= 1.0 - risk else surest - NEARLY


def model_ranks(points: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the model-parallel ranks of candidates, pp x cp x tp (or etp, where that is more):
    those that work on the same tokens. `ep` adds none: its ranks have tokens of their own."""
    return np.asarray(points["pp"] * points["cp"] * np.maximum(points["tp"], points["etp"]))


def order(
    points: Mapping[str, Any],
    layouts: NDArray[np.int64],
    is_written: Callable[[int], bool],
    *,
    risk: float,
    least: int,
    pace_s: float = np.inf,
) -> Order:
    """Return the order of candidates, given by columns. `layouts`: a number for the layout of each;
    `least`: rows to fill, with more ways to run a layout where there are fewer layouts; `pace_s`:
    of an eligible candidate that is not among these."""
    step_s, fits = points["step_s"], points["fit_chance"]
    by_time = np.lexsort((-fits, step_s))
    min_chance = min_fit_chance(fits, risk)
    if not len(by_time):
        return Order(by_time, np.zeros(0, dtype=bool), pace_s, min_chance, by_time)
    likely = by_time[fits[by_time] >= min_chance]
    looked_at = np.concatenate([likely[:LOOKED_AT], _one_of_each(likely[LOOKED_AT:], layouts)])
    fastest = next((int(i) for i in looked_at if is_written(int(i))), None)
    if fastest is None:  # no engine runs any: only the chance to fit is left to ask for
        fastest, is_written = int(likely[0]), lambda i: True
    pace_s = min(pace_s, float(step_s[fastest]))
    near = likely[step_s[likely] <= (1.0 + TIE) * pace_s]
    near = near[np.array([is_written(int(i)) for i in near], dtype=bool)]
    printed_chance = np.round(100.0 * fits[near])  # chances that read alike are alike
    is_new = np.isnan(points["measured_s"][near])  # what the user has run comes before others
    by_rule = (step_s[near], -printed_chance, model_ranks(points)[near], is_new)
    tied = near[np.lexsort(by_rule)]
    first_s = float(step_s[tied[0] if len(tied) else fastest])
    is_faster = (step_s[by_time] < first_s) & ~np.isin(by_time, tied)
    faster = by_time[is_faster]
    held_back = _one_of_each(faster, layouts)[:HELD_BACK_ROWS]
    slower = likely[~np.isin(likely, np.concatenate([tied, faster]))]
    eligible = np.concatenate([tied, slower])
    main, room = _one_of_each(eligible, layouts), max(1, least - len(held_back))
    if fastest in tied and fastest not in main:  # what ties are measured by is always listed
        main = np.insert(main, len(_one_of_each(tied, layouts)), fastest)
    if len(main) < room:
        main = np.concatenate([main, eligible[~np.isin(eligible, main)]])[:room]
        is_tied = np.isin(main, tied)
        others = main[~is_tied]  # more ways to run a layout stand where their seconds put them
        main = np.concatenate([main[is_tied], others[np.argsort(step_s[others], kind="stable")]])
    was_run = ~np.isnan(points["measured_s"])
    unlisted = eligible[was_run[eligible] & ~np.isin(eligible, main[:room])]
    if len(unlisted):  # runs of the user's own are listed too, each where its seconds put it
        unlisted = unlisted[np.argsort(step_s[unlisted])][:OWN_ROWS]
        keep = max(1, room - len(unlisted))
        is_tied = np.isin(main[:keep], tied)
        others = np.concatenate([main[:keep][~is_tied], unlisted])
        shown = [main[:keep][is_tied], others[np.argsort(step_s[others], kind="stable")]]
        main = np.concatenate([*shown, main[keep:][~np.isin(main[keep:], unlisted)]])
    table = np.concatenate([main[:room], held_back, main[room:]])
    spare = by_time[~np.isin(by_time, table)]
    index = np.concatenate([table, spare[: max(0, least - len(table))]])
    return Order(index, np.isin(index, tied), pace_s, min_chance, faster[:1])


def _one_of_each(places: NDArray[np.intp], layouts: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the first of each layout, in their order."""
    return places[np.sort(np.unique(layouts[places], return_index=True)[1])]
