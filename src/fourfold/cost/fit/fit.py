"""Coefficients that explain measured rows: fits each (stack, cluster) with the others as its prior.

At most 14 free numbers for time and 6 for memory per key: those whose prior the rows narrow most;
the others stay at the prior. Two rounds, so that each key is fitted under what the others taught.
Derivatives are one broadcast question to the model. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Columns, Floats, joined
from fourfold.cost.fit.calibration import FittedStack, blend
from fourfold.cost.fit.coefficients import BY_NAME, MEMORY, TIME
from fourfold.cost.fit.nearby import learned, spread_of
from fourfold.cost.fit.solver import Prior, minimise
from fourfold.cost.fit.spread import from_middle, measured_values, pushed
from fourfold.cost.memory.peak import GIB, limit_bytes, memory
from fourfold.cost.stacks import stack_defaults
from fourfold.cost.step.estimate import estimate
from fourfold.cost.table.open_fields import open_layouts
from fourfold.cost.table.rows import Rows
from fourfold.spec.catalog import generation_of

MOST_TIME = 14
MOST_MEMORY = 6
TIGHT = 0.7  # keys spread less around their kin than a coefficient does around its default
STEP_SCALE = 0.04  # an ordinary log residual of time
MEMORY_SCALE = 0.05
# Growth of noise with the GPUs: its spread between keys; rows and doublings (sd) that can show it;
# an error too small to tell from none.
USUAL_GROWTH, FEWEST_TO_GROW, LEAST_REACH, TINY = 0.1, 8, 0.3, 0.003
NOTHING: Mapping[str, float] = {}
LABEL_SCALE = 0.05  # how sharp the edge between fits and does not is, as a share of capacity


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of several tables as one, usable ones only."""

    columns: Columns
    stack: NDArray[np.str_]
    cluster: NDArray[np.str_]
    hardware: NDArray[np.str_]
    step_s: Floats
    mem_gb: Floats
    fits: Floats  # 1 ran, 0 out of memory, NaN unknown

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, index: NDArray[np.intp]) -> Sample:
        return Sample(
            self.columns.take(index), self.stack[index], self.cluster[index],
            self.hardware[index], self.step_s[index], self.mem_gb[index], self.fits[index],
        )  # fmt: skip

    def all_keys(self) -> list[tuple[str, str]]:
        return sorted(set(zip(self.stack.tolist(), self.cluster.tolist(), strict=True)))

    def where(self, key: tuple[str, str]) -> NDArray[np.intp]:
        return np.flatnonzero((self.stack == key[0]) & (self.cluster == key[1]))


def sample(tables: Sequence[Rows]) -> Sample:
    """Measured rows of parsed tables: those with seconds, memory or an out-of-memory, and a layout
    of their own (nothing is learned from a guessed one)."""
    parts = []
    for rows in tables:
        ok = (rows.status == "ok") | ((rows.status == "") & np.isfinite(rows.step_s))
        oom = rows.status == "oom"
        index = np.flatnonzero(rows.usable & (ok | oom) & ~open_layouts(rows.table))
        fits = np.where(ok, 1.0, np.where(oom, 0.0, np.nan))
        step = np.where(ok & (rows.step_s > 0), rows.step_s, np.nan)
        mem = np.where(ok & (rows.mem_gb > 0), rows.mem_gb, np.nan)
        parts.append(
            Sample(rows.columns.take(index), rows.stack[index], rows.cluster[index],
                   rows.hardware[index], step[index], mem[index], fits[index])
        )  # fmt: skip
    first = [part.columns for part in parts]
    texts = [(p.stack, p.cluster, p.hardware, p.step_s, p.mem_gb, p.fits) for p in parts]
    return Sample(
        joined(first), *(np.concatenate(list(column)) for column in zip(*texts, strict=True))
    )


Misfit = Callable[[dict[str, Floats | float]], Floats]


