"""Rules shared by the types: each raises a UserError that names its field."""

from __future__ import annotations

from fourfold.errors import UserError
from fourfold.escape import one_line

_MOST_LETTERS = 200


def whole(least: int = 1, most: int = 2**40, /, **fields: int) -> None:
    for name, value in fields.items():
        if not least <= value <= most:
            raise UserError(f"must be from {least} to {most}", field=name, value=value)


def name(**fields: str) -> None:
    """Names stand in headings and sentences: one line that everybody can read."""
    for field, value in fields.items():
        if value != one_line(value):
            raise UserError("must be one line of printable text", field=field, value=value)
        if len(value) > _MOST_LETTERS:
            raise UserError(
                f"must have at most {_MOST_LETTERS} characters", field=field, value=value
            )


def positive(**fields: float) -> None:
    for name, value in fields.items():
        if not value > 0:
            raise UserError("must be above 0", field=name, value=value)
