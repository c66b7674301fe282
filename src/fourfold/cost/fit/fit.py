"""Coefficients that explain measured rows: fits each (stack, cluster) with the others as its prior.

At most eight free numbers for time and three for memory per key, and never more than it has rows:
those that explain most, one after the other; the others stay at the prior. Rounds, so that each key
is fitted under what the others taught. All keys are asked about at once. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats
from fourfold.cost.fit.calibration import ROUTED, FittedStack, blend, states
from fourfold.cost.fit.coefficients import BY_NAME, MEMORY, TIGHT, TIME
from fourfold.cost.fit.folds import Places, Sample, joined_samples
from fourfold.cost.fit.interval import StepInterval, counts, spreads
from fourfold.cost.fit.ranges import ranges
from fourfold.cost.fit.solver import Minimum, Prior, minimise
from fourfold.cost.memory.peak import GIB, limit_bytes, memory
from fourfold.cost.step.estimate import estimate
from fourfold.spec.catalog import generation_of
from fourfold.spec.engine import engine_of

MOST_TIME, MOST_MEMORY = 8, 3
LEAST_GAIN = 0.2  # of the logarithm of a posterior, that a free coefficient brings
STEP_SCALE = 0.04  # an ordinary log residual of time
MEMORY_SCALE = 0.05
LABEL_SCALE = 0.05  # how sharp the edge between fits and does not is, as a share of capacity
USUAL_ROWS, USUAL_NOISE = 12.0, 0.05  # what a fit leaves of other keys, as so many rows
# What intervals should hold of a key's rows; and as how many rows the usual width counts.
HOLD, USUAL_WIDTH_ROWS = 0.82, 50.0
FEWEST_FOR_RANGE = 4
NOTHING: Mapping[str, float] = {}


def fit_entries(
    rows: Sample,
    others: tuple[FittedStack, ...] = (),
    *,
    rounds: int = 2,
    fixed: Mapping[str, float] = NOTHING,
) -> tuple[FittedStack, ...]:
    """An entry for every key in the rows; `others` are fitted already and stay as they are, `fixed`
    coefficients are known otherwise."""
    return fit_many([(rows, others)], rounds=rounds, fixed=fixed)[0]


def fit_many(
    jobs: Sequence[tuple[Sample, tuple[FittedStack, ...]]],
    *,
    rounds: int = 2,
    fixed: Mapping[str, float] = NOTHING,
) -> list[tuple[FittedStack, ...]]:
    """The same for many samples at once, each with others of its own."""
    keys = [(at, key) for at, (rows, _) in enumerate(jobs) for key in rows.all_keys()]
    samples = [jobs[at][0].take(jobs[at][0].where(key)) for at, key in keys]
    made: list[dict[str, FittedStack]] = [{} for _ in jobs]
    for _ in range(rounds):
        priors = []
        for (at, (runs, cluster)), rows in zip(keys, samples, strict=True):
            known = {entry.key: entry for entry in jobs[at][1]} | made[at]
            generation = generation_of(str(rows.hardware[0]))
            prior = blend(
                tuple(known.values()),
                runs,
                cluster=cluster,
                generation=generation,
            )
            priors.append(replace(prior, coefficients={**prior.coefficients, **fixed}))
        entries = _fit_part(priors, samples, TIMED, fixed)
        entries = _fit_part(entries, samples, SIZED, fixed)
        for (at, _), entry in zip(keys, entries, strict=True):
            made[at][entry.key] = entry
    return [tuple(mine.values()) for mine in made]


# Residuals of some rows (by place) under coefficients [moves, rows].
Misfit = Callable[[Mapping[str, Floats], Places], Floats]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one kind of measurement can teach."""

    names: tuple[str, ...]
    most: int
    scale: float
    residuals: int  # of a row
    misfit: Callable[[Sample, Places], Misfit]
    has: Callable[[Sample], NDArray[np.bool_]]
    learned: Callable[[FittedStack, Sample, Floats], FittedStack]