def fit_entries(
    rows: Sample,
    others: tuple[FittedStack, ...] = (),
    *,
    rounds: int = 2,
    fixed: Mapping[str, float] = NOTHING,
) -> tuple[FittedStack, ...]:
    """An entry for every key in the rows; `others` are fitted already and stay as they are, `fixed`
    coefficients are known otherwise."""
    pool = {entry.key: entry for entry in others}
    made: dict[str, FittedStack] = {}
    for _ in range(rounds):
        current = {**pool, **made}
        for key in rows.all_keys():
            index = rows.where(key)
            made_key = f"{key[0]}|{key[1]}"
            prior = blend(
                tuple(current.values()), stack=key[0], cluster=key[1],
                generation=generation_of(str(rows.hardware[index][0])),
            )  # fmt: skip
            made[made_key] = fit_one(rows.take(index), prior, fixed)
    return tuple(made.values())


def fit_one(rows: Sample, prior: FittedStack, fixed: Mapping[str, float] = NOTHING) -> FittedStack:
    """The entry of one key under a prior; what is fixed is as known as can be."""
    timed = rows.take(np.flatnonzero(np.isfinite(rows.step_s)))
    entry = replace(prior, coefficients={**prior.coefficients, **fixed})
    if len(timed):
        misfit = time_misfit(timed)
        entry = _fit_part(entry, TIME, misfit, fixed, scale=STEP_SCALE, most=MOST_TIME)
        nearby, left = learned(timed.columns, -misfit({**entry.coefficients}))
        values = measured_values(timed.columns)
        gpus = np.log2(timed.columns.gpus)
        growth = _growth(left, gpus)
        steady = left / np.exp(growth * from_middle(gpus, values))
        entry = replace(
            entry,
            rows_time=len(timed),
            noise=spread_of(steady, free=len(entry.free_time)),
            growth=growth,
            values=values,
            nearby=nearby,
        )
    sized = rows.take(np.flatnonzero(np.isfinite(rows.mem_gb) | np.isfinite(rows.fits)))
    if len(sized):
        misfit = memory_misfit(sized)
        entry = _fit_part(entry, MEMORY, misfit, fixed, scale=1.0, most=MOST_MEMORY)
        entry = replace(entry, rows_memory=len(sized))
        if not np.any(np.isfinite(sized.mem_gb)) and not np.any(sized.fits == 0):
            # Runs that fitted, and nothing else, only bound memory from above: good for this key,
            # no lesson for another.
            entry = replace(entry, informed={**entry.informed, **dict.fromkeys(MEMORY, 0.0)})
    return entry


def _growth(left: Floats, gpus: Floats) -> float:
    """How what a fit leaves grows (log) with each doubling of the GPUs (log2): the slope of its
    logarithm, as far as rows are sure of it, and never below 0."""
    count, reach = left.size, float(gpus.std())
    if count < FEWEST_TO_GROW or reach < LEAST_REACH:
        return 0.0
    size = np.log(np.abs(left) + TINY)
    slope = float(np.mean((gpus - gpus.mean()) * size)) / reach**2
    doubt = float(size.var()) / count / reach**2
    return max(0.0, slope * USUAL_GROWTH**2 / (USUAL_GROWTH**2 + doubt))


def _fit_part(
    entry: FittedStack,
    part: tuple[str, ...],
    misfit: Misfit,
    fixed: Mapping[str, float],
    *,
    scale: float,
    most: int,
) -> FittedStack:
    """Fit all coefficients of a part, keep free the `most` that the rows move furthest, fit again.

    Distance counts in prior spreads: a coefficient that ends at its prior costs nothing when
    it is fixed there.
    """
    open_names = tuple(name for name in part if name not in fixed)
    names = _exercised(entry.coefficients, open_names, misfit)
    coef, share, covariance = _solve(entry.coefficients, names, misfit, scale)
    moved = {
        name: abs(np.log(coef[name] / entry.coefficients[name])) / BY_NAME[name].spread
        for name in names
    }
    taught = [name for name in names if share[name] > 0.01]
    free = tuple(sorted(taught, key=lambda name: -moved[name])[:most])
    free = tuple(name for name in names if name in free)
    if len(free) < len(names) and free:
        coef, share, _ = _solve(entry.coefficients, free, misfit, scale)
    field = "free_time" if part == TIME else "free_memory"
    informed = {**entry.informed, **dict.fromkeys(part, 0.0), **share}
    informed |= dict.fromkeys(set(part) & set(fixed), 1.0)
    changed: dict[str, Any] = {field: free}
    if part == TIME:
        changed["spread"] = pushed(coef, *_all_of(open_names, names, covariance))
    return replace(entry, coefficients=coef, informed=informed, **changed)


