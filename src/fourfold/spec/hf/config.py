"""Typed look-ups in a Hugging Face config.json; a key that is absent, null, false or 0 asks for
nothing. Tables of model types, each with what it has of those that it is like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fourfold.errors import UserError
from fourfold.spec import check, texts
from fourfold.spec.codec import decode_value
from fourfold.spec.model import Variant


def tables(file: str, part: str) -> dict[str, dict[str, Any]]:
    """Of a data file, by type; names that begin with _ are only there to be like."""
    found: dict[str, dict[str, Any]] = {}
    for name, own in texts.data(file)[part].items():
        likes, table = own.get("like", ()), {}
        for like in [likes] if isinstance(likes, str) else likes:
            table = _joined(table, found[like])
        without = (*own.get("without", ()), "like", "without")
        table = {key: value for key, value in table.items() if key not in without}
        found[name] = _joined(table, {k: v for k, v in own.items() if k not in ("like", "without")})
    return {name: table for name, table in found.items() if not name.startswith("_")}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Of fields the second adds to the first; anything else it replaces."""
    both = [key for key in ("reads", "required", "fixed") if key in first and key in second]
    return first | second | {key: first[key] | second[key] for key in both}


@dataclass(frozen=True, slots=True)
class Config:
    """`keys` remembers which key of the file gave which of our fields, `used` which were looked at
    (with their path), `variants` what the file asks for that no field of a shape says."""

    data: dict[str, Any]
    where: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    variants: set[Variant] = field(default_factory=set)

    def find(self, *names: str) -> tuple[str, Any]:
        """The first spelling that is given; two spellings that disagree are refused."""
        self.used.update(self.path(name) for name in names)
        given = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        for name, value in given[1:]:
            if value != given[0][1]:
                rule, hint = f"contradicts {given[0][0]}", "keep one of them"
                raise UserError(rule, field=self.path(name), value=value, hint=hint)
        return given[0] if given else (names[0], None)

    def ignore(self, *names: str) -> None:
        """Fields of this type that change nothing here."""
        self.used.update(self.path(name) for name in names)

    def require(self, value: object, *names: str) -> None:
        """Fields of which only one value is modelled, where they are given."""
        for name in names:
            self.ignore(name)
            if self.data.get(name) is not None and self.data[name] != value:
                rule = f"is not modelled for this model type, only {value} is"
                raise UserError(rule, field=self.path(name), value=self.data[name])

    def path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def _given(self, ours: str, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """The path of the key that gives our field, and its value or the default."""
        name, value = self.find(*names)
        self.keys[ours] = self.path(name)
        if value is None and default is None:
            raise UserError("is missing", field=self.path(name), hint=f'add "{name}": ...')
        return self.path(name), default if value is None else value

    def whole(self, ours: str, *names: str, default: int | None = None) -> int:
        path, given = self._given(ours, names, default)
        value = decode_value(int, given, path)
        check.that(value >= 1, path, value, "must be from 1 to 2^63 - 1")
        return value

    def whole_or_0(self, ours: str, *names: str, default: int) -> int:
        """Null or 0 switches it off; where the file is silent, the default."""
        given = [self.data[name] for name in names if name in self.data] or [default]
        self.ignore(*names)
        return self.whole(ours, *names, default=default) if given[0] else 0

    def number(self, ours: str, *names: str, default: float | None = None) -> float:
        path, given = self._given(ours, names, default)
        return decode_value(float, given, path)

    def flag(self, *names: str, default: bool) -> bool:
        name, value = self.find(*names)
        return default if value is None else decode_value(bool, value, self.path(name))

    def table(self, name: str) -> Config:
        self.used.add(self.path(name))
        value = self.data.get(name)
        if value is not None and not isinstance(value, dict):
            raise UserError("must be an object", field=self.path(name), value=value)
        return Config(value or {}, self.path(name), used=self.used, variants=self.variants)

    def choice(self, default: str, allowed: tuple[str, ...], *names: str) -> str:
        name, value = self.find(*names)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            rule, hint = "is not modelled for this model type", f"modelled: {', '.join(allowed)}"
            raise UserError(rule, field=self.path(name), value=value, hint=hint)
        return value
