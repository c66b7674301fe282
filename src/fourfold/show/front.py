"""What people ask after a plan, as pages: fronts, and the largest that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.show.plan import layouts_table, page, source
from fourfold.show.table import Grid, Part
from fourfold.units import counted, show_count

if TYPE_CHECKING:
    from fourfold.verbs.front import Front, Largest


def front_page(front: Front) -> list[Part]:
    if not front.points:
        return [f"No layout to rank: {front.asked.reason}"]
    first, last = front.points[0], front.points[-1]
    what = {
        "memory": "the fastest layouts for less and less memory",
        "gpus": "the first choice on fewer and fewer GPUs",
    }[front.against]
    slower = f"{last.row.step_s / first.row.step_s:.3g} times as long"
    grid = layouts_table([one.row for one in front.points])
    # Layouts of a front are not rivals: each is the best of its kind.
    shown = [i for i, name in enumerate(grid.headings) if i and name != "near best"]
    headings = ["GPUs", *(grid.headings[i] for i in shown)]
    rows = [
        [f"{one.gpus}", *(cells[i] for i in shown)]
        for one, cells in zip(front.points, grid.rows, strict=True)
    ]
    return [
        f"{front.asked.model}: {what}; the last takes {slower}.",
        "",
        Grid(headings, rows),
        "",
        source(front.asked),
    ]


def largest_page(found: Largest) -> list[Part]:
    shape = f"{counted(found.model.layers, 'layer')} of {found.model.hidden}"
    best = found.plan.best
    # Sizes are tried until none more likely fits than not, or none surely does.
    sure = f"fits with a chance of {100 * best.fit_chance:.0f}%" if best is not None else "fits"
    sequences = f"{found.plan.global_batch} sequence{'s' * (found.plan.global_batch > 1)}"
    what = (
        f"The longest sequence is {found.seq_len:,} tokens ({sequences} per step); it {sure}"
        if found.of == "sequence"
        else f"The largest model has {show_count(found.params)} parameters ({shape}); it {sure}"
    )
    return [f"{what}.", "", *page(found.plan)]
