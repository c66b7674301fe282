"""Intervals of left-out rows under any weights: which weights their errors choose, and how often an
interval holds a row whose source had no say in its width."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Floats
from fourfold.cost.fit import nearby, spread
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.step.traffic import floor
from fourfold.cost.table.predict import entries_of
from fourfold.cost.table.rows import Rows
from fourfold.spec.layout import MODEL_AXES

Bools = NDArray[np.bool_]
# Axes whose weights are learned as one.
GROUPS = (("hidden",), ("seq", "tokens"), ("gpus",), ("micros",), ("tp",), ("pp", "vpp"), ("cp",),
          ("low_precision",))  # fmt: skip
NAMES = ("KNOWN", "UNKNOWN", "NOISE", *("/".join(group) for group in GROUPS))
# Share of rows, sources alike, that learned weights are widened to hold: rows of a source without a
# say in them are held less often.
AIM = 0.84
MANY_ROWS = 30  # from which a source's own share in the interval says something
_START = np.array([1.2, 2.7, 1.3, 0.02, 0.06, 0.02, 0.03, 0.05, 0.02, 0.1, 0.02])
_LEAST = np.array([0.05] * 3 + [0.02] * len(GROUPS))
_MOST, _ROUNDS, _HALVINGS = 4.0, 20, 12
# Share of rows at a new value of tp, cp or pp that the weight of that axis is set to hold, and how
# far for it: one scale for all held 74% of them at a new tp and 89% at a new cp.
AXIS_AIM, _AXIS_MOST = 0.83, 4.0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """One left-out row: its error, and what its interval is made of."""

    kind: str
    source: str
    error: float  # log of measured over predicted
    known: bool
    open_var: float
    noise: float
    far: tuple[float, ...]  # doublings, by spread.PER_DOUBLING
    launch_ratio: float
    layers: float
    host_sd: float


def left_out_rows(kind: str, rows: Rows, gone: Bools, known: Calibration) -> list[LeftOut]:
    """Rows of a table in `gone` that have a measured time; the calibration is without them."""
    timed = gone & rows.usable & np.isfinite(rows.step_s) & (rows.status != "oom")
    source, found = rows.table.column("source"), []
    place = spread.PARTS.index("host")
    for index, entry, _ in entries_of(replace(rows, usable=timed), known):
        c = rows.columns.take(index)
        times = nearby.times(c, entry.coefficients, entry.nearby)
        open_var = spread.from_coefficients(c, entry.spread, times)
        far = spread.distances(c, entry.values)
        noise = spread.noise_of(c, entry.noise, entry.growth, entry.values)
        layers = sum(times.parts[name] for name in spread.LAYER_PARTS) / times.step_s
        host_sd = float(np.linalg.norm([move[place] for move in entry.spread]))
        found += [
            LeftOut(
                kind=kind,
                source=source[i],
                error=float(np.log(rows.step_s[i] / times.step_s[j])),
                known=entry.rows_time > 0,
                open_var=float(open_var[j]),
                noise=float(noise[j]),
                far=tuple(float(far[a][j]) if a in far else 0.0 for a in spread.PER_DOUBLING),
                launch_ratio=float(times.launch_ratio[j]),
                layers=float(layers[j]),
                host_sd=host_sd,
            )
            for j, i in enumerate(index)
        ]
    return found


def shipped_weights() -> Floats:
    per_doubling = [spread.PER_DOUBLING[group[0]] for group in GROUPS]
    return np.array([spread.KNOWN, spread.UNKNOWN, spread.NOISE, *per_doubling])


class Widths:
    """Of many rows, as columns."""

    def __init__(self, rows: list[LeftOut]) -> None:
        self.rows = rows
        self.kind, self.source, self.error, self.known, self.open_var, self.noise, self.far = (
            np.array([getattr(row, name) for row in rows])
            for name in ("kind", "source", "error", "known", "open_var", "noise", "far")
        )
        self.ratio, self.layers, self.host_sd = (
            np.array([getattr(row, name) for row in rows])
            for name in ("launch_ratio", "layers", "host_sd")
        )

    def ends(self, weights: Floats) -> tuple[Floats, Floats]:
        """(below, above) the prediction, logs; the same sums as cost/fit/spread.py."""
        each = np.zeros(self.far.shape[1])
        for group, weight in zip(GROUPS, weights[3:], strict=True):
            for name in group:
                each[list(spread.PER_DOUBLING).index(name)] = weight
        weight = np.where(self.known, weights[0], weights[1])
        own = weight**2 * self.open_var + (weights[2] * self.noise) ** 2
        below = spread.TWO_SIDED_80**2 * own + ((self.far * each) ** 2).sum(axis=1)
        slower = np.exp(spread.TWO_SIDED_80 * weight * self.host_sd)
        one = np.ones_like(self.ratio)
        longer = floor(one, self.ratio * slower) / floor(one, self.ratio) - 1.0
        host = np.log1p(self.layers * longer)
        return np.sqrt(below), np.sqrt(below + host**2)

    def scores(self, weights: Floats) -> tuple[Bools, Floats, Floats]:
        """(inside, width, interval score) of each row."""
        below, above = self.ends(weights)
        outside = np.maximum(0.0, self.error - above) + np.maximum(0.0, -below - self.error)
        return outside == 0, below + above, below + above + 10.0 * outside

    def row_weights(self) -> Floats:
        """Kinds of folds count the same, and in each kind sources do."""
        found = np.zeros(len(self.error))
        for kind in dict.fromkeys(self.kind.tolist()):
            here = self.kind == kind
            for source in set(self.source[here].tolist()):
                rows = here & (self.source == source)
                found[rows] = 1.0 / rows.sum()
            found[here] /= found[here].sum()
        return found / found.sum()

    def learned(self, start: Floats = _START) -> Floats:
        """Weights with the smallest mean interval score, one coordinate at a time, all of them
        scaled until AIM of the rows lie inside; those of a layout's axes by their own folds."""
        share, weights = self.row_weights(), start.copy()
        best, step = float((share * self.scores(weights)[2]).sum()), np.full(len(weights), 0.5)
        for _ in range(_ROUNDS):
            for i in range(len(weights)):
                for sign in (1.0, -1.0):
                    trial = weights.copy()
                    trial[i] = np.clip(trial[i] * np.exp(sign * step[i]), _LEAST[i], _MOST)
                    score = float((share * self.scores(trial)[2]).sum())
                    if score < best - 1e-7:
                        weights, best = trial, score
                        break
                else:
                    step[i] *= 0.6
        weights = weights * self._scale(weights, share)
        for axis in MODEL_AXES:
            here = self.kind == axis
            if here.any():
                weights = self._held(weights, axis, np.where(here, share / share[here].sum(), 0.0))
        return weights

    def _held(self, weights: Floats, axis: str, share: Floats) -> Floats:
        """With the weight of one axis as small as holds AXIS_AIM of the rows that leave it out."""
        place = 3 + next(i for i, group in enumerate(GROUPS) if axis in group)
        low, high = weights[place] / _AXIS_MOST, weights[place] * _AXIS_MOST
        found = weights.copy()
        for _ in range(_HALVINGS):
            found[place] = max(_LEAST[place], float(np.sqrt(low * high)))
            covers = float((share * self.scores(found)[0]).sum()) >= AXIS_AIM
            low, high = (low, found[place]) if covers else (found[place], high)
        found[place] = max(_LEAST[place], high)
        return found

    def _scale(self, weights: Floats, share: Floats) -> float:
        low, high = 0.7, 2.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            covers = float((share * self.scores(weights * middle)[0]).sum()) >= AIM
            low, high = (low, middle) if covers else (middle, high)
        return high

    def nested(self) -> Floats:
        """1 for rows inside their interval when their source had no say in its weights, 0 for those
        outside; NaN where there is one source only, which nothing else could set weights for."""
        inside, everyone = np.full(len(self.error), np.nan), self.learned()
        for source in sorted(set(self.source.tolist())):
            others = Widths([row for row in self.rows if row.source != source])
            if others.rows:
                own = self.source == source
                inside[own] = self.scores(others.learned(everyone))[0][own]
        return inside