def _exercised(start: dict[str, float], names: tuple[str, ...], misfit: Misfit) -> tuple[str, ...]:
    """Coefficients that change any residual: the others stay where they are, and cost no time."""
    moved = {name: np.full((len(names) + 1, 1), start[name]) for name in names}
    for i, name in enumerate(names):
        moved[name][i] *= 1.01
    rows = misfit({**start, **moved})
    changes = np.abs(rows[:-1] - rows[-1]).max(axis=1) > 1e-9
    return tuple(name for name, moves in zip(names, changes, strict=True) if moves)


def _all_of(
    part: tuple[str, ...], names: tuple[str, ...], covariance: Floats
) -> tuple[tuple[str, ...], Floats]:
    """Coefficients of a part and their covariance: what no row exercised is as open as before."""
    full = np.diag([(BY_NAME[name].spread * TIGHT) ** 2 for name in part])
    places = [part.index(name) for name in names]
    full[np.ix_(places, places)] = covariance
    return part, full


def _solve(
    start: dict[str, float], names: tuple[str, ...], misfit: Misfit, scale: float
) -> tuple[dict[str, float], dict[str, float], Floats]:
    """(coefficients, information share, covariance of their logs) with `names` free and the rest
    as they start."""
    asked = [BY_NAME[name] for name in names]
    spread = np.array([coefficient.spread * TIGHT for coefficient in asked])
    prior = Prior(
        mean=np.log([start[name] for name in names]),
        spread=spread,
        low=np.log([coefficient.low for coefficient in asked]),
        high=np.log([coefficient.high for coefficient in asked]),
    )

    def residuals(x: Floats) -> Floats:
        moved = {name: np.exp(x[:, i])[:, None] for i, name in enumerate(names)}
        return misfit({**start, **moved})

    found = minimise(residuals, prior, scale=scale)
    coef = {**start, **{n: float(v) for n, v in zip(names, np.exp(found.x), strict=True)}}
    share = np.clip(1.0 - np.diag(found.covariance) / spread**2, 0.0, 1.0)
    shares = {name: float(value) for name, value in zip(names, share, strict=True)}
    return coef, shares, found.covariance


def time_misfit(rows: Sample) -> Misfit:
    """Log residuals of the step time."""
    measured = np.log(rows.step_s)
    return lambda coef: np.log(estimate(rows.columns, coef).step_s) - measured


def printed_bytes(rows: Sample, first: Floats, worst: Floats) -> Floats:
    """What the stack prints as its memory: rank 0's or the fullest rank's."""
    rank0 = np.array(
        [stack_defaults(stack).reports_rank0 for stack in rows.stack.tolist()], dtype=bool
    )
    return np.where(rank0, first, worst)


def memory_misfit(rows: Sample) -> Misfit:
    """Log residuals of printed memory, and a hinge for runs that ran or did not fit."""
    has_mem, has_label = np.isfinite(rows.mem_gb), np.isfinite(rows.fits)
    measured = np.log(np.where(has_mem, rows.mem_gb, 1.0) * GIB)
    side = np.where(rows.fits > 0, 1.0, -1.0)
    # Each verdict counts half in total: tables have far more of one kind than of the other.
    ran = max(1.0, float(np.sum(rows.fits == 1)))
    oom = max(1.0, float(np.sum(rows.fits == 0)))
    weight = np.sqrt(np.where(rows.fits > 0, (ran + oom) / (2 * ran), (ran + oom) / (2 * oom)))

    def misfit(coef: dict[str, Floats | float]) -> Floats:
        got = memory(rows.columns, coef)
        printed = printed_bytes(rows, got.first_bytes, got.worst_bytes)
        size = np.where(has_mem, (np.log(printed) - measured) / MEMORY_SCALE, 0.0)
        over = np.log(got.worst_bytes / limit_bytes(rows.columns, coef)) * side / LABEL_SCALE
        hinge = np.where(has_label, weight * np.sqrt(2.0 * np.logaddexp(0.0, over)), 0.0)
        # A counted engine's memory has no coefficient that a fit moves, its limit has.
        return np.concatenate(np.broadcast_arrays(size, hinge), axis=-1)

    return misfit
