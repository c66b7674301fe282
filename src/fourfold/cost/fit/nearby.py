"""What the formulas miss near runs that were measured, and how much of it another run shares.

Runs alike are missed alike: a smooth surface through what a fit leaves of a key's rows, a Gaussian
process of a few points, which falls to nothing away from them. A run is unlike another by its
axes in doublings and by its choices. Whether neighbours tell anything differs between keys (aleph's
do not), so each key's own rows decide: every layout is predicted from the others, and as much of
the surface is kept as that would have helped. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats
from fourfold.cost.fit.spread import axes
from fourfold.cost.step.estimate import Times, estimate
from fourfold.errors import UserError
from fourfold.spec.layout import MODEL_AXES

REACH = 6.0  # doublings over which what is missed is shared by 1/e
TWO_CHOICES = 3.0  # runs of another precision, GPU, attention or network state are as far apart
SURFACE, OWN = 1.0, 0.6  # sd of what neighbours share, and do not, against what a fit leaves
MOST_POINTS, ROWS_PER_POINT = 128, 2
FEWEST_LAYOUTS = 4
USUAL_ROWS, USUAL_NOISE = 12.0, 0.05  # what a fit leaves of other keys, as so many rows
FREEDOM = 4.0  # of Student's t: a run that was disturbed moves the surface little
_FOLDS, _ROUNDS = 5, 4
_BLOCK = 128
# What makes two rows the same layout: others of their rows say nothing of a new one.
_LAYOUT = ("seq", "hidden", "layers", "head", "peak", *MODEL_AXES)
# The number of GPUs follows from the others.
NAMES = ("tokens", "seq", "hidden", "layers", "head", *MODEL_AXES, "dp", "vpp", "micros", "zero",
         "full_recompute", "selective_recompute", "attention", "precision", "peak",
         "slow")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearby:
    """`points`: coordinates on `axes`; `fixed`: the one coordinate of all of them on every other
    axis; `weights`: what each adds to the log of a step where a run lies on it; never more than
    from `low` to `high`, the range of the measured runs."""

    axes: tuple[str, ...] = ()
    fixed: dict[str, float] = field(default_factory=dict)
    points: tuple[tuple[float, ...], ...] = ()
    weights: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        if len(self.points) != len(self.weights):
            raise UserError("must have a weight for each point", field="nearby")
        if any(len(point) != len(self.axes) for point in self.points):
            raise UserError(f"must have points of {len(self.axes)} numbers", field="nearby")
        if unknown := [name for name in (*self.axes, *self.fixed) if name not in NAMES]:
            raise UserError("has an unknown axis", field="nearby", value=unknown[0])
        numbers = [self.low, self.high, *self.weights, *self.fixed.values()]
        numbers += [value for point in self.points for value in point]
        if not np.all(np.abs(numbers) < 1e6) or not -1.0 <= self.low <= 0.0 <= self.high <= 1.0:
            raise UserError("must hold ordinary numbers", field="nearby")

    @property
    def least_factor(self) -> float:
        """Of a step: no run is made faster than by this."""
        return float(np.exp(self.low))


NOT_LEARNED = Nearby()


def coordinates(c: Columns) -> dict[str, Floats]:
    """What tells runs apart: axes in doublings, choices as so many."""
    log_of = {"layers": c.layers, "head": c.hidden / c.heads, "dp": c.dp}
    choices = {
        "zero": np.where(c.zero >= 3, 3.0, np.where(c.zero > 0, 1.0, 0.0)),
        "full_recompute": 2.0 * c.full_ckpt,
        "selective_recompute": 2.0 * c.attn_ckpt,
        "attention": TWO_CHOICES * c.attention,
        "precision": TWO_CHOICES * c.precision,
        "peak": TWO_CHOICES * np.log2(c.peak),
        "slow": TWO_CHOICES * c.slow,
    }
    every = axes(c) | {name: np.log2(value) for name, value in log_of.items()} | choices
    return {name: every[name] for name in NAMES}


def times(c: Columns, coef: Coefficients, nearby: Nearby) -> Times:
    """The closed form with what its neighbours were missed by, in every part alike."""
    found = estimate(c, coef)
    if not nearby.points:
        return found
    factor = np.exp(missed(c, nearby))
    parts = {name: part * factor for name, part in found.parts.items()}
    return Times(found.step_s * factor, parts, found.launch_ratio)


def missed(c: Columns, nearby: Nearby) -> Floats:
    """Log of what a run near measured ones takes over what the formulas say."""
    if not nearby.points:
        return np.zeros(len(c))
    every = coordinates(c)
    away = sum(((every[name] - at) ** 2 for name, at in nearby.fixed.items()), np.zeros(1))
    places = np.broadcast_arrays(away, *(every[name] for name in nearby.axes))
    rows = np.stack([place.reshape(-1) for place in places], axis=1)
    # Rows of a table, and ways to run a layout, share most of what is asked here.
    _, first, back = np.unique(
        rows.view(f"V{rows.itemsize * rows.shape[1]}"), return_index=True, return_inverse=True
    )
    found = _at(rows[first].T, np.array(nearby.points).T, np.array(nearby.weights))
    found = np.clip(found, nearby.low, nearby.high)
    return found[back.reshape(-1)].reshape(places[0].shape)


def _at(rows: Floats, points: Floats, weights: Floats) -> Floats:
    """The surface at rows (squared distance along what is fixed, then coordinates), a few at a time
    so that their distances stay in the cache."""
    found = np.empty(rows.shape[1])
    for start in range(0, len(found), _BLOCK):
        some = rows[:, start : start + _BLOCK]
        each = np.tile(some[0], (len(weights), 1))
        for place, point in zip(some[1:], points, strict=True):
            away = place - point[:, None]
            away *= away
            each += away
        np.sqrt(each, out=each)
        each *= -1.0 / REACH
        np.exp(each, out=each)
        each *= weights[:, None]
        # One after the other: `sum` adds one run in another order than many.
        found[start : start + _BLOCK] = np.cumsum(each, axis=0, out=each)[-1]
    return found


def learned(c: Columns, left: Floats) -> tuple[Nearby, Floats]:
    """(surface, what it leaves of rows whose layout it was not shown) of the rows of a key: `left`
    is the log of measured over predicted."""
    every = coordinates(c)
    layout = _numbers(c.gpus, every)
    count = int(layout.max()) + 1
    if count < FEWEST_LAYOUTS:
        return NOT_LEARNED, left
    names = tuple(name for name, place in every.items() if np.ptp(place) > 0.01)
    places = np.stack([every[name] for name in names], axis=1)
    fold = (np.random.default_rng(0).permutation(count) % _FOLDS)[layout]
    from_others = np.zeros(len(left))
    for f in range(_FOLDS):
        out = fold == f
        if out.any() and not out.all():
            points, weights = _surface(places[~out], left[~out])
            from_others[out] = _alike(places[out], points) @ weights
    share = _share(from_others, left)
    if share <= 0.0:
        return NOT_LEARNED, left
    points, weights = _surface(places, left)
    points, weights = points.round(2), (share * weights).round(5)
    fitted = _alike(places, points) @ weights
    nearby = Nearby(
        axes=names,
        fixed={name: round(float(p[0]), 3) for name, p in every.items() if name not in names},
        points=tuple(tuple(point) for point in points.tolist()),
        weights=tuple(weights.tolist()),
        low=max(-1.0, min(0.0, round(float(fitted.min()), 5))),
        high=min(1.0, max(0.0, round(float(fitted.max()), 5))),
    )
    return nearby, left - share * from_others


def _numbers(gpus: Floats, every: dict[str, Floats]) -> NDArray[np.intp]:
    """A number for the layout of each row."""
    rows = np.stack([np.log2(gpus), *(every[name] for name in _LAYOUT)], axis=1).round(2)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _alike(places: Floats, points: Floats) -> Floats:
    """[rows, points]"""
    return np.exp(-np.sqrt(_squares(places, points)) / REACH)


def _squares(places: Floats, points: Floats) -> Floats:
    """[rows, points] squared distances."""
    own, other = (places**2).sum(axis=1), (points**2).sum(axis=1)
    return np.maximum(own[:, None] + other[None, :] - 2.0 * places @ points.T, 0.0)


def spread_of(left: Floats, free: int = 0) -> float:
    """Robust size of what a fit of so many free coefficients leaves, with a usual one as so many
    rows more: few rows cannot tell."""
    count = left.size
    used = count / max(count - free, count / 2.0)
    own = (1.4826 * float(np.median(np.abs(left)))) ** 2 * used
    return float(np.sqrt((count * own + USUAL_ROWS * USUAL_NOISE**2) / (count + USUAL_ROWS)))


def _surface(places: Floats, left: Floats) -> tuple[Floats, Floats]:
    """(points, weights): the most probable surface, disturbed rows at less weight."""
    size = spread_of(left)
    points = _centres(places, max(2, min(MOST_POINTS, len(left) // ROWS_PER_POINT)))
    near, prior = _alike(places, points), _alike(points, points) / (SURFACE * size) ** 2
    prior = prior + 1e-9 * np.eye(len(points))
    own = (OWN * size) ** 2
    doubt, weights = np.full(len(left), own), np.zeros(len(points))
    for _ in range(_ROUNDS):
        scaled = (near / doubt[:, None]).T
        weights = np.asarray(np.linalg.solve(scaled @ near + prior, scaled @ left), np.float64)
        doubt = own * (FREEDOM + (left - near @ weights) ** 2 / own) / (FREEDOM + 1.0)
    return points, weights


def _centres(places: Floats, count: int) -> Floats:
    """So many points among the rows (k-means, from rows far from each other)."""
    first = int(np.argmin(((places - places.mean(axis=0)) ** 2).sum(axis=1)))
    chosen, away = [first], ((places - places[first]) ** 2).sum(axis=1)
    while len(chosen) < count and away.max() > 1e-9:
        chosen.append(int(np.argmax(away)))
        away = np.minimum(away, ((places - places[chosen[-1]]) ** 2).sum(axis=1))
    points = places[chosen]
    for _ in range(10):
        nearest = _squares(places, points).argmin(axis=1)
        own = [nearest == k for k in range(len(points))]
        points = np.stack(
            [places[rows].mean(axis=0) if rows.any() else points[k] for k, rows in enumerate(own)]
        )
    return points


def _share(guess: Floats, left: Floats) -> float:
    """Of a guess about rows it was not shown: as much as explains most of them, 0 to 1."""
    usual = 1.4826 * float(np.median(np.abs(left))) + 0.005
    weight = 1.0 / (FREEDOM + (left / usual) ** 2)
    spent = float((weight * guess**2).sum())
    return float(np.clip((weight * guess * left).sum() / spent, 0.0, 1.0)) if spent > 0 else 0.0
