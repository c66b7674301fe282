"""Rules shared by the types: each raises a UserError that names its field."""

from __future__ import annotations

from typing import TypeVar

from fourfold.errors import UserError
from fourfold.escape import one_line

T = TypeVar("T")
_MOST_LETTERS = 200


def whole(least: int = 1, most: int = 2**40, /, **fields: int | None) -> None:
    """None is a field that nobody has given."""
    for name, value in fields.items():
        that(
            value is None or least <= value <= most, name, value, f"must be from {least} to {most}"
        )


def name(**fields: str) -> None:
    """Names stand in headings and sentences: one line that everybody can read."""
    for field, value in fields.items():
        that(value == one_line(value), field, value, "must be one line of printable text")
        rule = f"must have at most {_MOST_LETTERS} characters"
        that(len(value) <= _MOST_LETTERS, field, value, rule)


def that(holds: object, field: str, value: object, rule: str, hint: str = "") -> None:
    """Refuse a field's value unless its rule holds."""
    if not holds:
        raise UserError(rule, field=field, value=value, hint=hint)


def given(value: T | None, field: str, hint: str = "") -> T:
    """The value that a request must have; an empty one is none."""
    if not value:
        raise UserError("is required", field=field, hint=hint)
    return value


def positive(**fields: float | None) -> None:
    for name, value in fields.items():
        that(value is None or value > 0, name, value, "must be above 0")
