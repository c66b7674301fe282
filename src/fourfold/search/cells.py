"""Points of a table in cells: those that differ only in their copies of the sharded state. Seconds
in the pipeline are bounded once for a cell, with what the cheapest of its points pays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fourfold.cost.columns import Floats
from fourfold.search.bounds import LAYOUT, Pipes, gathering_s, per_step_s, pipes_of
from fourfold.search.candidates import Places, repeats, row_numbers
from fourfold.search.space import Bools, Space
from fourfold.spec.words import SHARDINGS

SLACK = 1e-9  # rounding between the bound and the closed form


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Rows of a table in groups that differ in their copies only, with [groups, ways] seconds that
    no point of a cell undercuts."""

    space: Space
    order: Places  # rows of the table, group by group
    starts: Places  # of each group in `order`
    counts: Places
    layouts: Places  # a number from 0 for the layout of each group
    least_s: Floats
    more_s: Floats  # of each row: how much more than its group it pays at least
    per_step_s: Floats  # of each row, at least, for gradients and updates
    move_s: Floats  # of each row, for the gathers of one layer
    pipe: Places  # of each row
    pipes: Pipes

    def holding(self, mask: Bools) -> Places:
        """Cells with points of the mask, by their place in `least_s` read row by row."""
        return np.flatnonzero(_some(mask, self.order, self.starts))

    def layout(self, cells: Places) -> Places:
        return self.layouts[cells // self.least_s.shape[1]]

    def points(self, cells: Places, mask: Bools) -> tuple[Places, Places]:
        """(points of the mask in these cells, for each the place of its cell among them)."""
        group, way = np.divmod(cells, mask.shape[1])
        place, within = repeats(self.counts[group])
        index = self.order[self.starts[group][place] + within] * mask.shape[1] + way[place]
        inside = mask.reshape(-1)[index]
        return index[inside], place[inside]

    def bound_s(self, index: Places, cells: Places) -> Floats:
        """Seconds that points undercut no more than rounding, given the cell of each."""
        return self.least_s.reshape(-1)[cells] + self.more_s[index // self.least_s.shape[1]]

    def gathering(self, cells: Places) -> Bools:
        """Cells whose points gather weights."""
        return self.move_s[self.order[self.starts[cells // self.least_s.shape[1]]]] > 0.0

    def gathered_s(self, index: Places) -> Floats:
        """Seconds that points do not undercut, with the weights that each gathers."""
        row, way = np.divmod(index, self.least_s.shape[1])
        least_s = self.pipes.bound_s(self.pipe[row], way, self.move_s[row])
        return least_s * (1.0 - SLACK) + self.per_step_s[row]


def _some(mask: Bools, order: Places, starts: Places) -> Bools:
    """[groups, ways]: whether a group has a point of the mask there."""
    if not len(starts):
        return np.zeros((0, mask.shape[1]), dtype=bool)
    # Eight ways at a time.
    some = np.bitwise_or.reduceat(np.packbits(mask, axis=1)[order], starts, axis=0)
    return np.unpackbits(some, axis=1, count=mask.shape[1]).view(bool)


def cells_of(space: Space, asked: Bools | None = None) -> Cells:
    """`asked`: all that is ever looked for among, else every legal point; the bound of what is not
    is of no use."""
    alike = row_numbers(space.rows, (*LAYOUT, "virtual_stages", "schedule"))
    _, first, pipe = np.unique(alike, return_index=True, return_inverse=True)
    pipe = pipe.reshape(-1)
    number = pipe * len(SHARDINGS) + space.rows["zero"]
    order = np.argsort(number, kind="stable")
    number, starts, counts = np.unique(number[order], return_index=True, return_counts=True)
    _, layouts = np.unique(row_numbers(space.rows, LAYOUT), return_inverse=True)
    of_group = number // len(SHARDINGS)
    pipe_starts = starts[np.unique(of_group, return_index=True)[1]]
    held = _some(space.legal if asked is None else asked, order, pipe_starts)
    columns = {name: column[first] for name, column in space.rows.items()}
    pipes = pipes_of(space.query, columns, space.ways)
    once = per_step_s(space.query, space.rows) * (1.0 - SLACK)
    least_once = np.minimum.reduceat(once[order], starts) if len(starts) else once
    more_s = np.empty_like(once)
    more_s[order] = once[order] - np.repeat(least_once, counts)
    return Cells(
        space=space,
        order=order,
        starts=starts,
        counts=counts,
        layouts=layouts.reshape(-1)[order[starts]],
        least_s=(pipes.least_s(held) * (1.0 - SLACK))[of_group] + least_once[:, None],
        more_s=more_s,
        per_step_s=once,
        move_s=gathering_s(space.query, space.rows),
        pipe=pipe,
        pipes=pipes,
    )
