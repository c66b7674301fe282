"""What measured rows taught: one entry of coefficients per (stack, cluster), with its evidence.

A file holds what was fitted, what that leaves open and the range of the rows; it holds no measured
value and no row. What was not fitted is what the other entries say of it. Errors are percent. A
hardware profile makes one too (fit/machine.py).
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib import resources
from math import exp, sqrt
from typing import Any, Literal, get_args

import numpy as np

from fourfold import files
from fourfold.cost.columns import Floats
from fourfold.cost.fit.coefficients import (
    BY_NAME,
    HOST,
    KERNELS,
    LEAN,
    MEMORY,
    PLACES,
    TIME,
    defaults,
)
from fourfold.cost.fit.ranges import Ranges, joined_ranges
from fourfold.errors import UserError, shorten
from fourfold.spec import check, codec, texts
from fourfold.spec.engine import MeasuredAs, family_of

MARK = '"type": "Calibration"'  # in every file that to_json wrote
SLOPE_RIDGE = 1.0  # weight x years^2 that speak for no trend
# What an engine of another family says about one whose family is known.
STRANGE = 0.2
# What runs say that may be of any year, to some of a known one.
UNDATED = 0.4
# A coefficient further from its default is a slip, and overflows what uses it.
WIDEST_FACTOR = 1e6
# What no coefficient explains (log) of a stack that nobody measured here: its engine was measured
# elsewhere; or neither; of runs with experts so much more. Set on folds (docs/accuracy.md).
ELSEWHERE, NOWHERE, ROUTED = 0.08, 0.11, 1.8
# Least half of an interval (log) of an engine without any row: folds lack what such runs have
# (power limits, releases, networks that nobody states).
STRANGER, ROUTED_STRANGER = 0.30, 0.45
# What a prediction rests on: runs of this stack on this machine; on one like it, or of other sizes;
# of this engine elsewhere, or of others on this generation of GPU; formulas and data sheets.
Provenance = Literal["measured", "near", "blended", "physics"]
MEASURED = ("measured", "near")  # of these, those that rest on runs of the engine itself
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStack:
    """Coefficients of one stack on one cluster.

    `informed` says of each coefficient that was fitted how much the rows narrowed its prior (0
    nothing, 1 all); `noise` is the spread of log(measured / predicted) that no coefficient
    explains, or, without rows, of what is unknown; `width` what its intervals are times those of a
    stack that is like most; `ranges` what was measured of each axis (log2);
    `counts` the rows behind each choice (fit/interval.py); `basis` what all of it rests on.
    """

    measured_as: MeasuredAs
    cluster: str
    generation: str
    coefficients: dict[str, float]
    informed: dict[str, float] = field(default_factory=dict)
    rows_time: int = 0
    rows_memory: int = 0
    noise: float = NOWHERE
    width: float = 1.0
    ranges: Ranges = field(default_factory=dict)
    errors_pct: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    basis: Provenance = "measured"
    least_half: float = 0.0  # of its intervals (log), however little is open

    @property
    def stack(self) -> str:
        """The engine's full name."""
        return self.measured_as.text

    @property
    def key(self) -> str:
        return f"{self.stack}|{self.cluster}"

    @property
    def free_time(self) -> tuple[str, ...]:
        return tuple(name for name in TIME if name in self.informed)

    @property
    def free_memory(self) -> tuple[str, ...]:
        return tuple(name for name in MEMORY if name in self.informed)

    def to_plain(self) -> dict[str, Any]:
        """As files have it: coefficients are `knobs` there, and what is empty is left out."""
        plain = _rounded(asdict(self))
        plain = {**plain.pop("measured_as"), **plain}
        plain["knobs"] = plain.pop("coefficients")
        del plain["basis"], plain["least_half"]  # of a file's entries they are always the same
        return {name: value for name, value in plain.items() if value not in ({}, 0, "")}

    @classmethod
    def from_plain(cls, data: object, path: str = "") -> FittedStack:
        if isinstance(data, dict):
            given = {name: value for name, value in data.items() if name != "knobs"}
            fields_of_engine = ("engine", "date", "compiled", "experts")
            who = {name: given.pop(name) for name in fields_of_engine if name in given}
            knobs = data.get("knobs", {})
            if not isinstance(knobs, dict):
                raise UserError("must be a table", field=f"{path}.knobs", value=knobs)
            data = given | {"coefficients": knobs, "measured_as": who}
        entry = codec.decode_fields(cls, data, path)
        engine = entry.measured_as
        check.name(engine=engine.engine, cluster=entry.cluster, generation=entry.generation)
        check.name(date=engine.date or "none")
        for name, value in entry.coefficients.items():
            if name not in BY_NAME and name not in HOST:
                raise UserError("is not a coefficient", field="knobs", value=name)
            usual = BY_NAME[name].default if name in BY_NAME else 0.0
            _within(usual / WIDEST_FACTOR, (usual or 1.0) * WIDEST_FACTOR, **{name: value})
        if unknown := [name for name in entry.informed if name not in entry.coefficients]:
            raise UserError("has no value in knobs", field="informed", value=unknown[0])
        _within(0.0, 10.0, noise=entry.noise, width=entry.width)
        _within(0.0, 1.0, **entry.informed)
        _within(0, 1e12, **entry.counts)
        _within(0, 1e12, rows_time=entry.rows_time, rows_memory=entry.rows_memory)
        _within(-1e9, 1e9, **entry.errors_pct)
        for low, high in entry.ranges.values():
            _within(-1e9, 1e9, low=low, high=high)
        return entry


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Entries by key. Those of runs with experts learn from all and teach no others.

    `runs`: those that taught it and ended, as a table in the reference schema, where they are few
    enough to be somebody's own: a plan knows that they fit."""

    name: str
    sources: tuple[str, ...]
    entries: tuple[FittedStack, ...]
    runs: str = ""

    def __post_init__(self) -> None:
        check.name(name=self.name)

    @cached_property
    def by_engine(self) -> dict[MeasuredAs, dict[str, FittedStack]]:
        """Entries by what they were measured as, then by cluster."""
        entries: dict[MeasuredAs, dict[str, FittedStack]] = {}
        for entry in self.entries:
            entries.setdefault(entry.measured_as, {}).setdefault(entry.cluster, entry)
        return entries

    @cached_property
    def engines(self) -> dict[str, MeasuredAs]:
        """Engines that were measured, with experts or without, by their full names."""
        return {runs.stack: replace(runs, experts=False) for runs in self.by_engine}

    @cached_property
    def short_engines(self) -> frozenset[str]:
        """The same names without a year and what follows it."""
        return frozenset(
            name if runs.year is None else runs.engine for name, runs in self.engines.items()
        )

    @cached_property
    def dense(self) -> tuple[FittedStack, ...]:
        """Entries that runs of models without experts taught."""
        return tuple(entry for entry in self.entries if not entry.measured_as.experts)

    @cached_property
    def routed(self) -> tuple[FittedStack, ...]:
        """Entries that runs of models with experts taught."""
        return tuple(entry for entry in self.entries if entry.measured_as.experts)

    @cached_property
    def clusters(self) -> frozenset[str]:
        """Clusters on which models without experts were measured."""
        return frozenset(entry.cluster for entry in self.dense)

    def entry(
        self, measured_as: MeasuredAs, cluster: str, generation: str
    ) -> tuple[FittedStack, str]:
        """The entry of a key and a reason; an unknown key gets a blend of the nearest ones."""
        own = self.by_engine.get(measured_as, {}).get(cluster)
        if own is not None:
            return own, ""
        blended = blend(self.entries, measured_as, cluster=cluster, generation=generation)
        like = self.routed if measured_as.experts else self.dense
        kin = [entry for entry in like if entry.rows_time]
        elsewhere = [e for e in kin if e.measured_as.engine == measured_as.engine != ""]
        alike = any(e.generation == generation for e in kin)
        wide = replace(
            blended,
            basis="blended" if elsewhere or alike else "physics",
            coefficients=_half_lean(blended.coefficients),
            noise=(ELSEWHERE if elsewhere else NOWHERE) * (ROUTED if measured_as.experts else 1.0),
            ranges=joined_ranges([entry.ranges for entry in kin]),
            least_half=0.0 if elsewhere else STRANGER,
        )
        if measured_as.experts and not elsewhere:
            wide = replace(wide, least_half=ROUTED_STRANGER)
        return wide, "no measured runs of this stack here, estimated from other stacks and clusters"


