"""A plan as a page: one sentence to act on, a table, a few remarks; the rest with --details."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fourfold.show.plan_notes import capacities, compared, routing, searched
from fourfold.text_table import Column, Grid, Part, named, table
from fourfold.units import counted, short_s, show_mwh

if TYPE_CHECKING:
    from fourfold.search.plan_answer import (
        Alternative,
        EngineBest,
        PlanAnswer,
        PlanRow,
        RounderBatch,
    )

GIB = 2**30
REMARKS, COLUMNS = 5, 100
BEST_OF_EACH = "The best of each engine"


def page(plan: PlanAnswer, *, details: bool = False) -> list[Part]:
    if plan.best is None:
        return [f"{plan.reason[:1].upper()}{plan.reason[1:]}", "", _about(plan), *searched(plan)]
    layouts = layouts_table(plan.ranked, details=details)
    sentence, beside = _sentence(plan, plan.best), [*_engines(plan)]
    beside += [part for grid in capacities(plan) for part in (grid, "")]
    assumes = [f"{plan.assumes.text}."] if plan.assumes else []
    shown: list[Part] = [sentence, *assumes, "", layouts, "", *beside]
    remarks = list(_remarks(plan))
    if not details:
        more = ["more: --details"] if len(remarks) > REMARKS else []
        return [*shown, *remarks[: REMARKS - len(more)], *more]
    return [*shown, *remarks, "", _about(plan), *_details(plan)]


def _about(plan: PlanAnswer) -> str:
    hosts = counted(-(-plan.gpus // plan.host_gpus), "host")
    machines = f"{plan.gpus} x {plan.gpu}"
    named = "" if plan.cluster == machines else f"{plan.cluster}: "
    return (
        f"{plan.model} ({plan.params / 1e9:.1f}B) on {named}{machines} "
        f"({hosts}), {plan.global_batch} sequences of {plan.seq_len} tokens per step, "
        f"{plan.precision}"
    )


def _engines(plan: PlanAnswer) -> Iterable[Part]:
    """The best of each engine side by side, where none was asked for."""
    best = [one for one in plan.engines if one.row is not None]
    if not best:
        return
    yield f"{BEST_OF_EACH} (--stack NAME lists more, --export NAME writes its settings):"
    dated: Column = "days", lambda one: f"{_days(one.row):.1f}"
    yield table(
        best,
        *named("engine", "layout=row", "micro=row.micro_batch", "sharding=row.policy.sharding"),
        *named("recompute=row.policy.recompute", "s/step=row.step_s:short"),
        ("s 80%", lambda one: f"{short_s(one.row.step_s_low)}-{short_s(one.row.step_s_high)}"),
        *named("fits=row.fit_chance:.0%"),
        ("vs #1", lambda one: _engine_against(one, best[0])),
        *([dated] if any(one.row.training_s for one in best if one.row) else ()),
    )
    for one in plan.engines:
        if one.row is None:
            yield f"{one.engine}: {one.reason}"
    yield ""


def _engine_against(engine: EngineBest, first: EngineBest) -> str:
    """Return seconds against the engine that the plan is for, and what keeps a faster one back."""
    if engine.row is None or first.row is None or engine is first:
        return "-"
    more = f"{100 * (engine.row.step_s / first.row.step_s - 1):+.1f}%"
    return f"{more} {engine.held_back}".strip()


def _sentence(plan: PlanAnswer, row: PlanRow) -> str:
    runs = f"Runs in {', '.join(row.runs_in)}" if row.runs_in else "No engine we export to runs it"
    asked = 1.0 - plan.risk
    less = f"No layout is {100 * asked:.0f}% likely to fit; this is the fastest of the likeliest. "
    tie = f"Tie of {plan.tied} within 2%. " if plan.tied > 1 else ""
    tie += f"You measured it: {short_s(row.measured_s)} s. " if row.measured_s is not None else ""
    fit = f"{100 * row.fit_chance:.0f}% chance to fit"
    fit = fit if row.measured_s is None else "predicted; your run fitted"
    return (
        f"Run {plan.model} on {plan.gpus} x {plan.gpu} as {row}, micro batch {row.micro_batch}, "
        f"{row.policy.sharding}, recompute {row.policy.recompute}: {interval_s(row)}, "
        f"{row.tflops_gpu:.0f} TFLOP/s and {row.mfu_pct:.1f}% MFU per GPU, "
        f"{row.peak_bytes / GIB:.0f} of {plan.memory_bytes / GIB:.0f} GiB "
        f"({fit}). "
        f"{less if row.fit_chance < asked else ''}{tie}{runs}. {_surety(plan)}."
    )


def interval_s(row: PlanRow) -> str:
    low, high = short_s(row.step_s_low), short_s(row.step_s_high)
    return f"{short_s(row.step_s)} s per step (80%: {low} to {high})"


def _surety(plan: PlanAnswer) -> str:
    known = plan.calibration
    if known.note:
        return "Seconds are estimated from runs of other engines and machines"
    if plan.like:
        same = "which has the same GPUs and links"
        return f"Priced as {plan.like}, {same} ({counted(known.rows, 'run')})"
    if known.error_median_pct is None:
        return f"{counted(known.rows, 'measured run')}; no held-out error yet"
    error = f"{known.error_median_pct:.1f}% ({counted(known.rows, 'measured run')})"
    return f"Typical error on held-out layouts: {error}"


def _remarks(plan: PlanAnswer) -> Iterable[str]:
    first = plan.best
    if first is not None:
        yield from [_training(plan, first)] if first.training_s else []
        yield from [compared(plan.measured, first)] if plan.measured else []
        yield from [_rounder(plan.rounder_batch)] if plan.rounder_batch else []
        yield from _beside(plan, first)
    yield from routing(plan)
    yield source(plan)
    if first is not None and first.outside:
        yield f"#1 is extrapolated: {', '.join(first.outside)}"
    yield from approximated(plan.remarks)
    if plan.near_miss is not None:
        size = (plan.near_miss.peak_bytes or 0.0) / GIB
        room = f"about {size:.1f} of {plan.memory_bytes / GIB:.0f} GiB, {_likely(plan.near_miss)}"
        yield f"faster, but probably too large: {_named(plan.near_miss)}, {room}"
    if plan.unproven_best is not None:
        yield (
            f"unmeasured: {counted(plan.set_aside, 'configuration')} not ranked (--explore ranks "
            f"them); fastest: {_named(plan.unproven_best)} (no run with "
            f"{', '.join(plan.unproven_best.without_rows or ())})"
        )
    others = [one for one in plan.tried_gpus if one["gpus"] != plan.gpus]
    if others:
        named = ", ".join(f"{one['gpus']}: {short_s(one['step_s'])} s" for one in others[:6])
        yield f"best step time with fewer GPUs: {named}{', ...' if len(others) > 6 else ''}"


def _rounder(batch: RounderBatch) -> str:
    return (
        f"--global-batch {batch.global_batch}: {short_s(batch.step_s)} s per step, "
        f"{batch.faster_pct:+.0f}% tokens/s ({batch.layout})"
    )


def _training(plan: PlanAnswer, row: PlanRow) -> str:
    """What the whole training takes; its columns do not always have room."""
    days = f"{_days(row):.1f} days (80%: {' to '.join(_days_range(row))})"
    cost = f", cost {row.cost:,.0f}" if row.cost is not None else ""
    goodput = f", goodput {100 * (1 - plan.training['lost_share']):.1f}%"
    energy = f", {show_mwh(row.power_w * row.gpu_hours / 1e6)}"
    steps = counted(plan.training["steps"], "step")
    return f"{steps} take {days}, {row.gpu_hours:,.0f} GPU-hours{energy}{cost}{goodput}"


def _named(one: Alternative) -> str:
    ways = [one.cp_kind] * (one.layout.cp > 1)
    ways += [f"v{one.virtual_stages}"] * (one.virtual_stages > 1)
    policy = f"micro batch {one.micro_batch} {one.sharding} recompute {one.recompute}"
    return f"{' '.join([str(one.layout), *ways, policy])}, {short_s(one.step_s)} s"


def _beside(plan: PlanAnswer, first: PlanRow) -> Iterable[str]:
    """A faster way that is held back, what bf16 sums would save, and what is unusual about #1."""
    if plan.faster is not None and plan.faster.step_s < first.step_s:
        less = 100 * (1 - plan.faster.step_s / first.step_s)
        held = [_likely(plan.faster)] if (plan.faster.fit_chance or 0.0) < 1.0 - plan.risk else []
        held += ["no export"] if plan.faster.exported is False else []
        yield f"{less:.1f}% less time than #1 but {', '.join(held)}: {_named(plan.faster)}"
    narrow = plan.bf16_gradients
    if narrow is not None:
        saved_s = 100 * (1 - narrow.step_s / first.step_s)
        saved_gib = (first.peak_bytes - (narrow.peak_bytes or 0.0)) / GIB
        at_speed = (
            "at the same speed" if abs(saved_s) < 0.05 else f"and change it by {-saved_s:+.1f}%"
        )
        yield (
            f"gradients accumulate in fp32; bf16 would free {saved_gib:.1f} GiB {at_speed} "
            "(--set policy.grad_dtype=bf16)"
        )
    if first.note:
        yield f"#1: {first.note}"


