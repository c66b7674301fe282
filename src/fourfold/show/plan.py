"""A plan as a page: one sentence to act on, a table, a few remarks; the rest with --details."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fourfold.errors import sentence
from fourfold.show.table import Grid, Part

if TYPE_CHECKING:
    from fourfold.search.answer import Alternative, PlanAnswer, PlanRow
    from fourfold.search.explain import Explanation

GIB = 2**30
REMARKS, COLUMNS = 5, 100
Cell = Callable[["PlanRow"], str]


def page(said: PlanAnswer, *, details: bool = False) -> list[Part]:
    """The answer first: what to run, then what else there is, then how sure that is."""
    if said.best is None:
        return [f"nothing to rank: {said.reason}", "", _about(said), *_details(said)]
    shown: list[Part] = [_sentence(said, said.best), "", table(said.ranked, details=details), ""]
    remarks = list(_remarks(said))
    if not details:
        more = ["more: --details"] if len(remarks) > REMARKS else []
        return [*shown, *remarks[: REMARKS - len(more)], *more]
    return [*shown, *remarks, "", _about(said), *_details(said)]


def _about(said: PlanAnswer) -> str:
    hosts = -(-said.gpus // said.host_gpus)
    return (
        f"{said.model} ({said.params / 1e9:.1f}B) on {said.cluster}: {said.gpus} x {said.gpu} "
        f"({hosts} host{'s' * (hosts > 1)}), {said.global_batch} sequences of {said.seq_len} "
        f"tokens per step, {said.precision}"
    )


def _sentence(said: PlanAnswer, row: PlanRow) -> str:
    fits = "may run out of memory" if row.tight else "certain to fit"
    return (
        f"Run {said.model} on {said.gpus} x {said.gpu} as {row}, micro batch {row.micro_batch}, "
        f"{row.policy.sharding}, recompute {row.policy.recompute}: {short_s(row.step_s)} s per "
        f"step (80%: {short_s(row.step_s_low)} to {short_s(row.step_s_high)}), "
        f"{row.tflops_gpu:.0f} TFLOP/s and {row.mfu_pct:.1f}% MFU per GPU, "
        f"{row.peak_bytes / GIB:.0f} of {said.memory_bytes / GIB:.0f} GiB ({fits}). "
        f"{_surety(said)}."
    )


def _surety(said: PlanAnswer) -> str:
    known = said.calibration
    if known.note:
        engine = "any engine" if said.stack == "generic" else said.stack
        return f"No runs of {engine} were measured on {said.cluster}"
    if known.error_median_pct is None:
        return f"Based on {known.rows} measured runs, too few to estimate the error"
    return (
        f"Typical error on held-out layouts: {known.error_median_pct:.1f}% ({known.rows} measured "
        "runs)"
    )


def _remarks(said: PlanAnswer) -> Iterable[str]:
    """What a reader should know, most urgent first."""
    yield from _ties(said)
    yield _source(said)
    if said.best is not None and said.best.outside:
        yield f"#1 is outside the measured range: {'; '.join(said.best.outside)}"
    if said.remarks:
        yield f"approximated: {'; '.join(said.remarks)}"
    if said.near_miss is not None:
        size = (said.near_miss.peak_bytes or 0.0) / GIB
        yield (
            f"faster, but probably too large: {_named(said.near_miss)}, about "
            f"{size:.1f} of {said.memory_bytes / GIB:.0f} GiB"
        )
    if said.unproven_best is not None:
        yield (
            f"not ranked: {said.set_aside:,} layouts with features that have no measured runs; the "
            f"fastest is {_named(said.unproven_best)} (never measured: "
            f"{', '.join(said.unproven_best.without_rows or ())}); --explore ranks them"
        )
    others = [one for one in said.tried_gpus if one["gpus"] != said.gpus]
    if others:
        named = ", ".join(f"{one['gpus']}: {short_s(one['step_s'])} s" for one in others[:6])
        yield f"best step time with fewer GPUs: {named}{', ...' if len(others) > 6 else ''}"


def _named(one: Alternative) -> str:
    return (
        f"{one.layout} micro batch {one.micro_batch} {one.sharding} recompute {one.recompute}, "
        f"{short_s(one.step_s)} s"
    )


def _ties(said: PlanAnswer) -> Iterable[str]:
    tied, width = said.tied_with_first, said.tie_width_pct
    if tied > 1:
        yield f"#1 to #{tied} are tied: differences under {width:.1f}% are within the error"
    elif len(said.ranked) > 1:
        yield f"#1 leads by more than the error between layouts ({width:.1f}%)"
    if said.ranked[0].tight:
        safe = next((row for row in said.ranked if not row.tight), None)
        if safe is not None:
            yield (
                f"#1 may run out of memory; the fastest safe choice is #{safe.rank} ({safe}, "
                f"{short_s(safe.step_s)} s)"
            )
        else:
            yield (
                f"none of these is certain to fit; try --safe, or --where 'mem_gib < "
                f"{_sure_gib(said):.0f}'"
            )


def _source(said: PlanAnswer) -> str:
    known = said.calibration
    stack = "a typical engine" if said.stack == "generic" else said.stack
    rule = f"; TFLOP/s and MFU by {said.flop_rule}"
    if known.note:
        return (
            f"step times for {stack}: {known.note}; 80% interval "
            f"{known.interval_low_pct:+.0f}% to {known.interval_high_pct:+.0f}%{rule}"
        )
    p90 = f", 9 in 10 within {known.error_p90_pct:.1f}%" if known.error_p90_pct else ""
    return (
        f"step times for {stack} on {said.cluster} (calibration '{known.name}', {known.rows} "
        f"measured runs{p90}){rule}"
    )


def _sure_gib(said: PlanAnswer) -> float:
    """GiB below which the upper end of the memory interval would fit."""
    row = said.ranked[0]
    return 0.98 * said.memory_bytes * row.peak_bytes / row.peak_bytes_high / GIB


def _details(said: PlanAnswer) -> Iterable[str]:
    """What the order rests on, and what was searched."""
    if said.best is not None:
        whose = " (runs of other stacks and clusters)" if said.calibration.note else ""
        yield f"evidence for #1{whose}: {_evidence(said.best)}"
        if not said.flips and len(said.ranked) > 1:
            yield "sensitivity: no single uncertain coefficient changes the winner"
    for flip in said.flips:
        yield (
            f"sensitivity: with {flip.about} ({flip.knob}) at {flip.other:.3g} instead of "
            f"{flip.value:.3g}, #{flip.winner} ({flip.layout}) leads by "
            f"{100 * (flip.gain - 1):.0f}%"
        )
    if said.deciding:
        named = "; ".join(f"{one} micro batch {one.micro_batch}" for one in said.deciding)
        yield f"runs that would decide: {named}"
    axes = "; ".join(f"{name} {_values(values)}" for name, values in said.axes.items())
    refused = ", ".join(f"{name} {count:,}" for name, count in said.refused.items())
    yield f"searched {said.candidates:,} points: {axes}"
    yield (
        f"rejected: {refused or 'none'}; legal: {said.legal:,}, of which "
        f"{said.legal - said.fitting:,} do not fit"
    )
    yield (
        f"ranked {said.ranked_in_all:,}; the pipelines of the best {said.played} were simulated "
        "event by event"
    )
    if said.dropped_by_where:
        yield f"excluded by --where: {said.dropped_by_where:,}"
    yield (
        "80% intervals contain 8 of 10 measured runs; seconds by part are exposed seconds; pp s is "
        "the pipeline bubble and its sends"
    )


def _evidence(row: PlanRow) -> str:
    runs = [f"{name}: {n} measured run{'s' * (n != 1)}" for name, n in row.evidence.items()]
    return "; ".join([*runs, *(f"{text}: none" for text in row.outside)]) or (
        "unknown to this calibration"
    )


def _values(values: list[Any]) -> str:
    if len(values) > 4 and all(isinstance(value, int) for value in values):
        return f"{len(values)} values {values[0]}-{values[-1]}"
    return "/".join(str(value) for value in values)


_ALWAYS: tuple[tuple[str, Cell], ...] = (
    ("#", lambda row: str(row.rank)),
    ("layout", str),
    ("micro", lambda row: str(row.micro_batch)),
    ("sharding", lambda row: row.policy.sharding),
    ("recompute", lambda row: row.policy.recompute),
    ("s/step", lambda row: short_s(row.step_s)),
    ("GiB", lambda row: f"{row.peak_bytes / GIB:.1f}"),
    ("fits", lambda row: "tight" if row.tight else "yes"),
    ("TFLOP/s", lambda row: f"{row.tflops_gpu:.0f}"),
)


def _optional(rows: Sequence[PlanRow]) -> list[tuple[str, Cell]]:
    """Columns that are shown while there is room, most wanted first."""
    wanted: list[tuple[str, Cell]] = []
    if any(row.training_s for row in rows):
        wanted += [
            ("days", lambda row: f"{_days(row):.1f}"),
            ("GPU-hours", lambda row: f"{row.gpu_hours:,.0f}"),
        ]
        if any(row.cost is not None for row in rows):
            wanted.append(("cost", lambda row: f"{row.cost or 0.0:,.0f}"))
        wanted.append(("days 80%", lambda row: _days_range(row)))
    wanted += [
        ("s 80%", lambda row: f"{short_s(row.step_s_low)}-{short_s(row.step_s_high)}"),
        (
            "GiB 80%",
            lambda row: f"{row.peak_bytes_low / GIB:.0f}-{row.peak_bytes_high / GIB:.0f}",
        ),
    ]
    if any(row.ramp_s for row in rows):
        wanted.append(("ramp h", lambda row: f"{(row.ramp_s or 0.0) / 3600:.1f}"))
    return wanted


def _days(row: PlanRow) -> float:
    return (row.training_s or 0.0) / 86400


def _days_range(row: PlanRow) -> str:
    low, high = (_days(row) * s / row.step_s for s in (row.step_s_low, row.step_s_high))
    return f"{low:.1f}-{high:.1f}"


def table(rows: Sequence[PlanRow], *, details: bool = False) -> Grid:
    """At most 100 characters wide; `details`: every column, and the exposed seconds by part."""
    shown, width = list(_ALWAYS), 0
    for heading, cell in (*_ALWAYS, *_optional(rows)):
        room = 2 + max(len(heading), *(len(cell(row)) for row in rows))
        if (heading, cell) not in _ALWAYS and (details or width + room - 2 <= COLUMNS):
            shown.append((heading, cell))
        elif (heading, cell) not in _ALWAYS:
            continue
        width += room
    if details:
        parts = [
            name
            for name in rows[0].exposed_s
            if any(row.exposed_s[name] > 0.0005 * row.step_s for row in rows)
        ]
        shown += [(f"{name} s", _part(name)) for name in parts]
    headings = [heading for heading, _ in shown]
    return Grid(headings, [[cell(row) for _, cell in shown] for row in rows])


def _part(name: str) -> Cell:
    return lambda row: short_s(row.exposed_s[name])


def stacks_table(rows: Iterable[dict[str, Any]]) -> Grid:
    """Names that --stack takes."""
    cells = []
    for row in rows:
        where = ", ".join(f"{name} ({count})" for name, count in row["measured"].items())
        stands_for = row["stands_for"] if row["stands_for"] != row["stack"] else "itself"
        cells.append([row["stack"], stands_for, row["rules"], where or "-"])
    return Grid(["stack", "stands for", "limits of", "measured on (runs)"], cells)


def explain_page(said: Explanation) -> list[Part]:
    """One layout in words and two small tables."""
    if not said.legal:
        near = "; ".join(said.nearest) or "none with these GPUs and this batch"
        return [
            f"{said.layout} is illegal:",
            *(
                f"  [{one['reason']}] "
                f"{sentence(one['rule'], field=one['field'], value=one['value'])}; {one['hint']}"
                for one in said.refusals
            ),
            f"nearest legal: {near}",
        ]
    small = said.smallest
    if small is not None:
        kinds = ", ".join(f"{n} {b / GIB:.1f}" for n, b in small.memory_bytes.items())
        return [
            f"{said.layout} is legal but does not fit: at micro batch {small.micro_batch}, "
            f"{small.sharding}, recompute {small.recompute} its fullest rank needs "
            f"{small.peak_bytes / GIB:.1f} GiB of {small.limit_bytes / GIB:.1f}",
            f"GiB by kind: {kinds}",
            *_approximated(said),
            f"nearest that fit: {'; '.join(said.nearest) or 'none'}",
        ]
    assert said.row is not None
    return _explained(said, said.row, said.best or said.row)


def _approximated(said: Explanation) -> list[str]:
    return [f"approximated: {'; '.join(said.remarks)}"] if said.remarks else []


def _explained(said: Explanation, row: PlanRow, best: PlanRow) -> list[Part]:
    parts = [
        [name, short_s(row.parts_s[name]), short_s(best.parts_s[name]),
         f"{row.parts_s[name] - best.parts_s[name]:+.2f}"]
        for name in row.parts_s
        if max(row.parts_s[name], best.parts_s[name]) > 0.0005 * row.step_s
    ]  # fmt: skip
    memory = [[name, f"{size / GIB:.2f}"] for name, size in row.memory_bytes.items()]
    unproven = " (including unmeasured features)" if said.with_unproven else ""
    return [
        f"{row}, micro batch {row.micro_batch}, {row.policy.sharding}, recompute "
        f"{row.policy.recompute}: the best of {said.ways:,} variants",
        f"{short_s(row.step_s)} s per step (80%: {short_s(row.step_s_low)} to "
        f"{short_s(row.step_s_high)}), place {said.rank:,} of {said.of:,} layouts{unproven}; "
        f"{row.tflops_gpu:.0f} TFLOP/s/GPU; {100 * (row.step_s / best.step_s - 1):+.1f}% against "
        f"the best, {best} micro batch {best.micro_batch} (under {said.tie_width_pct:.1f}% is a "
        "tie)",
        *_approximated(said),
        "",
        Grid(["part", "s", "best s", "difference"], parts),
        "",
        f"fullest rank {row.peak_bytes / GIB:.1f} GiB (80%: {row.peak_bytes_low / GIB:.0f} "
        f"to {row.peak_bytes_high / GIB:.0f} of {said.memory_bytes / GIB:.0f}):",
        Grid(["kind", "GiB"], memory),
        "",
        "its best variants:",
        table(said.variants or ()),
        "",
        f"evidence: {_evidence(row)}",
    ]


def short_s(seconds: float) -> str:
    """Three digits are more than any prediction is worth; '-' for nothing."""
    if abs(seconds) < 5e-4:
        return "-"
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 0.1 else 3
    return f"{seconds:.{digits}f}"
