"""What does memory look like over the steps of a trace? A picture: live, step peak, peak so far."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.cost.trace.steps import Program
from fourfold.cost.trace.walk import StepRow
from fourfold.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")


def picture(program: Program, rows: Sequence[StepRow], path: str) -> bytes:
    """The drawn file's content; the suffix of `path` chooses the form."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise UserError(
            "is not a supported picture format",
            field="picture",
            value=path,
            hint=f"use a name that ends in one of {', '.join(SUFFIXES)}",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "needs matplotlib", field="picture", value=path, hint="pip install matplotlib"
        ) from None
    height = max(2.5, 0.32 * len(rows) + 1.6)
    figure = Figure(figsize=(9.0, height), layout="constrained")
    _draw(figure.subplots(), program, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], dpi=130)
    return buffer.getvalue()


def _draw(axes: Axes, program: Program, rows: Sequence[StepRow]) -> None:
    """Steps run downwards so that their names can be read."""
    places = list(range(len(rows)))
    live = [row.live_bytes / 1e9 for row in rows]
    tops = [row.step_peak_bytes / 1e9 for row in rows]
    axes.barh(places, tops, color="#f2b880", label="within the step")
    axes.barh(places, live, color="#3b6ea5", label="held after it")
    peaks = [row.peak_bytes / 1e9 for row in rows]
    edges = [place - 0.5 for place in (*places, len(rows))]
    axes.stairs(
        peaks,
        edges,
        orientation="horizontal",
        baseline=None,
        color="#b03a2e",
        linewidth=1.2,
        label="peak so far",
    )
    axes.set_yticks(places, [f"{number} {row.name}" for number, row in enumerate(rows, 1)])
    axes.invert_yaxis()
    axes.set_xlabel("memory of one rank, GB")
    axes.set_title(f"{program.kind}: {program.ranks:,} ranks, {program.sizes['tokens']:,} tokens")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.margins(y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
