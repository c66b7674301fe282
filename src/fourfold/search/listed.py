"""The points that are listed: the best by closed form are played event by event, beside the fastest
of those that are sure to fit; choice.py orders them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.memory.peak import SURE, fit_chance
from fourfold.cost.predict import Predictions, playable, predictions
from fourfold.search.bounds import Bounds
from fourfold.search.choice import order
from fourfold.search.fastest import fastest
from fourfold.search.table import Bools, Places, Pool
from fourfold.spec.layout import EXPERT_AXES, MODEL_AXES, SIZES
from fourfold.spec.run import CHOSEN

# The best by closed form, whose pipelines are then played event by event; of one layout a few, so
# that a playing can still change which of them is best, and more where there are few layouts.
PLAYED, PLAYED_VARIANTS = 300, 3
FEW, FEW_VARIANTS = 60, 12
PLAYED_EVENTS = 150_000  # of all of them together: about a second of work
# Layouts that are sure to fit, played beside those.
PLAYED_SURE = 24
LOOKED_THROUGH = 4096  # points at a time while the best are picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Points in full, the first choice first; `fits`: their chances; `fastest` of all that were
    played, one row or none; `least_s`: the fewest seconds by closed form."""

    points: Pool
    predicted: Predictions
    fits: Floats
    fastest: Pool
    least_s: float


def listed(bounds: Bounds, ranked: Bools, roomy: Bools, new: Bools, least: int) -> Listed:
    """One way to run each layout, or more where there are fewer layouts than `least`. No others
    than `roomy` points are 90% sure to fit."""
    query, points = bounds.table.query, {}
    for variants in (PLAYED_VARIANTS, max(FEW_VARIANTS, least)):
        points = best_points(pool_of(bounds, ranked, new, PLAYED, variants), PLAYED, variants)
        if _size(points) >= max(FEW, least):
            break
    count = max(least, playable(query.columns(points), PLAYED_EVENTS))
    points = only(points, slice(count))
    roomy = ranked & roomy if 1.0 - query.risk >= SURE else ranked
    points = _with_sure(bounds, roomy, new, points, 1.0 - query.risk)
    predicted = predictions(query.columns(points), query.entry)
    fits = fit_chance(predicted.columns, query.entry)
    points |= {"step_s": predicted.step_s, "fit_chance": fits}
    _, numbers = np.unique(layout_numbers(points), return_inverse=True)
    by_time = np.lexsort((points["peak_bytes"], predicted.step_s))
    places = order(
        predicted.step_s[by_time],
        fits[by_time],
        numbers.reshape(-1)[by_time],
        risk=query.risk,
        least=least,
    )
    shown = by_time[places]
    return Listed(
        points=only(points, shown),
        predicted=predicted.take(shown),
        fits=fits[shown],
        fastest=only(points, by_time[:1]),
        least_s=float(predicted.closed_s.min(initial=np.inf)),
    )


def _with_sure(bounds: Bounds, roomy: Bools, new: Bools, points: Pool, at_least: float) -> Pool:
    """With the fastest way to run each layout that fits so surely, of the layouts that are fastest
    so. Those that are known already say how fast a further one must be."""
    query = bounds.table.query
    if query.safe or not _size(points):
        return points
    chance = fit_chance(query.columns(points), query.entry)
    known = np.sort(_fewest(only(points, chance >= at_least)))
    most_s = float(known[PLAYED_SURE - 1]) if len(known) >= PLAYED_SURE else np.inf
    some = sure_points(bounds, roomy, new, most_s, at_least)
    both = {name: np.concatenate([points[name], some[name]]) for name in points}
    chosen = np.stack([both[name] for name in CHOSEN], axis=1)
    return only(both, np.sort(np.unique(chosen, axis=0, return_index=True)[1]))


def sure_points(
    bounds: Bounds, mask: Bools, new: Bools, most_s: float, at_least: float = SURE
) -> Pool:
    """The fastest layouts that fit so surely, each in its fastest such way; `most_s`: of which at
    least as many are known."""
    table = bounds.table

    def is_sure(index: Places) -> Bools:
        return table.priced(index, lambda c: fit_chance(c, table.query.entry)) >= at_least

    found = fastest(bounds, mask, keep=PLAYED_SURE, variants=1, holds=is_sure, most_s=most_s)
    return best_points(_priced(bounds, *found, new), PLAYED_SURE, 1)


def _fewest(points: Pool) -> NDArray[np.float64]:
    """Closed-form seconds of the fastest way to run each layout."""
    numbers, back = np.unique(layout_numbers(points), return_inverse=True)
    fewest = np.full(len(numbers), np.inf)
    np.minimum.at(fewest, back.reshape(-1), points["step_s"])
    return fewest


def _size(pool: Pool) -> int:
    return len(pool["pp"])


def only(pool: Pool, mask: NDArray[Any] | slice) -> Pool:
    return {name: column[mask] for name, column in pool.items()}


def pool_of(
    bounds: Bounds, mask: Bools, new: Bools, keep: int, variants: int, most_s: float = np.inf
) -> Pool:
    """All that can be among the fastest, with its seconds and bytes."""
    index, step_s = fastest(bounds, mask, keep=keep, variants=variants, most_s=most_s)
    return _priced(bounds, index, step_s, new)


def _priced(bounds: Bounds, index: Places, step_s: NDArray[np.float64], new: Bools) -> Pool:
    found = {"step_s": step_s, "peak_bytes": bounds.table.peak_bytes(index)}
    return bounds.table.points(index) | found | {"unproven": new[np.divmod(index, new.shape[1])]}


_KEYS = ("cp", "tp", *EXPERT_AXES, "cp_kind")


def layout_numbers(points: Pool) -> NDArray[np.int64]:
    """One number for what `_layout_keys` tells apart; dp follows from the other axes."""
    axes = ("cp_kind", *EXPERT_AXES, *MODEL_AXES[::-1])
    number = np.zeros(_size(points), dtype=np.int64)
    for name in axes:  # sizes are far below the factor, or their products are
        number = number * 1_000_003 + points[name].astype(np.int64)
    return number


def _layout_keys(points: Pool) -> list[tuple[int, ...]]:
    """What makes two points the same layout: the sizes of the axes and the kind of cp."""
    dp = points["replicate"] * points["shard"]
    columns = (points["pp"], dp, *(points[name] for name in _KEYS))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def best_points(pool: Pool, keep: int, variants: int) -> Pool:
    """The fastest points, at most `variants` of each layout. Splits of dp into copies that change
    nothing else are one point: the faster, then the smaller, then the plainer stands for all."""
    order = np.lexsort((pool["replicate"], pool["peak_bytes"], pool["step_s"]))
    rest = [name for name in CHOSEN if name not in (*SIZES, *EXPERT_AXES)]
    chosen: list[int] = []
    seen: set[tuple[int, ...]] = set()
    used: dict[tuple[int, ...], int] = {}
    for block in range(0, len(order), LOOKED_THROUGH):
        part = order[block : block + LOOKED_THROUGH]
        keys = _layout_keys(only(pool, part))
        others = zip(*(pool[name][part].tolist() for name in rest), strict=True)
        for i, layout, other in zip(part.tolist(), keys, others, strict=True):
            if used.get(layout, 0) < variants and (*layout, *other) not in seen:
                seen.add((*layout, *other))
                used[layout] = used.get(layout, 0) + 1
                chosen.append(i)
                if len(chosen) == keep:
                    return only(pool, np.array(chosen, dtype=np.intp))
    return only(pool, np.array(chosen, dtype=np.intp))
