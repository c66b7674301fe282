"""What came of a training? A short table, and the loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fourfold.result.files.curve import Point
from fourfold.show import figures
from fourfold.units import show_seconds


def rows(plain: dict[str, Any]) -> list[list[str]]:
    """The same for a reader: one line for each quantity."""
    lines = [
        ["outcome", plain["outcome"], plain.get("note", "")],
        ["steps", f"{plain['steps_done']:,}", f"of {plain['steps']:,}"],
    ]
    if plain["steps_done"]:
        count = plain["recent_steps"]
        recent = f"last {count:,} steps" if count > 1 else "last step"
        lines += [
            ["first loss", f"{plain['first_loss']:.4f}", ""],
            ["last loss", f"{plain['recent_loss']:.4f}", f"mean of the {recent}"],
            ["best loss", f"{plain['best_loss']:.4f}", f"step {plain['best_step']:,}"],
            ["tokens", f"{plain['tokens']:,}", f"{plain['sequences']:,} sequences"],
            ["step time", show_seconds(plain["step_s"]), f"median of the {recent}"],
            ["tokens/s", f"{plain['tokens_s']:,.0f}", ""],
        ]
        if plain.get("unigram_nats") is not None:
            gap = plain["recent_loss"] - plain["unigram_nats"]
            note = f"entropy of single tokens; the last loss is {gap:+.4f}"
            lines.insert(4, ["unigram", f"{plain['unigram_nats']:.4f}", note])
        if plain["mfu_pct"] is not None:
            lines.append(["MFU", f"{plain['mfu_pct']:.2f} %", f"by {plain['convention']}"])
    lines.append(["checkpoint", plain["checkpoint"] or "none", plain.get("started", "")])
    return lines


def picture(points: Sequence[Point], title: str, path: str) -> bytes:
    """The drawn file's content; the suffix of `path` chooses the form."""
    figure = figures.empty_figure(path, 8.0, 4.5, "plot")
    axes = figure.subplots()
    steps = [point.step for point in points]
    losses = [point.loss for point in points]
    axes.plot(steps, losses, color="#b8cbe0", linewidth=1.0, label="each step")
    width = max(1, len(points) // 50)
    if width > 1:
        axes.plot(
            steps, running_mean(losses, width), color="#3b6ea5", linewidth=1.8,
            label=f"mean of {width} steps",
        )  # fmt: skip
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
    return figures.content(figure, path)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each place, of fewer at the start."""
    means, total = [], 0.0
    for place, value in enumerate(values):
        total += value - (values[place - width] if place >= width else 0.0)
        means.append(total / min(width, place + 1))
    return means
