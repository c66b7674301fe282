"""Pictures: matplotlib is an optional extra, imported when one is drawn."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fourfold.errors import UserError
from fourfold.spec import check
from fourfold.units import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fourfold.cost.fit.accuracy import Result
    from fourfold.cost.trace.steps import Program
    from fourfold.cost.trace.walk import StepRow
    from fourfold.result.files.curve import Point

SUFFIXES = (".png", ".svg", ".pdf")
COLOURS = ("#3b6ea5", "#6ba3c8", "#9b59b6", "#f2b880", "#d98880", "#7dbb8a", "#b8b8b8")


def must_be_picture(path: str, field: str = "picture", suffixes: Sequence[str] = SUFFIXES) -> str:
    """The suffix of a picture's name, before minutes are spent on what is drawn."""
    suffix = os.path.splitext(path)[1].lower()
    hint = f"use a name that ends in {' or '.join(suffixes)}"
    check.that(suffix in suffixes, field, path, "is not a supported picture format", hint)
    return suffix


def empty_figure(path: str, width: float, height: float, field: str = "picture") -> Figure:
    """In inches."""
    must_be_picture(path, field)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "needs matplotlib", field=field, value=path, hint="pip install matplotlib"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def content(figure: Figure, path: str) -> bytes:
    """The drawn file's content; the suffix of `path` chooses the form."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=os.path.splitext(path)[1][1:].lower(), dpi=130)
    return buffer.getvalue()


def accuracy_picture(results: Sequence[Result], path: str) -> bytes:
    """One row of two plots per way of scoring: predicted against measured, errors per source."""
    ways = list(dict.fromkeys(result.how for result in results))
    figure = empty_figure(path, 12.0, 4.2 * len(ways))
    axes = figure.subplots(len(ways), 2, squeeze=False)
    for way, (left, right) in zip(ways, axes, strict=True):
        chosen = [result for result in results if result.how == way]
        _scatter(left, chosen, way)
        _error_curves(right, chosen)
    return content(figure, path)


def _pairs(result: Result) -> tuple[Any, Any]:
    import numpy as np

    rows, answers = result.rows, result.answers
    ok = rows.usable & result.within & (rows.status != "oom")
    ok = ok & np.isfinite(rows.step_s) & np.isfinite(answers.step_s)
    return rows.step_s[ok], answers.step_s[ok]


def _scatter(axis: Axes, results: list[Result], title: str) -> None:
    import numpy as np

    low, high = np.inf, 0.0
    for result in results:
        measured, predicted = _pairs(result)
        if not measured.size:
            continue
        axis.loglog(measured, predicted, ".", ms=4, alpha=0.6, label=result.score.source)
        low, high = min(low, measured.min()), max(high, measured.max())
    if high > 0:
        line = np.array([low, high])
        axis.loglog(line, line, "k-", lw=0.8)
        axis.fill_between(line, line * 0.9, line * 1.1, color="k", alpha=0.1, lw=0)
    axis.set(xlabel="measured s/step", ylabel="predicted s/step", title=f"{title} (band: 10%)")
    axis.legend(fontsize=8)


def _error_curves(axis: Axes, results: list[Result]) -> None:
    """Share of rows within an error: read the median at 50% and p90 at 90%."""
    import numpy as np

    for result in results:
        measured, predicted = _pairs(result)
        if not measured.size:
            continue
        error = np.sort(100 * np.abs(predicted / measured - 1))
        share = 100 * (np.arange(error.size) + 1) / error.size
        score = result.score
        label = f"{score.source}: median {score.median_pct:.1f}%, p90 {score.p90_pct:.0f}%"
        axis.plot(error, share, label=label)
    axis.axhline(50, color="k", lw=0.5)
    axis.axhline(90, color="k", lw=0.5)
    axis.set(xlim=(0, 40), ylim=(0, 100), xlabel="error %", ylabel="rows within it, %")
    axis.legend(fontsize=8, loc="lower right")


def trace_picture(program: Program, rows: Sequence[StepRow], path: str) -> bytes:
    """Memory over the steps, which run downwards so that their names can be read."""
    figure = empty_figure(path, 9.0, max(2.5, 0.32 * len(rows) + 1.6))
    axes = figure.subplots()
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
    axes.set_title(
        f"{program.kind}: {counted(program.ranks, 'rank')}, {program.sizes['tokens']:,} tokens"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.margins(y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    return content(figure, path)


def loss_picture(points: Sequence[Point], title: str, path: str) -> bytes:
    figure = empty_figure(path, 8.0, 4.5, "plot")
    axes = figure.subplots()
    steps = [point.step for point in points]
    losses = [point.loss for point in points]
    axes.plot(steps, losses, color="#b8cbe0", linewidth=1.0, label="each step")
    width = max(1, len(points) // 50)
    if width > 1:
        axes.plot(
            steps,
            running_mean(losses, width),
            color="#3b6ea5",
            linewidth=1.8,
            label=f"mean of {width} steps",
        )
    rate = axes.twinx()
    rate.plot(steps, [point.lr for point in points], color="#d08770", linewidth=1.0, ls="--")
    rate.set_ylabel("learning rate", color="#b0603f")
    rate.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, loc="upper right")
    for some in (axes, rate):
        some.spines["top"].set_visible(False)
    return content(figure, path)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place, of fewer at the start."""
    means, total = [], 0.0
    for place, value in enumerate(values):
        total += value - (values[place - width] if place >= width else 0.0)
        means.append(total / min(width, place + 1))
    return means
