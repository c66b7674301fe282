"""What does memory look like over the steps of a trace? A picture: live, step peak, peak so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.cost.trace.steps import Program
from fourfold.cost.trace.walk import StepRow
from fourfold.show import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def picture(program: Program, rows: Sequence[StepRow], path: str) -> bytes:
    """The drawn file's content; the suffix of `path` chooses the form."""
    height = max(2.5, 0.32 * len(rows) + 1.6)
    figure = figures.empty_figure(path, 9.0, height)
    _draw(figure.subplots(), program, rows)
    return figures.content(figure, path)


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
