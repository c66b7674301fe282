"""What a training loses beside its steps: values with a spread and a source, from a data file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.errors import UserError, nearest
from fourfold.spec import catalog, check
from fourfold.units import bytes_per_s_from, number_from, seconds_from, share_from

NINTH = 1.2815515655446004  # standard normal: 9 of 10 lie below


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """`low` to `high`: 8 of 10 trainings; between them the logarithm is normal on each side."""

    value: float
    low: float
    high: float
    about: str = ""
    source: str = "as given"

    def __post_init__(self) -> None:
        ordered = 0.0 <= self.low <= self.value <= self.high < np.inf
        check.that(
            ordered, "value", self.value, f"must lie from low={self.low} to high={self.high}"
        )
        check.that(self.low > 0.0 or self.high == 0.0, "low", self.low, "must be above 0")

    def at(self, z: Floats) -> Floats:
        """The value where a standard normal variable is `z`."""
        if not self.value:
            return np.zeros_like(z)
        spread = np.where(z < 0.0, np.log(self.value / self.low), np.log(self.high / self.value))
        return self.value * np.exp(spread * z / NINTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The entries of data/calendar.toml, and hosts that are kept ready (None: as many as suffice
    99% of the time)."""

    failures_per_gpu_day: Assumption
    detect_s: Assumption
    restart_s: Assumption
    host_storage_bytes_per_s: Assumption
    gpu_copy_bytes_per_s: Assumption
    save_pause_s: Assumption
    replaced_share: Assumption
    repair_days: Assumption
    slow_hosts_per_host_day: Assumption
    slow_found_days: Assumption
    slow_stretch: Assumption
    evaluation_share: Assumption
    repeated_share: Assumption
    state_bytes_per_param: Assumption
    spare_hosts: int | None = None

    def changed(self, given: Mapping[str, Any]) -> Assumptions:
        """With other values: a number or a text is known exactly, a table has a spread."""
        made: dict[str, Any] = {}
        for name, value in given.items():
            if name == "spare_hosts":
                made[name] = _spares(value)
            elif name in NAMES:
                made[name] = _read(name, value, getattr(self, name).about)
            else:
                known = (*NAMES, "spare_hosts")
                raise UserError("unknown assumption", field=name, hint=nearest(name, known))
        return replace(self, **made)


NAMES = tuple(one.name for one in fields(Assumptions) if one.default is MISSING)


def defaults() -> Assumptions:
    table = catalog.data("calendar.toml")
    known: dict[str, Any] = {name: Assumption(**table[name]) for name in NAMES}
    return Assumptions(**known)


def _spares(value: Any) -> int:
    text = str(value).strip()
    check.that(text.isdecimal() and len(text) < 7, "spare_hosts", value, "must be a whole number")
    return int(text)


def _read(name: str, value: Any, about: str) -> Assumption:
    if isinstance(value, Mapping):
        given: dict[str, Any] = {
            key: _number(name, value[key]) for key in ("value", "low", "high") if key in value
        }
        check.that(
            len(given) == 3 and len(value) == 3, name, value, "must have value, low and high"
        )
        try:
            return Assumption(**given, about=about)
        except UserError as error:
            raise error.named(f"{name}.{error.field}") from None
    number = _number(name, value)
    return Assumption(value=number, low=number, high=number, about=about)


def _number(name: str, value: Any) -> float:
    """By the unit in the name: 10min, 2GB/s, 3%, 5e-4."""
    if isinstance(value, str):
        readers = {"_bytes_per_s": bytes_per_s_from, "_share": share_from, "_s": seconds_from}
        read = next((r for end, r in readers.items() if name.endswith(end)), number_from)
        try:
            value = read(value)
        except UserError as error:
            raise error.named(name) from None
    rule = "must be a number from 0"
    check.that(isinstance(value, int | float) and not isinstance(value, bool), name, value, rule)
    check.that(0.0 <= value < np.inf, name, value, rule)
    if name.endswith("_share"):
        check.that(value <= 1.0, name, value, "must be at most 1")
    if name.endswith("_bytes_per_s"):
        check.that(value > 0.0, name, value, "must be above 0")
    return float(value)
