"""A diagnosis on one screen: the verdict, causes with remedies, parts, settings."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from fourfold.spec.layout import AXES
from fourfold.text_table import Grid, Part, named, or_dash, table
from fourfold.traces.cause import Cause
from fourfold.traces.what_if import WhatIf
from fourfold.units import counted, millis
from fourfold.verbs.best_engine import BestEngine
from fourfold.verbs.diagnosis import LEAST_SHOWN_S, Diagnosis, PartRow

_WIDE = 100
# Of the settings these are told in a line; --settings shows all.
_TOLD = (
    "seq_len",
    "sequences",
    "micro_batch",
    "micro_batches",
    "precision",
    "weights",
    "recompute",
    "attention",
)


def page(answer: Diagnosis, *, settings: bool = False) -> Iterator[Part]:
    yield from _head(answer)
    yield ""
    yield from _causes(answer)
    yield ""
    yield part_cells(answer)
    yield ""
    yield from _foot(answer)
    for one in (*answer.what_ifs, *([answer.fixed] if answer.fixed else [])):
        yield _what_if(one)
    if len(answer.ranks) > 1:
        yield ""
        yield _ranks(answer)
    if settings:
        yield ""
        yield _settings(answer)


def _head(answer: Diagnosis) -> Iterator[str]:
    value = {name: one.value for name, one in answer.settings.items()}
    if answer.found.spec is not None:  # a rank's trace has its part of these
        whole = answer.found.spec.model
        value |= {n: getattr(whole, n) for n in ("layers", "vocab", "experts") if n in value}
    engine = value.get("engine", "unknown engine")
    compiled = "compiled" if value.get("compile") else "not compiled"
    on_host = answer.found.linked.on_host
    gpu = value.get("gpu", "CPU" if on_host else "unknown GPU")
    ranks = counted(value.get("gpus", 1), "rank" if on_host else "GPU")
    yield f"{answer.model}, {engine}, {compiled}, {gpu}, {ranks}"
    shape = [
        f"{value[n]} {word}" for n, word in (("layers", "layers"), ("hidden", "wide")) if n in value
    ]
    if "vocab" in value:
        tied = ("tied" if value["tied"] else "untied") if "tied" in value else ""
        shape.append(f"vocabulary {value['vocab']:,} {tied}".strip())
    if "experts" in value:
        shape.append(f"{value['top_k']} of {value['experts']} experts")
    told = [f"{name.replace('_', ' ')} {value[name]}" for name in _TOLD if name in value]
    yield from wrap(", ".join(shape + told + _axes(value)), _WIDE)
    doubts = [
        f"{one.name} {one.value}: {one.doubt}" for one in answer.settings.values() if one.doubt
    ]
    for doubt in doubts:
        yield from wrap(f"doubt: {doubt}", _WIDE)


def _axes(value: dict[str, object]) -> list[str]:
    sizes = [f"{axis}{value[axis]}" for axis in (*AXES, "ep") if value.get(axis, 1) != 1]
    return [" ".join(sizes)] if sizes else []


def _causes(answer: Diagnosis) -> Iterator[Part]:
    each = "rank" if answer.found.linked.on_host else "GPU"
    speed = f", {answer.tokens_s:,.0f} tokens/s/{each}" if answer.tokens_s else ""
    line = f"step {millis(answer.step_s)} ms measured{speed}"
    step = answer.expected_step
    if step is not None:
        line += f"; {millis(step.mid)} ms expected ({millis(step.low)} to {millis(step.high)})"
    yield line
    if answer.best is not None:
        yield from wrap(best_line(answer.best), _WIDE)
    if answer.scope and answer.causes:  # else it is part of the verdict
        yield from wrap(f"{answer.scope}.", _WIDE)
    if not answer.causes:
        yield from wrap(f"{answer.verdict}.", _WIDE)
        return
    for number, cause in enumerate(answer.causes[:5], 1):
        yield from _cause(number, cause, answer.step_s)


def best_line(best: BestEngine) -> str:
    """What the best engine needs, and where this one takes longer."""
    gains = "; ".join(
        f"{row.name} {millis(row.best_s)} ms (here {millis(row.seconds)})" for row in best.parts
    )
    if best.step is None:
        return f"with {best.name} (by bytes): {gains}"
    step = f"{millis(best.step.mid)} ms ({millis(best.step.low)} to {millis(best.step.high)})"
    line = f"best engine measured on this GPU: {best.name}, {step} predicted"
    return f"{line}; {gains}" if gains else line


def _cause(number: int, cause: Cause, step_s: float) -> Iterator[str]:
    share = 100.0 * cause.seconds / step_s
    sure = "" if cause.sure == "measured" else " (likely)"
    yield f"{number}. {cause.name}{sure}: {millis(cause.seconds)} ms, {share:.0f}% of the step"
    yield from wrap(cause.evidence, _WIDE, initial_indent="   ", subsequent_indent="   ")
    remedy = f"remedy: {cause.remedy}"
    yield from wrap(remedy, _WIDE, initial_indent="   ", subsequent_indent="   ")


def part_cells(answer: Diagnosis) -> Grid:
    rows = [row for row in answer.rows_of if row.seconds > 0.0005 * answer.step_s]
    return table(
        rows,
        *named("part=name", "ms=seconds:millis", "%=share:pct.1f", "expected=expected_s:millis"),
        ("80% interval", _interval),
        ("outside", _outside),
    )


def _interval(row: PartRow) -> str:
    if row.expected_low_s is None or row.expected_high_s is None:
        return "-"
    return f"{millis(row.expected_low_s)} to {millis(row.expected_high_s)}"


def _outside(row: PartRow) -> str:
    return "-" if abs(row.outside_s) < LEAST_SHOWN_S else f"{1e3 * row.outside_s:+.1f}"


def _foot(answer: Diagnosis) -> Iterator[str]:
    found, total = answer.found, sum(answer.found.parts.values())
    left = f", {found.steps.left_out} of warm-up left out" if found.steps.left_out else ""
    steps = f"{counted(len(found.steps.steps), 'step')} by {found.steps.found_by}{left}"
    placed = f"{100 * answer.unplaced_share:.1f}% of it unplaced"
    line = f"{steps}; parts sum to {100 * total / answer.step_s:.1f}% of the step, {placed}"
    yield from wrap(line, _WIDE)
    if answer.basis:
        yield from wrap(f"expected by {answer.basis}", _WIDE)
    if answer.stored:
        yield f"stored in {answer.stored}"


def _what_if(one: WhatIf) -> str:
    interval = f"{millis(one.step.low)} to {millis(one.step.high)}"
    text = f"{one.words}: {millis(one.step.mid)} ms ({interval})"
    gain = 100.0 * (one.speedup - 1.0) if one.speedup else 0.0
    speed = f", {one.tokens[1] / one.step.mid:,.0f} tokens/s/GPU" if one.tokens[1] else ""
    return f"what if {text}{speed}, {gain:+.1f}% speed"


def _ranks(answer: Diagnosis) -> Grid:
    return table(
        answer.ranks,
        *named("rank", "step ms=step_s:millis", "computes=busy_s:millis"),
        *named("exposed communication=exposed_s:millis", "waits=waiting_s:millis"),
    )


def _settings(answer: Diagnosis) -> Grid:
    return table(
        answer.settings.values(),
        *named("setting=name"),
        ("value", lambda one: or_dash(None, "") if one.value is None else str(one.value)),
        ("evidence", lambda one: one.evidence[:60]),
    )
