"""How near is a step to what unavoidable? A table by part, and a picture of two bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.show import figures
from fourfold.show.table import Grid
from fourfold.show.table import Part as Block

if TYPE_CHECKING:
    from fourfold.cost.floor import Part

HEADINGS = ["ms per step", "unavoidable", "engine", "gap", "of the step"]
_COLOURS = ("#3b6ea5", "#6ba3c8", "#9b59b6", "#f2b880", "#d98880", "#7dbb8a", "#b8b8b8")


def page(rows: Sequence[Part], tokens: float) -> list[Block]:
    from fourfold.cost.floor import total

    whole = total(list(rows))
    cells = [_cells(row, whole.engine_s) for row in (*rows, whole)]
    speeds = (
        f"{tokens / whole.engine_s:,.0f} of at most {tokens / whole.limit_s:,.0f} tokens/s per GPU"
    )
    share = f"{100 * whole.limit_s / whole.engine_s:.1f}% of the limit"
    return [Grid(HEADINGS, cells), "", f"{speeds}: {share}"]


def _cells(row: Part, step_s: float) -> list[str]:
    return [
        row.name,
        f"{1e3 * row.limit_s:.3f}" if row.limit_s else "-",
        f"{1e3 * row.engine_s:.3f}",
        f"{1e3 * row.gap_s:+.3f}",
        f"{100 * row.gap_s / step_s:+.1f}%",
    ]


def picture(named: Sequence[tuple[str, Sequence[Part]]], path: str) -> bytes:
    """Two bars for each step: what unavoidable, and what it took."""
    figure = figures.empty_figure(path, 9.0, 1.4 + 1.1 * len(named))
    axes = figure.subplots()
    names: list[str] = []
    for title, rows in named:
        for what, seconds in (
            ("limit", [r.limit_s for r in rows]),
            ("", [r.engine_s for r in rows]),
        ):
            place, left = len(names), 0.0
            names.append(f"{title} {what}".strip())
            for row, value, colour in zip(rows, seconds, _COLOURS, strict=True):
                width = max(0.0, 1e3 * value)
                label = row.name if place == 0 else "_"
                axes.barh(place, width, left=left, color=colour, label=label)
                left += width
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figures.content(figure, path)
