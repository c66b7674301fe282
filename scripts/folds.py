"""How good are predictions where a stranger asks? Every kind of fold, and the weights of intervals.

    OMP_NUM_THREADS=1 python scripts/folds.py FOLDER [KIND ...]

FOLDER holds the reference tables, which stay outside; KIND is one of cost/fit/folds.py, all by
default (about ten minutes of one core). Prints errors, coverage, width and interval score of each
kind, sources weighted equally; the weights of cost/fit/spread.py that the folds would choose; and
the coverage when each source is left out of choosing them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from famous import TABLES, famous_rows
from numpy.typing import NDArray

from fourfold.cost.fit import spread
from fourfold.cost.fit.calibration import Calibration
from fourfold.cost.fit.fit import fit_entries, sample
from fourfold.cost.fit.folds import KINDS
from fourfold.cost.fit.validate import only, strangers
from fourfold.cost.step.estimate import estimate
from fourfold.cost.step.traffic import floor
from fourfold.cost.table.predict import entries_of
from fourfold.cost.table.reference import read_table
from fourfold.cost.table.rows import Rows, parse

Floats = NDArray[np.float64]
# Axes whose weights are learned as one.
GROUPS = (("hidden",), ("seq", "tokens"), ("gpus",), ("micros",), ("tp",), ("pp", "vpp"), ("cp",),
          ("low_precision",))  # fmt: skip
NAMES = ("KNOWN", "UNKNOWN", "NOISE", *("/".join(group) for group in GROUPS))
# Share of rows, sources alike, that learned weights are widened to hold: rows of a source without a
# say in them are held less often.
AIM = 0.84
MANY_ROWS = 30  # from which a source's own share in the interval says something


@dataclass(frozen=True)
class Row:
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


def tables_of(folder: Path) -> list[Rows]:
    return [parse(read_table(folder / f"{name}.csv")) for name in TABLES] + [famous_rows(folder)[1]]


def left_out_rows(tables: list[Rows], kinds: list[str]) -> list[Row]:
    entries = fit_entries(sample(tables))
    found = []
    for kind in kinds:
        print(f"leaving out by {kind}", file=sys.stderr)
        for out, calibration in strangers(tables, entries, kind):
            for rows, gone in zip(tables, out, strict=True):
                timed = gone & np.isfinite(rows.step_s) & (rows.status != "oom")
                if timed.any():
                    found += _of_table(kind, only(rows, timed), calibration)
    return found


def _of_table(kind: str, rows: Rows, calibration: Calibration) -> list[Row]:
    found = []
    place = spread.PARTS.index("host")
    for index, entry, _ in entries_of(rows, calibration):
        c = rows.columns.take(index)
        times = estimate(c, entry.coefficients)
        open_var = spread.from_coefficients(c, entry.spread, times)
        far = spread.distances(c, entry.values)
        layers = sum(times.parts[name] for name in spread.LAYER_PARTS) / times.step_s
        host_sd = float(np.linalg.norm([move[place] for move in entry.spread]))
        source = [rows.table.column("source")[i] for i in index]
        mark = "famous: " if rows.table.name == "famous" else ""
        found += [
            Row(
                kind=kind,
                source=mark + source[j],
                error=float(np.log(rows.step_s[i] / times.step_s[j])),
                known=entry.rows_time > 0,
                open_var=float(open_var[j]),
                noise=entry.noise,
                far=tuple(float(far[a][j]) if a in far else 0.0 for a in spread.PER_DOUBLING),
                launch_ratio=float(times.launch_ratio[j]),
                layers=float(layers[j]),
                host_sd=host_sd,
            )
            for j, i in enumerate(index)
        ]
    return found


class Widths:
    """Intervals of many rows under any weights."""

    def __init__(self, rows: list[Row]) -> None:
        self.kind = np.array([row.kind for row in rows])
        self.source = np.array([row.source for row in rows])
        self.error = np.array([row.error for row in rows])
        self.known = np.array([row.known for row in rows])
        self.open_var = np.array([row.open_var for row in rows])
        self.noise = np.array([row.noise for row in rows])
        self.far = np.array([row.far for row in rows])
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

    def scores(self, weights: Floats) -> tuple[Floats, Floats, Floats]:
        """(inside, width, interval score) of each row."""
        below, above = self.ends(weights)
        outside = np.maximum(0.0, self.error - above) + np.maximum(0.0, -below - self.error)
        return outside == 0, below + above, below + above + 10.0 * outside

    def row_weights(self, use: NDArray[np.bool_]) -> Floats:
        """Kinds count the same, and in each kind sources do."""
        found = np.zeros(len(self.error))
        for kind in dict.fromkeys(self.kind[use].tolist()):
            here = use & (self.kind == kind)
            for source in set(self.source[here].tolist()):
                rows = here & (self.source == source)
                found[rows] = 1.0 / rows.sum()
            found[here] /= found[here].sum()
        return found / found.sum()

    def learned(self, use: NDArray[np.bool_]) -> Floats:
        """Weights with the smallest mean interval score, one coordinate at a time, all of them
        scaled until AIM of the rows lie inside."""
        share = self.row_weights(use)
        weights = np.array([0.5, 2.0, 1.3, 0.05, 0.05, 0.03, 0.03, 0.05, 0.03, 0.1, 0.05])
        least = np.array([0.05] * 3 + [0.01] * len(GROUPS))
        best, step = float((share * self.scores(weights)[2]).sum()), np.full(len(weights), 0.5)
        for _ in range(20):
            for i in range(len(weights)):
                for sign in (1.0, -1.0):
                    trial = weights.copy()
                    trial[i] = np.clip(trial[i] * np.exp(sign * step[i]), least[i], 4.0)
                    score = float((share * self.scores(trial)[2]).sum())
                    if score < best - 1e-7:
                        weights, best = trial, score
                        break
                else:
                    step[i] *= 0.6
        return weights * self._scale(weights, share)

    def _scale(self, weights: Floats, share: Floats) -> float:
        low, high = 0.7, 2.0
        for _ in range(12):
            middle = (low + high) / 2.0
            covers = float((share * self.scores(weights * middle)[0]).sum()) >= AIM
            low, high = (low, middle) if covers else (middle, high)
        return high

    def nested(self) -> NDArray[np.bool_]:
        """Rows inside their interval when their source had no say in its weights."""
        inside = np.zeros(len(self.error), dtype=bool)
        for source in sorted(set(self.source.tolist())):
            own = self.source == source
            inside[own] = self.scores(self.learned(~own))[0][own]
        return inside


def shipped_weights() -> Floats:
    per_doubling = [spread.PER_DOUBLING[group[0]] for group in GROUPS]
    return np.array([spread.KNOWN, spread.UNKNOWN, spread.NOISE, *per_doubling])


def report(widths: Widths) -> None:
    inside, width, score = widths.scores(shipped_weights())
    nested = widths.nested()
    off = np.abs(np.exp(-widths.error) - 1.0)
    print(
        "| left out | sources | rows | median % | p90 % | inside % | nested % "
        f"| nested, sources of {MANY_ROWS}+ rows | width % | score |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(widths.kind.tolist()):
        parts, many = [], []
        for source in sorted(set(widths.source[widths.kind == kind].tolist())):
            here = (widths.kind == kind) & (widths.source == source)
            parts.append(
                (np.median(off[here]), np.percentile(off[here], 90), inside[here].mean(),
                 nested[here].mean(), width[here].mean(), score[here].mean())
            )  # fmt: skip
            many += [nested[here].mean()] if here.sum() >= MANY_ROWS else []
        median, p90, covered, checked, wide, total = 100.0 * np.array(parts).mean(axis=0)
        rows = int((widths.kind == kind).sum())
        print(
            f"| {kind} | {len(parts)} | {rows} | {median:.1f} | {p90:.1f} | {covered:.0f} | "
            f"{checked:.0f} | {100 * min(many):.0f} to {100 * max(many):.0f} | {wide:.0f} | "
            f"{total:.0f} |"
        )
    weights = widths.learned(np.ones(len(widths.error), dtype=bool))
    print("\nweights these folds choose:")
    for name, value in zip(NAMES, weights, strict=True):
        print(f"  {name}: {value:.3f}")


def main() -> None:
    report(Widths(left_out_rows(tables_of(Path(sys.argv[1])), sys.argv[2:] or list(KINDS))))


if __name__ == "__main__":
    main()
