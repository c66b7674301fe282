"""What people ask after a plan, as pages: fronts, and the largest that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.show.plan import layouts_table, page
from fourfold.show.table import Grid, Part
from fourfold.units import show_count

if TYPE_CHECKING:
    from fourfold.verbs.front import Front, Largest


def front_page(front: Front) -> list[Part]:
    if not front.points:
        return [f"nothing to rank: {front.asked.reason}"]
    first, last = front.points[0], front.points[-1]
    what = {"memory": "less and less memory", "gpus": "fewer and fewer GPUs"}[front.against]
    slower = f"{last.row.step_s / first.row.step_s:.3g} times as long"
    grid = layouts_table([one.row for one in front.points])
    headings = ["GPUs", *grid.headings[1:]]
    rows = [[f"{one.gpus}", *cells[1:]] for one, cells in zip(front.points, grid.rows, strict=True)]
    return [
        f"{front.asked.model}: the fastest layouts for {what}; the last takes {slower}.",
        "",
        Grid(headings, rows),
    ]


def largest_page(found: Largest) -> list[Part]:
    shape = f"{found.model.layers} layers of {found.model.hidden}"
    what = (
        f"The longest sequence that fits is {found.seq_len:,} tokens"
        if found.of == "sequence"
        else f"The largest model that fits has {show_count(found.params)} parameters ({shape})"
    )
    return [f"{what}.", "", *page(found.plan)]
