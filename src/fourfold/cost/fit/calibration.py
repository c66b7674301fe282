"""What measured rows taught: one entry of coefficients per (stack, cluster), with its evidence.

A file holds the entries, their residuals and their cross-validated errors; it holds no measured
value and no row. Errors are percent. A hardware profile makes one too (fit/machine.py).
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from math import exp, log, sqrt
from statistics import median
from typing import Any

import numpy as np

from fourfold import files
from fourfold.cost.fit.coefficients import BY_NAME, COEFFICIENTS, HOST, LEAN, defaults
from fourfold.cost.fit.nearby import NOT_LEARNED, Nearby
from fourfold.cost.fit.spread import Spread, directions, joined_values, part_changes
from fourfold.cost.stacks import family_of, year_of
from fourfold.cost.step.estimate import PARTS
from fourfold.errors import UserError, shorten
from fourfold.spec import check, codec

MARK = '"type": "Calibration"'  # in every file that to_json wrote
FEW_ROWS = 10.0  # with so many rows a key counts half
SLOPE_RIDGE = 1.0  # weight x years^2 that speak for no trend
# A coefficient further from its default is a slip, and overflows what uses it.
WIDEST_FACTOR = 1e6
GENERIC_NOISE = 0.15  # of a calibration without any rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStack:
    """Coefficients of one stack on one cluster.

    `informed` says for each coefficient how much the rows narrowed its prior (0 nothing, 1 all);
    `noise` is the spread of log(measured / predicted) that no coefficient explains, `growth` its
    rise (log) with each doubling of the GPUs; `spread` the covariance that the rows leave to the
    parts of a step; `values` what was measured of each axis (all four: fit/spread.py); `nearby`
    what the formulas miss near measured runs (fit/nearby.py);
    `residuals_pct` are sorted; `counts` are the rows behind each of `choices`.
    """

    stack: str
    cluster: str
    generation: str
    coefficients: dict[str, float]
    informed: dict[str, float]
    free_time: tuple[str, ...] = ()
    free_memory: tuple[str, ...] = ()
    rows_time: int = 0
    rows_memory: int = 0
    noise: float = GENERIC_NOISE
    growth: float = 0.0
    spread: Spread = ()
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)
    nearby: Nearby = NOT_LEARNED
    errors_pct: dict[str, float] = field(default_factory=dict)
    residuals_pct: tuple[float, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.stack}|{self.cluster}"

    def to_plain(self) -> dict[str, Any]:
        """As files have it: coefficients are `knobs` there."""
        plain = _rounded(asdict(self))
        names = {"coefficients": "knobs"}
        return {names.get(name, name): value for name, value in plain.items()}

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> FittedStack:
        """A coefficient that a file does not name takes its default."""
        if isinstance(data, dict):
            given = {name: value for name, value in data.items() if name != "knobs"}
            knobs = data.get("knobs")
            if not isinstance(knobs, dict):
                raise UserError("must be a table", field=f"{path}.knobs", value=knobs)
            data = given | {"coefficients": defaults() | knobs}
        entry = codec.decode_fields(cls, data, path)
        check.name(stack=entry.stack, cluster=entry.cluster, generation=entry.generation)
        for name, value in entry.coefficients.items():
            if name not in BY_NAME and name not in HOST:
                raise UserError("is not a coefficient", field="knobs", value=name)
            usual = BY_NAME[name].default if name in BY_NAME else 0.0
            _within(usual / WIDEST_FACTOR, (usual or 1.0) * WIDEST_FACTOR, **{name: value})
        _within(0.0, 10.0, noise=entry.noise)
        _within(0.0, 1.0, growth=entry.growth)
        _within(0.0, 1.0, **entry.informed)
        _within(0, 1e12, **entry.counts)
        _within(0, 1e12, rows_time=entry.rows_time, rows_memory=entry.rows_memory)
        _within(-1e9, 1e9, **entry.errors_pct)
        for number in (
            *entry.residuals_pct,
            *(value for known in (*entry.values.values(), *entry.spread) for value in known),
        ):
            _within(-1e9, 1e9, residual=number)
        _whole_moves(entry.spread)
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Entries by key, and between them the spread of a stack or cluster nobody measured."""

    name: str
    sources: tuple[str, ...]
    entries: tuple[FittedStack, ...]
    between: Spread = ()

    def __post_init__(self) -> None:
        check.name(name=self.name)
        _whole_moves(self.between)

    def entry(self, stack: str, cluster: str, generation: str) -> tuple[FittedStack, str]:
        """The entry of a key and a reason; an unknown key gets a blend of the nearest ones."""
        for known in self.entries:
            if known.stack == stack and known.cluster == cluster:
                return known, ""
        blended = blend(self.entries, stack=stack, cluster=cluster, generation=generation)
        known = [entry for entry in self.entries if entry.rows_time]
        wide = replace(
            blended,
            coefficients=_half_lean(blended.coefficients),
            spread=self.between,
            noise=median(entry.noise for entry in known) if known else GENERIC_NOISE,
            values=joined_values([entry.values for entry in known]),
        )
        return wide, "no measured runs of this stack here, estimated from other stacks and clusters"


