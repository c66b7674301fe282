"""What did measured rows teach? One entry of coefficients per (stack, cluster), with its evidence.

A file holds the entries, their residuals and their cross-validated errors; it holds no measured
value and no row. Errors are percent, coefficients are as in `coefficients`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from math import exp, log
from typing import Any

from fourfold import files
from fourfold.cost.fit.coefficients import BY_NAME, COEFFICIENTS
from fourfold.cost.stacks import family_of, year_of
from fourfold.errors import UserError, shorten
from fourfold.spec import check, codec

SCHEMA = 1
MARK = '"type": "Calibration"'  # in every file that to_json wrote
SLOPE_RIDGE = 1.0  # weight x years^2 that speak for no trend
WIDEST_FACTOR = (
    1e6  # a coefficient further from its default than this is a slip, and overflows what uses it
)
GENERIC_HALF = 0.2  # 80% half width (log) of a calibration without any rows


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStack:
    """Coefficients of one stack on one cluster.

    `informed` says for each coefficient how much the rows narrowed its prior (0 nothing, 1 all);
    `low` and `high` are the 10% and 90% quantiles of log(measured / predicted), cross-validated;
    `ranges` are the calibrated ranges of the features in `interval`; `residuals_pct` are sorted;
    `counts` are the rows behind each of `choices`.
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
    low: float = -GENERIC_HALF
    high: float = GENERIC_HALF
    errors_pct: dict[str, float] = field(default_factory=dict)
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    residuals_pct: tuple[float, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.stack}|{self.cluster}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Entries by key, and the spread of a stack or cluster nobody measured."""

    name: str
    sources: tuple[str, ...]
    entries: tuple[FittedStack, ...]
    generic_low: float = -GENERIC_HALF
    generic_high: float = GENERIC_HALF

    def entry(self, stack: str, cluster: str, generation: str) -> tuple[FittedStack, str]:
        """The entry of a key and a reason; an unknown key gets a blend of the nearest ones."""
        for known in self.entries:
            if known.stack == stack and known.cluster == cluster:
                return known, ""
        blended = blend(self.entries, stack=stack, cluster=cluster, generation=generation)
        wide = replace(blended, low=self.generic_low, high=self.generic_high)
        return wide, "no measured runs of this stack here, estimated from other stacks and clusters"


def similarity(entry: FittedStack, *, stack: str, cluster: str, generation: str) -> float:
    """How much one key says about another: same engine, same machine, same GPU, same years."""
    weight = 1.0 + 4.0 * (family_of(entry.stack) == family_of(stack) != "")
    weight += 4.0 * (entry.cluster == cluster != "")
    mine, other = year_of(entry.stack), year_of(stack)
    if mine is not None and other is not None:
        weight *= exp(-abs(mine - other) / 1.5)
    return weight * (1.0 if entry.generation == generation else 0.5)


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
    data: dict[str, Any] = {"schema": SCHEMA, "type": "Calibration", **asdict(calibration)}
    data["entries"] = [_rounded(_with_key(entry)) for entry in data["entries"]]
    return json.dumps(data, indent=1, sort_keys=False) + "\n"


def _with_key(entry: dict[str, Any]) -> dict[str, Any]:
    """Files call coefficients `coefficients`."""
    return {"knobs" if name == "coefficients" else name: value for name, value in entry.items()}


def _rounded(value: Any) -> Any:
    """Six digits: more would only make files differ between machines."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def from_json(text: str, where: str) -> Calibration:
    """A calibration from a file's text; says what is wrong with it."""
    try:
        data = codec.parse_json(text)
        if not isinstance(data, dict) or data.get("type") != "Calibration":
            raise ValueError("not a calibration file")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')} (this version reads {SCHEMA})")
        low, high = _spread(data, "generic_low", "generic_high")
        return Calibration(
            name=_name(data, "name"),
            sources=tuple(_texts(data, "sources")),
            entries=tuple(_entry(item) for item in _items(data, "entries")),
            generic_low=low,
            generic_high=high,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"cannot be used ({shorten(said, 200)})",
            field="calibration",
            value=where,
            hint="create one with 'fourfold fit ROWS.csv --out FILE'",
        ) from None


def _entry(item: dict[str, Any]) -> FittedStack:
    coef = {coefficient.name: coefficient.default for coefficient in COEFFICIENTS}
    for name, value in item["knobs"].items():
        if name not in BY_NAME:
            raise ValueError(f"unknown coefficient {name}")
        usual = BY_NAME[name].default
        coef[name] = _number(
            value, f"coefficient {name}", usual / WIDEST_FACTOR, usual * WIDEST_FACTOR
        )
    low, high = _spread(item, "low", "high")
    ranges = {}
    for name, pair in item["ranges"].items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"range {name} must be two numbers")
        ranges[name] = (_number(pair[0], name, -1e9, 1e9), _number(pair[1], name, -1e9, 1e9))
    kept: dict[str, Any] = {
        "stack": _name(item, "stack"),
        "cluster": _name(item, "cluster"),
        "generation": _name(item, "generation"),
        "free_time": tuple(_texts(item, "free_time")),
        "free_memory": tuple(_texts(item, "free_memory")),
        "residuals_pct": tuple(_number(v, "residual", -1e9, 1e9) for v in item["residuals_pct"]),
        "coefficients": coef,
        "informed": _numbers(item, "informed", 0.0, 1.0),
        "errors_pct": _numbers(item, "errors_pct", -1e9, 1e9),
        "counts": {name: int(n) for name, n in _numbers(item, "counts", 0.0, 1e12).items()},
        "rows_time": int(_number(item["rows_time"], "rows_time", 0, 1e12)),
        "rows_memory": int(_number(item["rows_memory"], "rows_memory", 0, 1e12)),
        "low": low,
        "high": high,
        "ranges": ranges,
    }
    rest = {name: value for name, value in item.items() if name != "knobs"}
    return FittedStack(**{**rest, **kept})


def _number(value: object, name: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name}={shorten(value)} must be a number from {least:g} to {most:g}")
    return float(value)


def _numbers(item: dict[str, Any], name: str, least: float, most: float) -> dict[str, float]:
    return {key: _number(value, f"{name}.{key}", least, most) for key, value in item[name].items()}


def _spread(item: dict[str, Any], low: str, high: str) -> tuple[float, float]:
    """Two logs of a ratio, in order."""
    found = _number(item[low], low, -10.0, 10.0), _number(item[high], high, -10.0, 10.0)
    if found[0] > found[1]:
        raise ValueError(f"{low} must not be above {high}")
    return found


def _items(item: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(item[name], list):
        raise ValueError(f"{name} must be a list")
    return item[name]


def _texts(item: dict[str, Any], name: str) -> list[str]:
    if not all(isinstance(text, str) for text in _items(item, name)):
        raise ValueError(f"{name} must be a list of texts")
    return item[name]


def _name(item: dict[str, Any], name: str) -> str:
    if not isinstance(item[name], str):
        raise ValueError(f"{name} must be text")
    check.name(**{name: item[name]})
    return item[name]


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
