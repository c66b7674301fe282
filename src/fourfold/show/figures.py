"""What every picture needs: a name that says its form, matplotlib, and the file's content."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from fourfold.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def must_be_picture(path: str, field: str = "picture") -> str:
    """The suffix of a picture's name, before minutes are spent on what is drawn."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise UserError(
            "is not a supported picture format",
            field=field,
            value=path,
            hint=f"use a name that ends in one of {', '.join(SUFFIXES)}",
        )
    return suffix


def empty_figure(path: str, width: float, height: float, field: str = "picture") -> Figure:
    """In inches; its form is checked first."""
    must_be_picture(path, field)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "needs matplotlib", field=field, value=path, hint="pip install matplotlib"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def content(figure: Figure, path: str) -> bytes:
    """The drawn file's content; the suffix of `path` chooses the form."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=os.path.splitext(path)[1][1:].lower(), dpi=130)
    return buffer.getvalue()