def _half_lean(coefficients: dict[str, float]) -> dict[str, float]:
    """Memory of a stack nobody measured: halfway (log) between measured ones and one that wastes
    nothing. The blend alone says of half of all runs of other engines that they do not fit. What
    sequence parallelism gathers is gathered again in the backward pass; who keeps it, says so."""
    halfway = {name: sqrt(coefficients[name] * lean) for name, lean in LEAN.items()}
    return {**coefficients, **halfway, "room": LEAN["room"], "gathered": LEAN["gathered"]}


def similarity(
    entry: FittedStack, measured_as: MeasuredAs, *, cluster: str, generation: str
) -> tuple[float, float]:
    """Return how much one key says about another's seconds and about its memory: same engine,
    engines of its family (of seconds), same machine, same GPU, same years."""
    family, theirs, year = family_of(measured_as), entry.measured_as.year, measured_as.year
    shared = 4.0 * (entry.measured_as.engine == measured_as.engine != "")
    shared += 8.0 * (entry.cluster == cluster != "")
    kin = 4.0 * (family == family_of(entry.measured_as) != "")
    seconds, memory = (STRANGE if family else 1.0) + kin + shared, 1.0 + shared
    scale = 1.0 if entry.generation == generation else 0.25
    if theirs is not None and year is not None:
        scale *= exp(-abs(theirs - year) / 1.5)
    elif year is not None:
        seconds *= UNDATED
    return scale * seconds, scale * memory


