"""The points that are listed: the best by closed form are played event by event, beside the fastest
of those that are likely to fit and all that tie with them; choice.py orders them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.memory.peak import SURE, fit_chance
from fourfold.cost.predict import Predictions, playable, predictions
from fourfold.cost.step.estimate import estimate
from fourfold.search.bounds import LAYOUT, Bounds
from fourfold.search.choice import LOOKED_AT, TIE, order
from fourfold.search.fastest import fastest
from fourfold.search.ran import with_own_runs
from fourfold.search.table import Bools, Places, Pool, alike, repeats
from fourfold.spec.run import CHOSEN

# The best by closed form, whose pipelines are then played event by event; of one layout a few, so
# that a playing can still change which of them is best, and more where there are few layouts.
PLAYED, PLAYED_VARIANTS = 300, 3
FEW, FEW_VARIANTS = 60, 12
PLAYED_EVENTS = 150_000  # of all of them together: about a second of work
# Layouts that are likely to fit, played beside those.
PLAYED_SURE = 24


# Ways to run that are likely to fit and within a tie of the fastest, played beside those; played,
# they may move by SLACK against it.
TIED, TIED_VARIANTS, SLACK = 120, 24, 0.01
IsWritten = Callable[[Pool, int], bool]  # whether --export writes one of these points


class Listed(NamedTuple):
    """Points in full, the first choice first, and which of them are `tied`; `pace_s`,
    `min_fit_chance`, `held_back` (one row or none): as choice.Order has them; `least_s`: the fewest
    seconds by closed form."""

    points: Pool
    predicted: Predictions
    pace_s: float
    min_fit_chance: float
    held_back: Pool
    least_s: float


def listed(
    bounds: Bounds,
    ranked: Bools,
    roomy: Bools,
    new: Bools,
    least: int,
    *,
    is_written: IsWritten,
    pace_s: float = np.inf,
    measured: Pool | None = None,
) -> Listed:
    """Return one way to run each layout, or more where there are fewer layouts than `least`. No
    others than `roomy` points are 90% likely to fit. `pace_s`: as choice.order has it;
    `measured`: points that the user has run."""
    query, points = bounds.table.query, {}
    for variants in (PLAYED_VARIANTS, max(FEW_VARIANTS, least)):
        points = leading(bounds, ranked, new, PLAYED, variants)
        if len(points["pp"]) >= max(FEW, least):
            break
    count = max(least, playable(query.columns(points), PLAYED_EVENTS))
    points = only(points, slice(count))
    roomy = ranked & roomy if 1.0 - query.risk >= SURE else ranked
    points = _with_sure(bounds, roomy, new, points, 1.0 - query.risk)
    points = _with_ties(bounds, roomy, new, points, 1.0 - query.risk, is_written)
    points = _with_measured(bounds, new, points, measured)
    predicted = predictions(query.columns(points), query.resolved.entry)
    points = with_own_runs(query.own_runs, points, predicted)
    by_time = np.lexsort((points["peak_bytes"], predicted.step_s))
    timed, predicted = only(points, by_time), predicted.take(by_time)
    asked: dict[int, bool] = {}

    def writes(i: int) -> bool:
        if i not in asked:
            asked[i] = bool(np.isfinite(timed["measured_s"][i])) or is_written(timed, i)
        return asked[i]

    numbers = layout_numbers(timed)
    table = order(timed, numbers, writes, risk=query.risk, least=least, pace_s=pace_s)
    return Listed(
        only(timed, table.index) | {"tied": table.tied},
        predicted.take(table.index),
        table.pace_s,
        table.min_fit_chance,
        only(timed, table.held_back),
        float(predicted.closed_s.min(initial=np.inf)),
    )


def _with_sure(bounds: Bounds, roomy: Bools, new: Bools, points: Pool, at_least: float) -> Pool:
    """With the fastest way to run each layout that fits so surely, of the layouts that are fastest
    so. Those that are known already say how fast a further one must be."""
    query = bounds.table.query
    if query.safe or not len(points["pp"]):
        return points
    chance = fit_chance(query.columns(points), query.resolved.entry, points["peak_bytes"])
    known = np.sort(fewest_s(only(points, chance >= at_least))[1])
    most_s = float(known[PLAYED_SURE - 1]) if len(known) >= PLAYED_SURE else np.inf
    some = sure_points(bounds, roomy, new, most_s, at_least)
    both = {name: np.concatenate([points[name], some[name]]) for name in points}
    return only(both, np.sort(alike(both, CHOSEN)[0]))


def _with_measured(bounds: Bounds, new: Bools, points: Pool, measured: Pool | None) -> Pool:
    """Return the points with those that the user has run, wherever they stand."""
    if not measured or not len(measured["pp"]):
        return points
    columns = bounds.table.query.columns(measured)
    step_s = estimate(columns, bounds.table.query.resolved.entry.coefficients).step_s
    runs = measured | {"step_s": step_s, "unproven": np.zeros(len(step_s), dtype=bool)}
    both = {name: np.concatenate([points[name], runs[name]]) for name in points}
    return only(both, np.sort(alike(both, CHOSEN)[0]))


def _with_ties(
    bounds: Bounds,
    roomy: Bools,
    new: Bools,
    points: Pool,
    at_least: float,
    is_written: IsWritten,
) -> Pool:
    """Return the points with all ways to run that tie with the fastest eligible one: of the same
    layouts and of others."""
    query = bounds.table.query
    if not len(points["pp"]):
        return points
    chance = fit_chance(query.columns(points), query.resolved.entry, points["peak_bytes"])
    likely = only(points, chance >= at_least)
    likely = only(likely, np.argsort(likely["step_s"], kind="stable"))
    written = (i for i in range(min(LOOKED_AT, len(likely["pp"]))) if is_written(likely, i))
    if (fastest := next(written, None)) is None:
        return points
    most_s = (1.0 + TIE + SLACK) * float(likely["step_s"][fastest])
    ways = _likely(bounds, roomy, new, TIED, TIED_VARIANTS, at_least, most_s)
    ways = only(ways, slice(playable(query.columns(ways), PLAYED_EVENTS)))
    both = {name: np.concatenate([points[name], ways[name]]) for name in points}
    return only(both, np.sort(alike(both, CHOSEN)[0]))


def sure_points(
    bounds: Bounds, mask: Bools, new: Bools, most_s: float, at_least: float = SURE
) -> Pool:
    """The fastest layouts that fit so surely, each in its fastest such way; `most_s`: of which at
    least as many are known."""
    return _likely(bounds, mask, new, PLAYED_SURE, 1, at_least, most_s)


def _likely(
    bounds: Bounds,
    mask: Bools,
    new: Bools,
    keep: int,
    variants: int,
    at_least: float,
    most_s: float,
) -> Pool:
    """Return the fastest points that fit so likely, none slower than `most_s`."""
    table = bounds.table

    def is_likely(index: Places) -> Bools:
        return table.priced(index, lambda c: fit_chance(c, table.query.resolved.entry)) >= at_least

    return leading(bounds, mask, new, keep, variants, holds=is_likely, most_s=most_s)


def leading(
    bounds: Bounds, mask: Bools, new: Bools, keep: int, variants: int, **asked: Any
) -> Pool:
    """The fastest points of a mask (`asked`: as fastest.py has it), with their seconds and bytes,
    and which are `new`."""
    index, step_s = fastest(bounds, mask, keep=keep, variants=variants, **asked)
    pool = bounds.table.points(index)
    pool |= {"step_s": step_s, "peak_bytes": bounds.table.peak_bytes(index)}
    pool |= {"unproven": new[np.divmod(index, new.shape[1])]}
    return best_points(pool, keep, variants)


def only(pool: Pool, mask: NDArray[Any] | slice) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def layout_numbers(points: Pool) -> NDArray[np.int64]:
    """One number for each layout, in whatever table it stands."""
    number = np.zeros(len(points["pp"]), dtype=np.int64)
    for name in LAYOUT:  # sizes are far below the factor, or their products are
        number = number * 1_000_003 + points[name].astype(np.int64)
    return number


def fewest_s(points: Pool) -> tuple[NDArray[np.int64], Floats]:
    """(numbers of layouts, seconds of the fastest way to run each)."""
    numbers, back = np.unique(layout_numbers(points), return_inverse=True)
    fewest = np.full(len(numbers), np.inf)
    np.minimum.at(fewest, back.reshape(-1), points["step_s"])
    return numbers, fewest


def best_points(pool: Pool, keep: int, variants: int) -> Pool:
    """The fastest points, at most `variants` of each layout. Splits of dp into copies that change
    nothing else are one point: the faster, then the smaller, then the plainer stands for all."""
    pool = only(pool, np.lexsort((pool["replicate"], pool["peak_bytes"], pool["step_s"])))
    pool = only(pool, np.sort(alike(pool, _BUT_COPIES)[0]))
    layout, place = layout_numbers(pool), np.zeros(len(pool["pp"]), dtype=np.intp)
    counts = np.unique(layout, return_counts=True)[1]
    place[np.argsort(layout, kind="stable")] = repeats(counts)[1]
    return only(pool, np.flatnonzero(place < variants)[:keep])


_BUT_COPIES = tuple(name for name in CHOSEN if name not in ("replicate", "shard"))
