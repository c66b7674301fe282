"""The 80% interval of predicted seconds, from three things that add as variances.

1. What rows leave open of the coefficients: their posterior, or, of a stack and cluster that nobody
   measured, how far measured ones lie from what the others say of them. Both are pushed through the
   model by a few dozen vectors of coefficients into moves of a step's parts (Spread), so that a run
   that waits for its network is as uncertain as networks are.
2. What no coefficient explains of a key's own rows (`noise`), growing with the number of GPUs where
   theirs does (`growth`).
3. What the form of the model may get wrong away from anything measured: it grows with the distance
   from the nearest measured value of each axis, in doublings.

The weights of the three are learned on held-out residuals of all kinds of folds (scripts/folds.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fourfold.cost.columns import Coefficients, Columns, Floats, columns
from fourfold.cost.step.estimate import LAYER_PARTS, PARTS, Times, estimate
from fourfold.cost.step.traffic import floor
from fourfold.spec.words import DTYPES, PRICED_ATTENTION

# [directions, parts]: each a move of the logs of all parts by one standard deviation, independent
# of the others; together their covariance. (): nothing is open.
Spread = tuple[tuple[float, ...], ...]
DIRECTIONS = 5  # the largest ones hold all but a few percent of the variance
Values = Mapping[str, tuple[float, ...]]  # measured values of each axis, log2, sorted
TWO_SIDED_80 = 1.2816  # 80% of a normal distribution lies within 1.28 sd
FURTHEST = 4.0  # doublings: further is as unknown
# Half widths (log) at 80%: weights of what is learned, of what is unknown, and of noise; then of a
# doubling away from measured values of an axis.
KNOWN, UNKNOWN, NOISE = 1.63, 2.81, 1.26
PER_DOUBLING = {
    "hidden": 0.02, "seq": 0.08, "gpus": 0.02, "tp": 0.075, "cp": 0.023, "pp": 0.02, "vpp": 0.02,
    "tokens": 0.08, "micros": 0.03, "low_precision": 0.03,
}  # fmt: skip


def axes(c: Columns) -> dict[str, Floats]:
    """What distances are taken in, as log2."""
    values = {
        "hidden": c.hidden,
        "seq": c.seq,
        "gpus": c.gpus,
        "tp": c.tp,
        "cp": c.cp,
        "pp": c.pp,
        "vpp": c.vpp,
        "tokens": c.micro * c.seq / c.cp,
        "micros": np.maximum(1.0, c.batch / (c.dp * c.micro)),
        "low_precision": c.peak_low / c.peak,
    }
    return {name: np.log2(value) for name, value in values.items()}


def measured_values(c: Columns) -> dict[str, tuple[float, ...]]:
    """Different values of each axis over these rows."""
    return {name: tuple(np.unique(value.round(3)).tolist()) for name, value in axes(c).items()}


def joined_values(many: list[Values]) -> dict[str, tuple[float, ...]]:
    """Of several keys together."""
    names = {name for values in many for name in values}
    return {
        name: tuple(sorted({v for values in many for v in values.get(name, ())}))
        for name in sorted(names)
    }


def distances(c: Columns, values: Values) -> dict[str, Floats]:
    """Doublings from each run to the nearest measured value of each axis; 0 where none is kept."""
    return {name: np.abs(away) for name, away in offsets(c, values).items()}


def offsets(c: Columns, values: Values) -> dict[str, Floats]:
    """The same, below zero where the run lies below that value."""
    found = {}
    for name, value in axes(c).items():
        known = np.array(values.get(name, ()))
        if not known.size:
            continue
        place = np.searchsorted(known, value)
        below, above = known[np.maximum(place - 1, 0)], known[np.minimum(place, known.size - 1)]
        away = np.where(np.abs(value - below) < np.abs(value - above), value - below, value - above)
        # Files keep three digits.
        found[name] = np.where(np.abs(away) < 1e-3, 0.0, np.clip(away, -FURTHEST, FURTHEST))
    return found


def from_coefficients(c: Columns, spread: Spread, times: Times) -> Floats:
    """Variance of the log of a step that the coefficients leave open."""
    if not spread:
        return np.zeros(len(c))
    shares = [times.parts[name] / times.step_s for name in PARTS]
    total = np.zeros(len(c))
    for move in spread:
        # Part by part: a matrix product adds in another order for one run than for many.
        moved = np.zeros(len(c))
        for share, by in zip(shares, move, strict=True):
            moved = moved + by * share
        total = total + moved**2
    return total


def noise_of(c: Columns, noise: float, growth: float, values: Values) -> Floats:
    """Of each run: `noise` in the middle of the measured numbers of GPUs."""
    return noise * np.exp(growth * from_middle(np.log2(c.gpus), values))


def from_middle(gpus: Floats, values: Values) -> Floats:
    """Doublings from the middle of the measured numbers of GPUs (log2)."""
    known = values.get("gpus", ())
    middle = sum(known) / len(known) if known else 0.0
    return np.clip(gpus - middle, -FURTHEST, FURTHEST) if known else np.zeros_like(gpus)


def from_distance(c: Columns, values: Values) -> Floats:
    """Variance (at 80%) of the log of a step away from what was measured."""
    total = np.zeros(len(c))
    for name, far in distances(c, values).items():
        total = total + (PER_DOUBLING[name] * far) ** 2
    return total


def from_host(spread: Spread, weight: float, times: Times) -> Floats:
    """How much longer (log) a step takes where the host is as slow as it may be: behind a device
    that is the slower one no share shows that."""
    if not spread:
        return np.zeros_like(times.step_s)
    host_sd = np.linalg.norm([move[PARTS.index("host")] for move in spread])
    slower = np.exp(TWO_SIDED_80 * weight * host_sd)
    layers = sum((times.parts[name] for name in LAYER_PARTS), np.zeros_like(times.step_s))
    layers = layers / times.step_s
    longer = floor(np.ones_like(layers), times.launch_ratio * slower)
    return np.log1p(layers * (longer / floor(np.ones_like(layers), times.launch_ratio) - 1.0))


def half_widths(
    c: Columns, times: Times, *, spread: Spread, noise: Floats, values: Values, is_known: bool
) -> tuple[Floats, Floats]:
    """What the 80% interval of the log of a step reaches below and above it."""
    weight = KNOWN if is_known else UNKNOWN
    own = weight**2 * from_coefficients(c, spread, times) + (NOISE * noise) ** 2
    below = TWO_SIDED_80**2 * own + from_distance(c, values)
    return np.sqrt(below), np.sqrt(below + from_host(spread, weight, times) ** 2)


def probes() -> Columns:
    """Runs that exercise every part of a step: what a coefficient does to each part is read off."""
    flash, fused = PRICED_ATTENTION.index("flash"), PRICED_ATTENTION.index("fused-softmax")
    bf16, fp8 = DTYPES.index("bf16"), DTYPES.index("fp8")
    return columns(
        8,
        layers=32, hidden=[4096, 8192, 4096, 4096, 1024, 8192, 4096, 4096], heads=32,
        ffn=[14336, 28672, 14336, 14336, 4096, 28672, 14336, 14336], vocab=50304,
        seq=[4096, 4096, 2048, 32768, 2048, 2048, 4096, 4096], micro=[2, 1, 2, 1, 1, 1, 1, 2],
        batch=[128, 64, 64, 16, 64, 128, 32, 32], gpus=[64, 512, 32, 32, 32, 64, 64, 16],
        tp=[1, 8, 2, 2, 4, 4, 16, 1], cp=[1, 1, 1, 4, 1, 1, 1, 1], pp=[1, 8, 4, 1, 2, 4, 2, 1],
        vpp=[1, 4, 1, 1, 1, 1, 1, 1], dp=[64, 8, 4, 4, 4, 4, 2, 16],
        zero=[3, 1, 0, 1, 1, 1, 1, 1], full_ckpt=[0, 0, 0, 0, 0, 1, 0, 0],
        attention=[flash, flash, fused, flash, flash, fused, flash, flash],
        precision=[bf16, bf16, bf16, bf16, bf16, bf16, bf16, fp8],
        peak=989.5e12, peak_low=[989.5e12] * 7 + [1979e12], clock=0.83, hbm=3.35e12, sms=132,
        link=450e9, node=8, net=400e9, capacity=80e9,
    )  # fmt: skip


def part_changes(start: Coefficients, moved: Coefficients) -> NDArray[np.float64]:
    """[questions, parts] log ratios of each part's seconds, mean over the probes that spend a
    percent or more there."""
    c = probes()
    before, after = estimate(c, start), estimate(c, moved)
    changes = []
    for name in PARTS:
        old, new = before.parts[name], after.parts[name]
        share = old / before.step_s
        used = (share > 0.01) & np.all(new > 0.0, axis=tuple(range(new.ndim - 1)))
        weight = np.where(used, share, 0.0)
        ratio = np.log(np.where(used, new, 1.0) / np.where(used, old, 1.0))
        changes.append((ratio * weight).sum(axis=-1) / max(float(weight.sum()), 1e-12))
    return np.stack(changes, axis=-1)


def pushed(coefficients: Mapping[str, float], names: tuple[str, ...], covariance: Floats) -> Spread:
    """The covariance of coefficients (their logs) as that of the parts of a step."""
    step = 0.05
    moved = {name: np.full((len(names), 1), coefficients[name]) for name in names}
    for i, name in enumerate(names):
        moved[name][i] *= np.exp(step)
    slopes = part_changes(coefficients, {**coefficients, **moved}) / step
    return directions(slopes.T @ covariance @ slopes)


def directions(covariance: Floats) -> Spread:
    """The largest independent moves of a covariance."""
    values, vectors = np.linalg.eigh(covariance)
    moves = (vectors * np.sqrt(np.maximum(values, 0.0))).T[::-1][:DIRECTIONS]
    # Which way along a line is arbitrary: the same on every machine.
    signs = np.sign(moves[np.arange(len(moves)), np.abs(moves).argmax(axis=1)])
    return tuple(
        tuple(float(f"{v:.3g}") for v in move) for move in (moves * signs[:, None]).round(5)
    )