def blend(
    entries: tuple[FittedStack, ...],
    measured_as: MeasuredAs,
    *,
    cluster: str,
    generation: str,
) -> FittedStack:
    """Prior of a key from the others, each coefficient weighted by likeness and information.

    The physical default counts as one more, fully informed entry of the same year. Engines get
    better by the year, so each coefficient may have a small slope over the years. Rates of kernels
    are facts of the device, what a stack makes of them is its own; what one place shows is said by
    its entries alone.
    """
    key = (measured_as, cluster)
    kin = [entry for entry in entries if (entry.measured_as, entry.cluster) != key]
    if not measured_as.experts:  # what they teach beside experts is blurred by these
        kin = [entry for entry in kin if not entry.measured_as.experts]
    like = [similarity(e, measured_as, cluster=cluster, generation=generation) for e in kin]
    year, years = measured_as.year, [entry.measured_as.year for entry in kin]
    ages = np.array([0.0, *(float(other - year) if year and other else 0.0 for other in years)])
    usual = defaults()
    weights, values = np.ones((2, len(kin) + 1, len(usual)))
    values[0] = list(usual.values())
    for i, (entry, weight) in enumerate(zip(kin, like, strict=True), start=1):
        elsewhere = () if entry.cluster == cluster else PLACES
        weights[i] = [
            0.0
            if name in KERNELS or name in elsewhere
            else weight[name in MEMORY] * entry.informed.get(name, 0.0)
            for name in usual
        ]
        values[i] = [entry.coefficients.get(name, value) for name, value in usual.items()]
    level = np.exp(_level(weights, ages[:, None], np.log(values))).tolist()
    coef = dict(zip(usual, level, strict=True))
    return FittedStack(
        measured_as=measured_as,
        cluster=cluster,
        generation=generation,
        coefficients=coef | states().get(cluster, {}),
    )