def _fit_part(
    priors: list[FittedStack], samples: list[Sample], part: Lesson, fixed: Mapping[str, float]
) -> list[FittedStack]:
    """Fit all coefficients of a part, choose those that tell most, fit these again."""
    measured = [rows.take(np.flatnonzero(part.has(rows))) for rows in samples]
    places = [i for i, rows in enumerate(measured) if len(rows)]
    if not places:
        return priors
    rows, asked = joined_samples([measured[i] for i in places]), [priors[i] for i in places]
    lengths = [len(measured[i]) for i in places]
    of_rows = np.repeat(np.arange(len(places)), lengths)
    groups = np.repeat(of_rows, part.residuals)
    names = tuple(name for name in part.names if name not in fixed)
    start = {n: np.array([one.coefficients[n] for one in asked]) for n in asked[0].coefficients}
    misfit = part.misfit(rows, of_rows)

    def residuals(x: Floats, index: Places) -> Floats:
        moved = {name: np.exp(x[:, :, i]) for i, name in enumerate(names)}
        coef = {name: value[groups[index]] for name, value in start.items()} | moved
        return misfit(coef, index)

    prior = _prior(asked, [measured[i] for i in places], names)
    every = minimise(residuals, groups, prior, scale=part.scale, begin=prior.mean)
    free = np.zeros(prior.mean.shape, dtype=bool)
    for g, count in enumerate(lengths):
        away = every.x[g] - prior.mean[g]
        free[g, most_informative(away, every.hessian[g], most=min(part.most, count))] = True
    begin, prior = np.where(free, every.x, prior.mean), replace(prior, free=free)
    found = minimise(residuals, groups, prior, scale=part.scale, begin=begin)
    left = residuals(found.x[groups][None], np.arange(len(groups)))[0]
    entries = list(priors)
    known = dict.fromkeys(set(part.names) & set(fixed), 1.0)
    for g, i in enumerate(places):
        entry = _fitted(priors[i], names, found, prior, g)
        entry = replace(entry, informed=entry.informed | known)
        entries[i] = part.learned(entry, measured[i], -left[groups == g])
    return entries


def _fitted(
    entry: FittedStack, names: tuple[str, ...], found: Minimum, prior: Prior, group: int
) -> FittedStack:
    """With what was free of one group, and how much that narrowed its prior."""
    doubt = np.diag(np.linalg.inv(found.hessian[group])) / prior.spread[group] ** 2
    free = [i for i in range(len(names)) if prior.free[group, i]]
    value = {names[i]: float(np.exp(found.x[group, i])) for i in free}
    share = {names[i]: float(np.clip(1.0 - doubt[i], 0.0, 1.0)) for i in free}
    return replace(entry, coefficients=entry.coefficients | value, informed=entry.informed | share)


def _prior(entries: list[FittedStack], measured: list[Sample], names: tuple[str, ...]) -> Prior:
    """[keys, coefficients] around what the other keys say; what is known of a cluster is no
    question of its fits."""
    asked = [BY_NAME[name] for name in names]
    mean = np.log([[entry.coefficients[name] for name in names] for entry in entries])
    low, high = np.log([one.low for one in asked]), np.log([one.high for one in asked])
    known = [[name in states().get(entry.cluster, {}) for name in names] for entry in entries]
    return Prior(
        mean=np.clip(mean, low, high),
        spread=TIGHT * np.array([spreads(rows.columns, names).mean(axis=0) for rows in measured]),
        low=np.broadcast_to(low, mean.shape),
        high=np.broadcast_to(high, mean.shape),
        free=~np.array(known),
    )


def most_informative(away: Floats, hessian: Floats, *, most: int) -> list[int]:
    """The few coefficients that explain most, chosen one after the other on the paraboloid around
    the top of the posterior; `away` is the way to the top from where the others stay."""
    chosen: list[int] = []

    def lost(free: list[int]) -> float:
        rest = [i for i in range(len(away)) if i not in free]
        own, both = hessian[np.ix_(rest, rest)], hessian[np.ix_(rest, free)]
        if free:
            own = own - both @ np.linalg.solve(hessian[np.ix_(free, free)], both.T)
        return 0.5 * float(away[rest] @ own @ away[rest])

    now = lost([])
    while len(chosen) < min(most, len(away)):
        trials = {i: lost([*chosen, i]) for i in range(len(away)) if i not in chosen}
        best = min(trials, key=lambda i: trials[i])
        if now - trials[best] < LEAST_GAIN:
            break
        chosen.append(best)
        now = trials[best]
    return sorted(chosen)


def time_misfit(rows: Sample, _: Places) -> Misfit:
    """Log residuals of the step time."""
    measured = np.log(rows.step_s)
    return lambda coef, index: (
        np.log(estimate(rows.columns.take(index), coef).step_s) - measured[index]
    )