def _likely(one: Alternative) -> str:
    return f"{100 * (one.fit_chance or 0.0):.0f}% likely to fit"


def source(plan: PlanAnswer) -> str:
    """Whose seconds they are, and how FLOPs are counted."""
    return f"{plan.step_times}; TFLOP/s and MFU by {plan.flop_rule}"


def _details(plan: PlanAnswer) -> Iterable[str]:
    if plan.best is not None:
        if plan.best.wide:
            yield f"the interval of #1 is wide: {plan.best.wide}"
        whose = " (runs of other stacks and clusters)" if plan.calibration.note else ""
        yield f"evidence for #1{whose}: {evidence(plan.best)}"
    for flip in plan.flips:
        yield (
            f"sensitivity: with {flip.about} ({flip.knob}) at {flip.other:.3g} instead of "
            f"{flip.value:.3g}, #{flip.winner} ({flip.layout}) leads by "
            f"{100 * (flip.gain - 1):.0f}%"
        )
    if plan.deciding:
        named = "; ".join(f"{one} micro batch {one.micro_batch}" for one in plan.deciding)
        yield f"to confirm the order, measure: {named}"
    yield from searched(plan)
    yield (
        f"ranked {plan.ranked_in_all:,}; the pipelines of the best {plan.played} were simulated "
        "event by event"
    )
    yield (
        "80% intervals contain 8 of 10 measured runs; seconds by part are exposed seconds; pp s is "
        "the pipeline bubble and its sends"
    )