@functools.cache
def states() -> dict[str, dict[str, float]]:
    """What only one cluster shows, by its name."""
    file = resources.files("fourfold").joinpath("data", "calibrations", "states.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _level(weights: Floats, ages: Floats, logs: Floats) -> Floats:
    """Weighted means of the logs at age 0, with a ridge-limited slope over age; by column."""
    total = weights.sum(axis=0)
    age, mean = (weights * ages).sum(axis=0) / total, (weights * logs).sum(axis=0) / total
    both = (weights * (ages - age) * (logs - mean)).sum(axis=0)
    return mean - age * both / ((weights * (ages - age) ** 2).sum(axis=0) + SLOPE_RIDGE)


def completed(entries: tuple[FittedStack, ...]) -> tuple[FittedStack, ...]:
    """With what was not fitted as the other entries have it."""
    return tuple(
        replace(entry, coefficients=_of_others(entry, entries) | entry.coefficients)
        for entry in entries
    )


def _of_others(entry: FittedStack, entries: tuple[FittedStack, ...]) -> dict[str, float]:
    where = {"cluster": entry.cluster, "generation": entry.generation}
    return blend(entries, entry.measured_as, **where).coefficients


def settled(entries: tuple[FittedStack, ...]) -> tuple[FittedStack, ...]:
    """As a file will have them: what was not fitted follows the other entries."""
    fitted = (
        replace(e, coefficients={name: e.coefficients[name] for name in e.informed})
        for e in entries
    )
    return completed(tuple(fitted))


def to_json(calibration: Calibration, of: Callable[[MeasuredAs], bool] = bool) -> str:
    """The file's text, `of` some; of coefficients what the other entries do not say."""
    entries = []
    for entry in (one for one in calibration.entries if of(one.measured_as)):
        usual = _of_others(entry, calibration.entries)
        own = {
            name: value
            for name, value in entry.coefficients.items()
            if name in entry.informed or abs(value - usual.get(name, 0.0)) > 1e-5 * abs(value)
        }
        entries.append(replace(entry, coefficients=own))
    return json.dumps(codec.dump(replace(calibration, entries=tuple(entries))), indent=1) + "\n"


def _rounded(value: Any) -> Any:
    """Five digits: more would only make files differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(text: str, where: str) -> Calibration:
    """A calibration from a file's text; says what is wrong with it."""
    try:
        data = texts.parse_json(text)
        if not isinstance(data, dict) or data.get("type") != "Calibration":
            raise UserError("is not a calibration file")
        found = codec.load(Calibration, data)
        return replace(found, entries=completed(found.entries))
    except UserError as error:
        rule = f"cannot be used ({shorten(str(error), 200)})"
        hint = "create one with 'fourfold fit ROWS.csv --out FILE'"
        raise UserError(rule, field="calibration", value=where, hint=hint) from None


def _within(least: float, most: float, /, **values: float) -> None:
    for name, value in values.items():
        if not least <= value <= most:
            raise UserError(f"must be from {least:g} to {most:g}", field=name, value=value)


def load(path: str) -> Calibration:
    return from_json(files.read_text(path, field="calibration"), path)


@functools.cache
def shipped() -> Calibration:
    """The calibration that comes with the package."""
    known = _read("shipped.json")
    return replace(known, entries=completed((*known.entries, *_read("experts.json").entries)))


@functools.cache
def gpu_entry(measured_as: MeasuredAs, device: str) -> FittedStack | None:
    """Our own engine as it was measured on one GPU of this type, if it was (results/README.md)."""
    known = completed(_read("own.json").entries)
    key = (measured_as, f"1 x {device}")
    return next((entry for entry in known if (entry.measured_as, entry.cluster) == key), None)


@functools.cache
def _read(name: str) -> Calibration:
    file = resources.files("fourfold").joinpath("data", "calibrations", name)
    return codec.load(Calibration, texts.parse_json(file.read_text(encoding="utf-8")))