def memory_misfit(rows: Sample, groups: Places) -> Misfit:
    """Of printed memory and of whether it ran: a log residual and a hinge, as one number."""
    has_mem, has_label = np.isfinite(rows.mem_gb), np.isfinite(rows.fits)
    measured = np.log(np.where(has_mem, rows.mem_gb, 1.0) * GIB)
    usual = [engine_of(runs).habits for runs in rows.measured_as.tolist()]
    rank0 = np.array([one.reports_rank0 for one in usual])
    final = np.array([one.reports_last for one in usual])
    # Each verdict counts half in total: tables have far more of one kind than of the other.
    ran, oom = (
        np.maximum(1.0, np.bincount(groups, rows.fits == verdict)[groups]) for verdict in (1, 0)
    )
    weight = np.sqrt((ran + oom) / 2.0 / np.where(rows.fits > 0, ran, oom))
    side = np.where(rows.fits > 0, 1.0, -1.0)

    def misfit(coef: Mapping[str, Floats], index: Places) -> Floats:
        at = index[::2] // 2
        c, one = rows.columns.take(at), {name: value[..., ::2] for name, value in coef.items()}
        got = memory(c, one)
        printed = np.where(rank0[at], got.first_bytes, got.worst_bytes)
        printed = np.where(final[at], got.last_bytes, printed)
        size = np.where(has_mem[at], (np.log(printed) - measured[at]) / MEMORY_SCALE, 0.0)
        over = np.log(got.worst_bytes / limit_bytes(c, one)) * side[at] / LABEL_SCALE
        hinge = np.where(has_label[at], weight[at] * np.sqrt(2.0 * np.logaddexp(0.0, over)), 0.0)
        # A counted engine's memory has no coefficient that a fit moves, its limit has.
        pairs = np.stack(np.broadcast_arrays(size, hinge), axis=-1)
        return pairs.reshape(*pairs.shape[:-2], -1)

    return misfit


def _timed(entry: FittedStack, rows: Sample, left: Floats) -> FittedStack:
    made = replace(
        entry,
        rows_time=len(rows),
        noise=noise_of(left, len(entry.free_time), is_routed=entry.measured_as.experts),
        ranges=ranges(rows.columns) if len(rows) >= FEWEST_FOR_RANGE else {},
        counts=counts(rows.columns),
    )
    return replace(made, width=width_of(left, made, rows.columns))


def width_of(left: Floats, entry: FittedStack, c: Columns) -> float:
    """Times the usual width that holds these rows, by what the fit left of them, with the usual one
    as so many rows more: some engines are easier to predict than others."""
    usual = StepInterval(c, entry, estimate(c, entry.coefficients)).usual
    count = left.size
    ratio = np.quantile(np.abs(left) / usual, HOLD) * np.sqrt(_used(count, len(entry.free_time)))
    return float((count * ratio + USUAL_WIDTH_ROWS) / (count + USUAL_WIDTH_ROWS))


def noise_of(left: Floats, free: int, *, is_routed: bool = False) -> float:
    """Robust size of what a fit of so many free coefficients leaves, with a usual one as so many
    rows more: few rows cannot tell."""
    count = left.size
    own = (1.4826 * float(np.median(np.abs(left)))) ** 2 * _used(count, free)
    usual = USUAL_NOISE * (ROUTED if is_routed else 1.0)
    return float(np.sqrt((count * own + USUAL_ROWS * usual**2) / (count + USUAL_ROWS)))


def _used(count: int, free: int) -> float:
    """How much larger errors of new rows are (squared), for what the fit took to itself."""
    return count / max(count - free, count / 2.0)


def _sized(entry: FittedStack, rows: Sample, _: Floats) -> FittedStack:
    """Runs that fitted, and nothing else, only bound memory from above: good for this key, no
    lesson for another."""
    entry = replace(entry, rows_memory=len(rows))
    if np.any(np.isfinite(rows.mem_gb)) or np.any(rows.fits == 0):
        return entry
    return replace(entry, informed=entry.informed | dict.fromkeys(entry.free_memory, 0.0))


TIMED = Lesson(
    names=TIME,
    most=MOST_TIME,
    scale=STEP_SCALE,
    residuals=1,
    misfit=time_misfit,
    has=lambda rows: np.isfinite(rows.step_s),
    learned=_timed,
)
SIZED = Lesson(
    names=MEMORY,
    most=MOST_MEMORY,
    scale=1.0,
    residuals=2,
    misfit=memory_misfit,
    has=lambda rows: np.isfinite(rows.mem_gb) | np.isfinite(rows.fits),
    learned=_sized,
)
