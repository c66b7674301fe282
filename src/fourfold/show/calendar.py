"""A calendar as a page: one sentence to act on, numbers of GPUs, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fourfold.show.pictures import content, empty_figure
from fourfold.text_table import Grid, Part, named, table
from fourfold.units import counted, short_s, show_bytes, show_count, show_mwh

if TYPE_CHECKING:
    from fourfold.verbs.calendar_request import Calendar, CalendarPoint

# Part of the time -> what it is.
PARTS = {
    "first": "steps",
    "slow": "slow-host slowdown",
    "evaluating": "evaluation pauses",
    "repeated": "steps repeated after loss spikes",
    "saving": "pauses to save checkpoints",
    "recovering": "recovery: detection, restart, reload",
    "redone": "steps lost since the last checkpoint",
    "waiting": "waiting for hosts in repair",
}


def calendar_page(answer: Calendar) -> Iterable[Part]:
    best = answer.best
    yield _sentence(answer, best)
    yield ""
    yield _points(answer)
    if best is not None:
        yield ""
        yield _where_it_goes(best)
        yield ""
        yield from _remarks(answer, best)


def _sentence(answer: Calendar, best: CalendarPoint | None) -> str:
    tokens = f"{show_count(answer.tokens)} tokens of {answer.model}"
    if best is None:
        asked = [f"{answer.deadline:g} days"] if answer.deadline is not None else []
        asked += [f"a budget of {answer.budget:,}"] if answer.budget is not None else []
        wanted = f"a chance of {100 * answer.chance:.0f}%"
        return f"No number of GPUs trains {tokens} within {' and '.join(asked)} with {wanted}."
    cost = f", cost {best.cost:,.0f}" if best.cost is not None else ""
    chances = ""
    if best.in_time is not None:
        chances += f" {100 * best.in_time:.0f}% chance to end within {answer.deadline:g} days."
    if best.in_budget is not None:
        chances += f" {100 * best.in_budget:.0f}% chance to stay within {answer.budget:,}."
    return (
        f"{tokens} on {best.gpus:,} x {answer.gpu} take {best.days:.1f} days (80%: "
        f"{best.days_low:.1f} to {best.days_high:.1f}), {best.gpu_hours:,.0f} GPU-hours, "
        f"{show_mwh(best.energy_mwh)}{cost}.{chances}"
    )


def _points(answer: Calendar) -> Grid:
    def days(one: CalendarPoint) -> str:
        return f"{one.days_low:.1f}-{one.days_high:.1f}"

    ended = [one for one in answer.points if not one.reason]
    columns = [
        ("GPUs", lambda one: f"{one.gpus:,}"),
        ("layout", lambda one: " then ".join(one.layouts)),
        ("s/step", lambda one: "; ".join(map(short_s, one.step_s))),
        ("days", lambda one: f"{one.days:.1f}"),
        ("days 80%", days),
        *named("GPU-hours=gpu_hours:,.0f", "goodput:.1%"),
    ]
    if any(one.cost is not None for one in ended):
        columns.append(("cost", lambda one: f"{one.cost or 0.0:,.0f}"))
    if answer.deadline is not None:
        columns.append(("in time", lambda one: f"{100 * (one.in_time or 0.0):.0f}%"))
    if answer.budget is not None:
        columns.append(("in budget", lambda one: f"{100 * (one.in_budget or 0.0):.0f}%"))
    return table(ended, *columns)


def _where_it_goes(best: CalendarPoint) -> Grid:
    shown = [(PARTS[name], share) for name, share in best.shares.items() if share > 5e-5]
    return table(
        shown,
        ("where the time goes", lambda one: one[0]),
        ("days", lambda one: f"{one[1] * best.days:.2f}"),
        ("share", lambda one: f"{100 * one[1]:.1f}%"),
    )


def _remarks(answer: Calendar, best: CalendarPoint) -> Iterable[str]:
    yield (
        f"{best.steps:,} steps; about {counted(round(best.interruptions), 'interruption')}; a "
        f"checkpoint of {show_bytes(best.checkpoint_bytes)} every {best.checkpoint_s / 60:.0f} "
        f"minutes"
    )
    yield from best.step_times
    left_out = ["the queue", "data preparation"]
    if best.spare_hosts:
        cost = "" if best.spare_cost is None else f", cost {best.spare_cost:,.0f}"
        hosts = counted(best.spare_hosts, "spare host")
        left_out.insert(0, f"{hosts} kept ready ({best.spare_gpu_hours:,.0f} GPU-hours{cost})")
    yield f"not counted: {', '.join(left_out)}"
    given = [
        f"{name}={one['value']:g}"
        for name, one in answer.assumptions.items()
        if isinstance(one, Mapping) and one["source"] == "as given"
    ]
    yield f"assumed: {', '.join(given) if given else 'as in published runs'}" + (
        "; 'fourfold calendar --assume list' has values and sources"
    )


def assumptions_page(rows: Sequence[Mapping[str, Any]]) -> Iterable[Part]:
    yield table(
        rows,
        *named("assumption=name", "value:g"),
        ("8 of 10", lambda one: f"{one['low']:g} to {one['high']:g}"),
    )
    for one in rows:
        yield ""
        yield f"{one['name']}: {one['about']}. {one['source']}"


def calendar_picture(answer: Calendar, path: str) -> bytes:
    """Days against GPUs with the 80% band, and the deadline."""
    figure = empty_figure(path, 7.5, 4.5)
    axes = figure.subplots()
    points = [one for one in answer.points if not one.reason]
    gpus = [one.gpus for one in points]
    low, high = [one.days_low for one in points], [one.days_high for one in points]
    axes.fill_between(gpus, low, high, color="#b8cbe0", alpha=0.6, label="8 of 10 trainings")
    days = [one.days for one in points]
    axes.plot(gpus, days, color="#3b6ea5", marker="o", markersize=4, label="expected")
    if answer.deadline is not None:
        axes.axhline(answer.deadline, color="#b03a2e", linewidth=1.2, label="deadline")
    if answer.best is not None:
        axes.plot([answer.best.gpus], [answer.best.days], "o", color="#b03a2e", markersize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axes.set_xlabel(f"{answer.gpu} GPUs")
    axes.set_ylabel("days")
    axes.set_title(f"{show_count(answer.tokens)} tokens of {answer.model}", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(which="both", color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return content(figure, path)