def evidence(row: PlanRow) -> str:
    runs = [f"{name}: {counted(n, 'measured run')}" for name, n in row.evidence.items()]
    runs += [f"{text}: no measured run" for text in row.outside]
    return "; ".join(runs) or "unknown to this calibration"


_ALWAYS: tuple[Column, ...] = (
    *named("#=rank"),
    ("layout", str),
    *named("micro=micro_batch", "sharding=policy.sharding", "recompute=policy.recompute"),
    *named("s/step=step_s:short"),
    ("GiB", lambda row: f"{row.peak_bytes / GIB:.1f}"),
    *named("fits=fit_chance:.0%"),
)


def _optional(rows: Sequence[PlanRow], *, is_front: bool) -> Iterable[Column]:
    """Columns that are shown while there is room, most wanted first."""
    if len(rows) > 1 and not is_front:
        first = rows[0]
        yield "vs #1", lambda row: _against(row, first)
    yield "TFLOP/s", lambda row: f"{row.tflops_gpu:.0f}"
    if any(row.training_s for row in rows):
        yield "days", lambda row: f"{_days(row):.1f}"
        yield "GPU-hours", lambda row: f"{row.gpu_hours:,.0f}"
        if any(row.cost is not None for row in rows):
            yield "cost", lambda row: f"{row.cost or 0.0:,.0f}"
        yield "days 80%", lambda row: "-".join(_days_range(row))
        yield "J/token", lambda row: f"{row.joule_per_token:.3g}"
    yield "s 80%", lambda row: f"{short_s(row.step_s_low)}-{short_s(row.step_s_high)}"
    yield "GiB 80%", lambda row: f"{row.peak_bytes_low / GIB:.0f}-{row.peak_bytes_high / GIB:.0f}"
    if any(row.ramp_s for row in rows):
        yield "ramp h", lambda row: f"{(row.ramp_s or 0.0) / 3600:.1f}"


def _against(row: PlanRow, first: PlanRow) -> str:
    """Return seconds against the first, measured ones where the user has some, and why a row that
    is faster stands lower."""
    if row.rank == first.rank:
        return "-"
    seconds, first_s = (one.measured_s or one.step_s for one in (row, first))
    more = f"{100 * (seconds / first_s - 1):+.1f}%"
    ran = f"measured {short_s(seconds)}"
    if row.tied:
        return f"{more} tie{f', {ran}' if row.measured_s is not None else ''}"
    if not row.exported and first.exported:
        return f"{more} no export"
    if row.measured_s is not None:
        return f"{more} {ran}"
    return f"{more} risky" if "likely to fit" in row.note else more


def _days(row: PlanRow) -> float:
    return (row.training_s or 0.0) / 86400


def _days_range(row: PlanRow) -> tuple[str, str]:
    low, high = ((s or 0.0) / 86400 for s in (row.training_s_low, row.training_s_high))
    return f"{low:.1f}", f"{high:.1f}"


def layouts_table(
    rows: Sequence[PlanRow], *, details: bool = False, is_front: bool = False
) -> Grid:
    """At most 100 characters wide; `details`: every column, and the exposed seconds by part.
    `is_front`: each row is the best of its kind, with its number of GPUs for a rank."""
    head: Column = ("GPUs", lambda row: f"{row.layout.world}")
    shown = [head if is_front else _ALWAYS[0], *_ALWAYS[1:]]
    width = sum(map(_room, shown, [rows] * len(shown))) - 2
    for column in _optional(rows, is_front=is_front):
        if details or width + _room(column, rows) <= COLUMNS:
            shown.append(column)
            width += _room(column, rows)
    if details:
        shown += [
            (f"{name} s", lambda row, name=name: short_s(row.exposed_s[name]))
            for name in rows[0].exposed_s
            if any(row.exposed_s[name] > 0.0005 * row.step_s for row in rows)
        ]
    return table(rows, *shown)


def _room(column: Column, rows: Sequence[PlanRow]) -> int:
    """Characters of a column and the gap before it."""
    heading, cell = column
    return 2 + max(len(heading), *(len(cell(row)) for row in rows))


def approximated(remarks: Sequence[str]) -> list[str]:
    return [f"approximated: {'; '.join(remarks)}"] if remarks else []