def _half_lean(coefficients: dict[str, float]) -> dict[str, float]:
    """Memory of a stack nobody measured: halfway (log) between measured ones and one that wastes
    nothing. The blend alone says of half of all runs of other engines that they do not fit. What
    sequence parallelism gathers is gathered again in the backward pass; who keeps it, says so."""
    halfway = {name: sqrt(coefficients[name] * lean) for name, lean in LEAN.items()}
    return {**coefficients, **halfway, "room": LEAN["room"], "gathered": LEAN["gathered"]}


def similarity(entry: FittedStack, *, stack: str, cluster: str, generation: str) -> float:
    """How much one key says about another: same engine, same machine, same GPU, same years."""
    weight = 1.0 + 4.0 * (family_of(entry.stack) == family_of(stack) != "")
    weight += 8.0 * (entry.cluster == cluster != "")
    mine, other = year_of(entry.stack), year_of(stack)
    if mine is not None and other is not None:
        weight *= exp(-abs(mine - other) / 1.5)
    return weight * (1.0 if entry.generation == generation else 0.25)


def blend(
    entries: tuple[FittedStack, ...], *, stack: str, cluster: str, generation: str
) -> FittedStack:
    """Prior of a key from the others, each coefficient weighted by likeness and information.

    The physical default counts as one more, fully informed entry of the same year. Engines get
    better by the year, so each coefficient may have a small slope over the years.
    """
    kin = [
        (entry, similarity(entry, stack=stack, cluster=cluster, generation=generation))
        for entry in entries
        if (entry.stack, entry.cluster) != (stack, cluster)
    ]
    year = year_of(stack)
    coef = {}
    for coefficient in COEFFICIENTS:
        weights, ages, logs = [1.0], [0.0], [log(coefficient.default)]
        for entry, like in kin:
            other = year_of(entry.stack)
            weights.append(like * entry.informed.get(coefficient.name, 0.0))
            ages.append(float(other - year) if year and other else 0.0)
            logs.append(log(entry.coefficients[coefficient.name]))
        coef[coefficient.name] = exp(_level(weights, ages, logs))
    return FittedStack(
        stack=stack,
        cluster=cluster,
        generation=generation,
        coefficients=coef,
        informed=dict.fromkeys(coef, 0.0),
    )


def between(entries: tuple[FittedStack, ...]) -> Spread:
    """How far keys lie from what the others say of them, as a covariance of a step's parts. A key
    with few rows says little of where it lies."""
    total, weights = np.zeros((len(PARTS), len(PARTS))), 0.0
    for entry in entries:
        guess = blend(
            entries, stack=entry.stack, cluster=entry.cluster, generation=entry.generation
        )
        change = part_changes(guess.coefficients, entry.coefficients)
        weight = entry.rows_time / (entry.rows_time + FEW_ROWS)
        total, weights = total + weight * np.outer(change, change), weights + weight
    return directions(total / weights) if weights else ()


def _level(weights: list[float], ages: list[float], logs: list[float]) -> float:
    """Weighted mean of the logs at age 0, with a ridge-limited slope over age."""
    total = sum(weights)
    age = sum(w * a for w, a in zip(weights, ages, strict=True)) / total
    mean = sum(w * y for w, y in zip(weights, logs, strict=True)) / total
    rows = list(zip(weights, ages, logs, strict=True))
    both = sum(w * (a - age) * (y - mean) for w, a, y in rows)
    spread = sum(w * (a - age) ** 2 for w, a, _ in rows)
    return mean - age * both / (spread + SLOPE_RIDGE)


def to_json(calibration: Calibration) -> str:
    """The file's text."""
    return json.dumps(codec.dump(calibration), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    """Six digits: more would only make files differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(text: str, where: str) -> Calibration:
    """A calibration from a file's text; says what is wrong with it."""
    try:
        data = codec.parse_json(text)
        if not isinstance(data, dict) or data.get("type") != "Calibration":
            raise UserError("is not a calibration file")
        return codec.load(Calibration, data)
    except UserError as error:
        rule = f"cannot be used ({shorten(str(error), 200)})"
        hint = "create one with 'fourfold fit ROWS.csv --out FILE'"
        raise UserError(rule, field="calibration", value=where, hint=hint) from None


def _within(least: float, most: float, /, **values: float) -> None:
    for name, value in values.items():
        if not least <= value <= most:
            raise UserError(f"must be from {least:g} to {most:g}", field=name, value=value)


def _whole_moves(spread: Spread) -> None:
    """A number for each part of a step in every direction."""
    if any(len(move) != len(PARTS) for move in spread):
        raise UserError(f"must have rows of {len(PARTS)} numbers", field="spread")


def load(path: str) -> Calibration:
    return from_json(files.read_text(path, field="calibration"), path)


def shipped() -> Calibration:
    """The calibration that comes with the package."""
    return _of_package("shipped.json")


def own_entry(stack: str, device: str) -> FittedStack | None:
    """Our own engine as it was measured on one GPU of this type, if it was (results/README.md)."""
    known = _of_package("own.json").entries
    return next((e for e in known if (e.stack, e.cluster) == (stack, f"1 x {device}")), None)


@functools.cache
def _of_package(name: str) -> Calibration:
    file = resources.files("fourfold").joinpath("data", "calibrations", name)
    return from_json(file.read_text(encoding="utf-8"), name)
