"""Pages beside a plan: one layout explained (why it is illegal or too large, or what it takes), and
seconds against memory or GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fourfold.cost.listing import whole_units
from fourfold.errors import sentence
from fourfold.show.plan import (
    GIB,
    approximated,
    evidence,
    interval_s,
    layouts_table,
    page,
    source,
)
from fourfold.show.plan_notes import short_s
from fourfold.show.table import Grid, Part, or_dash
from fourfold.units import counted, show_count

if TYPE_CHECKING:
    from fourfold.cost.listing import OpRow
    from fourfold.search.explain import Explanation
    from fourfold.search.plan_answer import PlanRow
    from fourfold.verbs.front import Front, Largest


def explain_page(answer: Explanation) -> list[Part]:
    if not answer.legal:
        near = "; ".join(answer.nearest) or "none with these GPUs and this batch"
        return [
            f"{answer.layout} is illegal:",
            *(
                f"  [{why['reason']}] "
                f"{sentence(why['rule'], field=why['field'], value=why['value'])}; {why['hint']}"
                for why in answer.refusals
            ),
            f"nearest legal: {near}",
        ]
    small = answer.smallest
    if small is not None:
        kinds = ", ".join(f"{n} {b / GIB:.1f}" for n, b in small.memory_bytes.items())
        return [
            f"{answer.layout} is legal but does not fit: at micro batch {small.micro_batch}, "
            f"{small.sharding}, recompute {small.recompute} its fullest rank needs "
            f"{small.peak_bytes / GIB:.1f} GiB of {small.limit_bytes / GIB:.1f}",
            f"GiB by kind: {kinds}",
            *approximated(answer.remarks),
            f"nearest that fit: {'; '.join(answer.nearest) or 'none'}",
        ]
    assert answer.row is not None
    return _explained(answer, answer.row, answer.best or answer.row)


def operations_table(rows: Sequence[OpRow]) -> Grid:
    """Milliseconds in whole microseconds, which add up to the last row."""
    units = whole_units([row.step_s for row in rows], 1e-6)
    lines = [
        [row.name, row.axis or row.kind, row.phase, f"{row.times:.10g}", _size(row),
         or_dash(row.keeps / 1e6 or None, ".1f"), f"{unit / 1e3:.3f}"]
        for row, unit in zip(rows, units, strict=True)
    ]  # fmt: skip
    total = ["step", *[""] * 5, f"{sum(units) / 1e3:.3f}"]
    heads = ["operation", "kind or axis", "pass", "times", "m x n x k, MB", "keeps MB", "ms"]
    return Grid(heads, [*lines, total])


def _size(row: OpRow) -> str:
    shape = " x ".join(f"{size:.10g}" for size in row.shape)
    return shape or or_dash(row.bytes / 1e6 or None, ".1f")


def _explained(answer: Explanation, row: PlanRow, best: PlanRow) -> list[Part]:
    parts = [
        [name, short_s(row.parts_s[name]), short_s(best.parts_s[name]),
         f"{row.parts_s[name] - best.parts_s[name]:+.2f}"]
        for name in row.parts_s
        if max(row.parts_s[name], best.parts_s[name]) > 0.0005 * row.step_s
    ]  # fmt: skip
    memory = [[name, f"{size / GIB:.2f}"] for name, size in row.memory_bytes.items()]
    unproven = " (including unmeasured features)" if answer.with_unproven else ""
    slower = 100 * (row.step_s / best.step_s - 1)
    against = f"{slower:+.1f}% against the first choice, {best} micro batch {best.micro_batch}"
    place = f"place {answer.rank:,} of {counted(answer.of or 0, 'layout')}"
    tie = f" (within {answer.tie_width_pct:.1f}% is a tie)"
    return [
        f"{row}, micro batch {row.micro_batch}, {row.policy.sharding}, recompute "
        f"{row.policy.recompute}: the best of {counted(answer.ways or 0, 'variant')}",
        f"{interval_s(row)}, {place}{unproven}; "
        f"{row.tflops_gpu:.0f} TFLOP/s/GPU; {'the first choice' if row == best else against + tie}",
        *approximated(answer.remarks),
        "",
        Grid(["part", "s", "best s", "difference"], parts),
        "",
        f"fullest rank {row.peak_bytes / GIB:.1f} GiB (80%: {row.peak_bytes_low / GIB:.0f} "
        f"to {row.peak_bytes_high / GIB:.0f} of {answer.memory_bytes / GIB:.0f}):",
        Grid(["kind", "GiB"], memory),
        "",
        "its best variants:",
        layouts_table(answer.variants or ()),
        "",
        f"evidence: {evidence(row)}",
        *(["", operations_table(answer.operations)] if answer.operations else []),
    ]


def front_page(front: Front) -> list[Part]:
    if not front.points:
        return [f"{front.asked.reason[:1].upper()}{front.asked.reason[1:]}"]
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
