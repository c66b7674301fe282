"""Rules shared by the types: each raises a UserError that names its field."""

from __future__ import annotations

from fourfold.errors import UserError


def whole(least: int = 1, most: int = 2**40, /, **fields: int) -> None:
    for name, value in fields.items():
        if not least <= value <= most:
            raise UserError(
                f"must be from {least} to {most}",
                field=name,
                value=value,
                way_out=f"{name} = {least}",
            )


def positive(**fields: float) -> None:
    for name, value in fields.items():
        if not value > 0:
            raise UserError("must be above 0", field=name, value=value)
